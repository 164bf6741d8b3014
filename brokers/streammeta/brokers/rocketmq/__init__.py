"""Queues of topics in the files of RocketMQ's tiered storage.

Formats (`message`, `consume_queue`, `key_index`, `names`, `metadata`) do no I/O. Segments and flat
files order writes to a `SegmentStorage`. Dispatch and fetch move messages in and out.
"""
