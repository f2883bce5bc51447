"""Applications, a folder each: models, baselines and commands.

Users import the models from `sparsekit.models`.
"""
