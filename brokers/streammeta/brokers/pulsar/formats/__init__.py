"""Formats of offloaded ledgers. Pure."""
