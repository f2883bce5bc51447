"""Implements the ops in plain torch; tests compare the kernels with these functions."""
