"""Applications, a folder each: models, baselines and commands.

What a user imports of them is in `sparsekit.models`.
"""
