"""Anchors of audit logs: ends of their chains, kept as keys in the metadata of a majority.

Whoever cuts the end of an audit log can't change them: no caller writes to their namespace. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from streammeta.controller.trust.audit.lines import Chain
from streammeta.storage.parsing import DocumentError, parse_json

NAMESPACE = "_streammeta/audit"
"""Namespace of the keys. A key is a controller's id."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """A line of a controller's audit log by number and hash, and when the leader heard of it."""

    cluster_id: str
    seq: int
    head: str
    at_ms: int

    def encoded(self) -> bytes:
        """Return the value of the key."""
        # Sorted, so that equal anchors have equal bytes.
        return json.dumps(asdict(self), sort_keys=True).encode()

    def is_passed_by(self, chain: Chain, cluster_id: str) -> bool:
        """Return whether a chain has grown since. A chain from before a restore has ended."""
        return chain.seq > self.seq or cluster_id != self.cluster_id


def read_anchor(value: bytes) -> Anchor | None:
    """Return the anchor that a key's value holds, None if it holds none of this version."""
    try:
        found = parse_json(value)
        # An unknown member raises TypeError: anchors of other versions prove nothing here.
        anchor = Anchor(**found)
    except (DocumentError, TypeError):
        return None
    kinds = {"cluster_id": str, "seq": int, "head": str, "at_ms": int}
    # `type` and not isinstance: a bool is an int for isinstance, and never a line number.
    is_whole = all(type(getattr(anchor, name)) is kind for name, kind in kinds.items())
    return anchor if is_whole else None


def expected_lines(values: Mapping[str, bytes], cluster_id: str) -> dict[int, dict[int, str]]:
    """Return the hashes of anchored lines by controller and line's number, from keys and values."""
    found: dict[int, dict[int, str]] = {}
    for key, value in values.items():
        anchor = read_anchor(value)
        # After a restore the cluster has a new id, and the anchored chain belongs to the old one.
        if anchor is not None and anchor.cluster_id == cluster_id and key.isdecimal():
            found[int(key)] = {anchor.seq: anchor.head}
    return found
