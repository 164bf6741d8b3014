"""Handlers of Kafka's APIs for records, topics and configurations."""
