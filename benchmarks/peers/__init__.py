"""What ours is compared with beyond torch; each is optional and skipped with a reason."""
