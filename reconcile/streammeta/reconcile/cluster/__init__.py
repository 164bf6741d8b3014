"""The cluster that a run belongs to: its controllers, its identity, its lease."""
