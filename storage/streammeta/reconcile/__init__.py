"""Compares a bucket with the map: what is stored but not known, and known but not stored."""
