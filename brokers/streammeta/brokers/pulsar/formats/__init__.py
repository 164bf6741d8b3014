"""Formats of offloaded ledgers, without I/O."""
