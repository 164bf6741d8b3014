"""Places that keep objects under keys: S3, a local directory, memory; one protocol for all."""
