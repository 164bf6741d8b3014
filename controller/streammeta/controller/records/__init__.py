"""What the log says: records as values, and their bytes."""
