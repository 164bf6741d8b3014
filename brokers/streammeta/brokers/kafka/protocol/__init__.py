"""Kafka's protocol on the wire."""
