"""Keys of the quarantine, which keeps deleted objects until they are restored or removed.

A key has one place in it, because object ids are never issued twice. An interrupted move can
therefore be repeated, and restoring an object needs no record.
"""

from __future__ import annotations


def quarantine_prefix(namespace: str) -> str:
    """Return the key prefix of a namespace's quarantine."""
    return f"{namespace}/quarantine/"


def quarantined_key(key: str, namespace: str) -> str:
    """Return the key of an object in quarantine."""
    return quarantine_prefix(namespace) + key


def is_quarantined(key: str, namespace: str) -> bool:
    """Return whether a key belongs to an object in quarantine."""
    return key.startswith(quarantine_prefix(namespace))
