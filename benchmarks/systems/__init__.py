"""Long checks of whole systems. Each prints its results, and exits with 1 if a check fails."""
