"""A broker that Kafka's stock clients accept: partition logs on streams, groups, topics in keys.

Needs the extra `kafka`. Transactions and compaction by key are refused.
"""
