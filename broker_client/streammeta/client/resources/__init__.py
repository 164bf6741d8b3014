"""Limited resources: threads, byte budgets, bandwidth, counters."""
