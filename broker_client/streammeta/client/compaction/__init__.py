"""Rewriting a node's objects into fewer and larger ones, and telling the map."""
