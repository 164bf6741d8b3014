"""What a stream reader is made of: cached metadata, cached blocks, read-ahead, look-up by time."""
