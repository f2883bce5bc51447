"""Applications, one per folder, with their models, baselines and commands.

To use the models, import them from `sparsekit.models`.
"""
