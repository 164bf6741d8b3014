"""Reconciliation of a bucket with the map: objects stored but unknown, and known but missing."""
