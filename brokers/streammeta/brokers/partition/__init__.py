"""Partition log on streams: a single writer, epochs, Kafka record batches, and their state.

Formats, producer rules, segments and epochs are pure modules. `log` does the I/O. The package knows
neither a network protocol nor a cluster: its users decide who owns a partition.
"""
