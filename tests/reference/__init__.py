"""The ops in plain torch: what each one means, and what its kernels are tested against."""
