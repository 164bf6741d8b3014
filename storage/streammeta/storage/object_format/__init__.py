"""The bytes of stored objects: blocks, index, footer, links, keys. No I/O of any kind."""
