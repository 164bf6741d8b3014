"""A controller's data directory: the log's segments, the quorum-state and the identity file."""
