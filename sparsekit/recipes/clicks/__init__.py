"""Predicts clicks with DLRM and DeepFM from files of any size."""
