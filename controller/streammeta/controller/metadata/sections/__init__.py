"""Sections of a checkpoint: the metadata as columns, and back."""
