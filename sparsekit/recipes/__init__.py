"""Applications, one folder for each, with its models, baselines and commands.

Users import the models from `sparsekit.models`.
"""
