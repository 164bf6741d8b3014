"""The cluster of a run: controllers, identity and lease."""
