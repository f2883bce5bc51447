"""The ops in plain torch: they define the meaning that kernels are tested against."""
