"""Objects in a bucket: their format, the stores that hold them, and the bucket's reconciliation."""
