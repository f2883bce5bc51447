"""The part of a table that one rank stores: keys, rows and vectors, and their saved state."""
