"""Audit lines: JSON objects chained by hashes, anchors of chains, and sums of frequent calls.

An anchor is the end of a chain, kept as a key in the metadata of a majority. Whoever cuts the end
of an audit log can't change it: no caller writes to that namespace. Pure: times, identities and
targets are arguments, and lines are bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from hashlib import blake2b
from typing import Any

from streammeta.storage.parsing import DocumentError, parse_json

FORMAT = 1
"""Version of the lines' format, their member `v`."""

HASH_BYTES = 32

GENESIS = "0" * (2 * HASH_BYTES)
"""Hash of the line before, as the first line of a chain names it."""

SUMS_MAX = 10_000
"""Maximum number of sums. One more ends the minute early."""

DENIALS_A_MINUTE = 60
"""Maximum lines a minute for one principal, call and reason. Further denials are summed.

Otherwise a flood of rejected calls would cost more than the calls and fill the disk.
"""

_TEXT_MAX = 128
"""Maximum length of a text that a caller chose, in characters."""


class Verdict(StrEnum):
    """Outcome of a call, as far as it is known when its line is written."""

    BEGUN = "BEGUN"
    """Not yet decided. A line with the outcome follows unless the process ends."""
    OK = "OK"
    DENIED = "DENIED"
    """Not this caller's call: no identity, role, node or namespace for it."""
    REFUSED = "REFUSED"
    """Answered with an error. Nothing was changed, or only part of the request."""
    FAILED = "FAILED"
    """Ended by a status. Nothing was changed."""
    UNKNOWN = "UNKNOWN"
    """Ended by a status, or cancelled by its caller. It may have taken effect, or may later."""
    SUM = "SUM"
    """Many calls together."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a call: principal as text, certificate's fingerprint, address."""

    principal: str = "anonymous"
    cert: str = ""
    peer: str = ""
    """As gRPC writes it, e.g. `ipv4:10.0.0.9:4711`."""


@dataclass(frozen=True, slots=True)
class Sum:
    """Calls of one caller to one method. `rows` is 0 where rows are not counted."""

    calls: int
    rows: int = 0
    refusals: int = 0
    since_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditLine:
    """One line without its place in the chain. Times are in milliseconds since 1970.

    `offset` is the end of the log on which the outcome depends, None without one. `took_ms` is the
    time from the call's arrival to its outcome.
    """

    ts_ms: int
    node: int
    epoch: int
    leader: bool
    call: str
    verdict: Verdict
    origin: Origin = Origin()
    target: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    offset: int | None = None
    request_id: str = ""
    took_ms: float | None = None
    sum: Sum | None = None

    def members(self) -> dict[str, Any]:
        """Return the members that say something, in the order of a line."""
        said: dict[str, Any] = {
            "ts": _time(self.ts_ms),
            "node": self.node,
            "epoch": self.epoch,
            "leader": self.leader,
            "principal": self.origin.principal,
            "cert": f"sha256:{self.origin.cert}" if self.origin.cert else "",
            "peer": self.origin.peer,
            "call": self.call,
            "target": dict(self.target),
            "verdict": self.verdict.value,
            "reason": self.reason,
            "offset": self.offset,
            "request_id": clipped(self.request_id),
            "ms": None if self.took_ms is None else round(self.took_ms, 1),
            "sum": None if self.sum is None else _sum(self.sum),
        }

        # Lines are many. Absent members mean their defaults.
        return {name: value for name, value in said.items() if value not in (None, "", {})}


def _time(ms: int) -> str:
    seconds, rest = divmod(ms, 1000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:03}Z"


def _sum(one: Sum) -> dict[str, Any]:
    return {
        "calls": one.calls,
        "rows": one.rows,
        "refusals": one.refusals,
        "since": _time(one.since_ms),
    }


def clipped(text: str) -> str:
    """Return a text that a caller chose, no longer than a line bears."""
    return text if len(text) <= _TEXT_MAX else text[: _TEXT_MAX - 1] + "…"


def line_hash(line: bytes) -> str:
    """Return the hash of a line's bytes, without its newline, in hexadecimal digits."""
    return blake2b(line, digest_size=HASH_BYTES).hexdigest()


@dataclass(slots=True)
class Chain:
    """Place of the next line: number and hash of the one before."""

    seq: int = 0
    head: str = GENESIS

    def link(self, line: AuditLine, dropped: int = 0) -> bytes:
        """Return a line's bytes with its newline, and advance the chain.

        `dropped` is the number of lines lost since the previous one.
        """
        members = {"v": FORMAT, "seq": self.seq + 1, **line.members()}
        if dropped:
            members["dropped"] = dropped
        # ASCII alone: no text of a caller can move a terminal's cursor or forge a line.
        data = json.dumps({**members, "prev": self.head}, separators=(",", ":")).encode("ascii")
        self.seq += 1
        self.head = line_hash(data)
        return data + b"\n"


class Sums:
    """Calls counted by principal and method since the last minute's end."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], list[int]] = {}

    def __len__(self) -> int:
        return len(self._sums)

    def add(
        self,
        principal: str,
        call: str,
        *,
        calls: int = 1,
        rows: int = 0,
        refusals: int = 0,
        offset: int = -1,
    ) -> None:
        """Count calls. `offset` is the largest offset of their answers, -1 without one."""
        found = self._sums.get((principal, call))
        if found is None:
            self._sums[(principal, call)] = [calls, rows, refusals, offset]
            return
        found[0] += calls
        found[1] += rows
        found[2] += refusals
        if offset > found[3]:
            found[3] = offset

    def drain(self, since_ms: int) -> Iterator[tuple[str, str, Sum, int | None]]:
        """Yield (principal, call, sum, last offset) of each sum, and reset all."""
        # Calls counted while the caller writes lines belong to the next minute.
        drained, self._sums = self._sums, {}
        for (principal, call), (calls, rows, refusals, offset) in sorted(drained.items()):
            counted = Sum(calls, rows, refusals, since_ms)
            yield principal, call, counted, None if offset < 0 else offset


class DenialLimit:
    """Denials recorded one by one, up to a number a minute for each principal, call and reason."""

    def __init__(self, a_minute: int = DENIALS_A_MINUTE) -> None:
        self._a_minute = a_minute
        self._seen: dict[tuple[str, str, str], int] = {}

    def has_room(self, principal: str, call: str, reason: str) -> bool:
        """Return whether one more denial has its own line."""
        key = (principal, call, reason)
        seen = self._seen.get(key, 0)
        # Known keys pass the second limit: only new ones would make the table larger.
        if seen >= self._a_minute or (not seen and len(self._seen) >= SUMS_MAX):
            return False
        self._seen[key] = seen + 1
        return True

    def begin_minute(self) -> None:
        """Reset the counts."""
        self._seen.clear()


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
