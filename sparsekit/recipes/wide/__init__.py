"""A wide network on hashed features."""
