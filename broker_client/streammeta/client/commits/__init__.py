"""Commits as messages of one stream to the leader."""
