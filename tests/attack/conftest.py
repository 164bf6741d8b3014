"""Fixtures of attacks: those of trust."""

from tests.trust.conftest import authority

__all__ = ["authority"]
