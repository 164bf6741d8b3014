"""Partitions without leaders: shared streams that every broker writes, reads and trims."""
