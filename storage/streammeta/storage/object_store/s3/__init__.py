"""The S3 object store, and the only users of botocore."""
