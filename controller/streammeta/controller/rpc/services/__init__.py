"""Handlers of the contract's services."""
