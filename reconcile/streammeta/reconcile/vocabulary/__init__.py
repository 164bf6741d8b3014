"""Words of reconciliation: verdicts, tables, attempts, errors. Pure."""
