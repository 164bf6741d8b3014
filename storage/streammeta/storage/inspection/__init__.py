"""Inspection of stored objects, sound or not, and of their payloads."""
