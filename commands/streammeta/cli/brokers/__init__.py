"""Commands about brokers, their compaction, and the Kafka broker."""
