"""Vocabulary of reconciliation: verdicts, tables, attempts and errors."""
