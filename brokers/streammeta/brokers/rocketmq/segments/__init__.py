"""Segments of flat files, and the stores that hold them."""
