"""A broker's write-ahead log in the bucket: it outlives the broker's machine."""
