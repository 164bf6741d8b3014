"""Registries of streams, objects, nodes and keys: the content of the metadata."""
