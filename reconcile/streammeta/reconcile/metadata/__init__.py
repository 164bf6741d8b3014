"""The controllers' metadata for reconciliation: exports and Spark tables."""
