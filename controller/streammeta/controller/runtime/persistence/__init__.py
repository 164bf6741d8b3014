"""Disk work of a replica: its log, its checkpoints, its free space."""
