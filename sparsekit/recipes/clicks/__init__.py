"""Predicts clicks with DLRM and DeepFM, on files of any size."""
