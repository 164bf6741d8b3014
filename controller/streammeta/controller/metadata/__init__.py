"""Cluster metadata: decides requests into records, replays records. No I/O, no clock."""
