"""A partition log on streams: one writer, epochs, Kafka record batches, state beside the data.

Formats, rules of producers, segments and epochs are pure modules; `log` does the I/O. The package
knows no network protocol and no cluster: who owns a partition is decided above it.
"""
