"""Parts of the stream reader: metadata cache, block cache, prefetch, lookup by time."""
