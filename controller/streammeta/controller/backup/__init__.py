"""Backup of the log to a bucket, its verification, and restoring from it."""
