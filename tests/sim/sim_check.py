"""Violations: the exception for an invariant that does not hold."""

from __future__ import annotations


class Violation(Exception):  # noqa: N818 (the simulator's word for it)
    """An invariant does not hold; the message begins with its name."""


def check(condition: object, invariant: str, detail: str) -> None:
    """Raise unless the condition holds; for hot paths, test first and call `violated`."""
    if not condition:
        violated(invariant, detail)


def violated(invariant: str, detail: str) -> None:
    """Say that an invariant does not hold."""
    raise Violation(f"{invariant}: {detail}")
