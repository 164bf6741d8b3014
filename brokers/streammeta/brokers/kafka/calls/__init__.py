"""Kafka's calls about records, topics and configurations."""
