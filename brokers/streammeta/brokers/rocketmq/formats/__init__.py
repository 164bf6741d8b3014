"""Formats of RocketMQ's tiered storage, without I/O."""
