"""Adoption after a restore: what the bucket holds beyond the map, and what of it continues it."""
