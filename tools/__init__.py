"""What a developer runs by hand or through make; no part of the package."""
