"""Life of objects and brokers outside the log: expiry, deletion, bucket ownership, failover."""
