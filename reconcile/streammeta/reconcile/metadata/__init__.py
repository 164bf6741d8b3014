"""Metadata of the controllers for reconciliation: exports and Spark tables."""
