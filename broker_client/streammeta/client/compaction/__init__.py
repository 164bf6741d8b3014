"""Compaction of stream set objects and stream objects: read sources, write outputs, commit."""
