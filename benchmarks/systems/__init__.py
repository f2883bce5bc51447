"""Long-running checks of complete applications. Each exits with 1 if a requirement is not met."""
