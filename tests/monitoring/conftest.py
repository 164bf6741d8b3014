"""Fixtures of the third plane: those of trust."""

from tests.trust.conftest import authority, stranger

__all__ = ["authority", "stranger"]
