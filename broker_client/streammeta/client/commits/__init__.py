"""Commits, sent to the leader in messages of one stream."""
