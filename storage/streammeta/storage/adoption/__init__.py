"""Adoption after a restore: objects in the bucket that continue the restored metadata's streams."""
