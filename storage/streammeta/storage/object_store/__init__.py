"""Object stores: one protocol, implemented by S3 and by a local directory."""
