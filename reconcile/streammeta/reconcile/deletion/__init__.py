"""Deletion of a plan's candidates, each checked at the leader just before."""
