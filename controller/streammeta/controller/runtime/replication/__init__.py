"""The loop around the quorum: appends, deliveries, reads, and the callers that wait."""
