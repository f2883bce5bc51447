"""Tables: what one rank stores. Keys and their rows, vectors, and how both are saved and loaded."""
