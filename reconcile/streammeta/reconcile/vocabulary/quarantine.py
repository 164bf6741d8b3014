"""Keys of the quarantine: where in the bucket objects wait that can still be brought back.

A key has one place there, since object ids are never issued twice. So a move that was cut off is
repeated without a trace, and what lies there needs no record to be brought back.
"""

from __future__ import annotations


def quarantine_prefix(namespace: str) -> str:
    """Return the prefix under which a namespace's quarantine lies."""
    return f"{namespace}/quarantine/"


def quarantined_key(key: str, namespace: str) -> str:
    """Return the place of a key in quarantine."""
    return quarantine_prefix(namespace) + key


def is_quarantined(key: str, namespace: str) -> bool:
    """True if a key is that of an object in quarantine."""
    return key.startswith(quarantine_prefix(namespace))
