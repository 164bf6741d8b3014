"""Checkpoint files: their format, writer and reader. Knows no map."""
