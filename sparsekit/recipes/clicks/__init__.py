"""Probabilities of clicks: DLRM and DeepFM, on files of any size."""
