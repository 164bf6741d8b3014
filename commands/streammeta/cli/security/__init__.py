"""Commands about certificates and audit logs."""
