"""Files of a cluster in its bucket: marker, backups, runs of reconciliation."""
