"""Programs that developers run directly or through make; they are not part of the package."""
