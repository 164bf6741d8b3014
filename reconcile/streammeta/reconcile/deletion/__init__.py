"""Deletion of a plan's candidates, each checked with the leader just before."""
