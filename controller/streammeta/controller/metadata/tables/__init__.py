"""Columns: growable tables, their indexes and views, and shared values."""
