"""Compaction of set objects and of stream objects: read sources, write outputs, commit."""
