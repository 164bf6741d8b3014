"""Measurements of the last day, kept in memory."""
