"""Storage: object format, object stores, segmented logs, and the planning of compactions."""
