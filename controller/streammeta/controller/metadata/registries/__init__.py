"""Registries of streams, objects, nodes and keys: what the metadata holds."""
