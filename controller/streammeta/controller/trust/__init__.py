"""Identities of callers, rules by method and by node, their refusals, quotas and the audit log."""
