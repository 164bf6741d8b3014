"""Formats of RocketMQ's tiered storage. Pure."""
