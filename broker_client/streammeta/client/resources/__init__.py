"""Bounded resources: threads, byte budgets, bandwidth, counts."""
