"""Broker for stock Kafka clients: partition logs on streams, groups, topics in metadata keys.

Needs the extra `kafka`. Transactions and compaction by key are not supported.
"""
