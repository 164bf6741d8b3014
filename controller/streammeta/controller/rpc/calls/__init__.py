"""Calls: authentication, rates, memory budgets, auditing and metrics around every handler."""
