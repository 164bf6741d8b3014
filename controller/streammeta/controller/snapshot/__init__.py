"""Checkpoint files: their format, writer and reader, independent of the metadata."""
