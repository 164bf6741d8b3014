"""Named bytes: in memory, in a bucket, or as named objects of a cluster."""
