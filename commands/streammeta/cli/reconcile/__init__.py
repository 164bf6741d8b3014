"""Commands of reconciliation."""
