"""Segments of flat files, and their stores."""
