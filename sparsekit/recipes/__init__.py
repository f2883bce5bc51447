"""Applications. Each folder contains one, with its models, baselines and commands.

To use the models, import them from `sparsekit.models`.
"""
