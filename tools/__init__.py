"""Programs that developers run by hand or through make; they are not part of the package."""
