"""Kafka's wire protocol: requests, responses, limits and error codes."""
