"""Writing: records are buffered, encoded, uploaded and committed in order."""
