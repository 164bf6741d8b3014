"""Layout of write-ahead logs in a bucket: keys and encoding of their slots. Pure."""
