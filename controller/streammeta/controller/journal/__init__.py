"""Data directory of a controller: log segments, snapshots, quorum-state and identity file."""
