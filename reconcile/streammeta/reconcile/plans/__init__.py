"""Folders of plans."""
