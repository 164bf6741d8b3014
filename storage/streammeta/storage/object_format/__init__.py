"""Object format: records, blocks, index, footer, links and keys. Does no I/O."""
