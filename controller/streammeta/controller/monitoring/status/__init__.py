"""Status of a cluster as one document: figures, alarms, the largest streams."""
