"""Files of a cluster in its bucket: marker, backups, reconcile runs."""
