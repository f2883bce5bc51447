"""Long checks of whole systems: each prints its figures, and exits with 1 if a line fails."""
