"""Object format: records, blocks, index, footer, links, keys. No I/O of any kind."""
