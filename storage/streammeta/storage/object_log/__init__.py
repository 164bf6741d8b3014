"""Layout of write-ahead logs in a bucket: keys and bytes of their slots. Pure."""
