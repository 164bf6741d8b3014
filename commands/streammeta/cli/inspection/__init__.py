"""Commands that inspect objects, stores and the metadata."""
