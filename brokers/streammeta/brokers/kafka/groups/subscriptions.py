"""Topics in a consumer's subscription, parsed from the metadata of its protocol."""

from __future__ import annotations

import struct

CONSUMER = "consumer"
"""Protocol type of consumers."""

_HEAD = struct.Struct(">hi")
_LENGTH = struct.Struct(">h")


def subscribed_topics(metadata: bytes) -> frozenset[str] | None:
    """Return the topics of a consumer's subscription, None if it is unreadable."""
    try:
        _, count = _HEAD.unpack_from(metadata)
        at, topics = _HEAD.size, set()
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(metadata, at)
            at += _LENGTH.size + length
            if length < 0 or at > len(metadata):
                return None
            topics.add(metadata[at - length : at].decode())
    except (struct.error, UnicodeDecodeError):
        return None
    return frozenset(topics)
