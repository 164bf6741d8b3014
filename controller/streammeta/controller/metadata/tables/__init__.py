"""Columns: growable tables, their indexes and views, and the values that they hold."""
