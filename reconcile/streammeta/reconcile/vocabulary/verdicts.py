"""Verdicts on stored keys, and guards on the plan as a whole.

Pure and vectorized: rows are columns of a joined table, and a verdict is a value of the report. The
strict parser of keys has determined the owner of each key before. A guard is a reason not to trust
a plan as a whole. A plan with a failed guard is still written as a report, and apply rejects it.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streammeta.storage.object_format.object_key import ObjectKind
from streammeta.v1 import common_pb2

Int64Column: TypeAlias = npt.NDArray[np.int64]
VerdictColumn: TypeAlias = npt.NDArray[np.str_]
Column: TypeAlias = Any
"""Numbers or booleans of all rows: an array or a Spark column, with the same operators."""

ABSENT = -1
"""Missing value in every column: not listed, not in the metadata, no object id."""

_KINDS = 4
"""Number of kinds in the lowest bits of an object's attributes."""

WANTED_STATES = (common_pb2.OBJECT_STATE_COMMITTED, common_pb2.OBJECT_STATE_LINKED)
"""States of objects that must be in the bucket."""


class Owner(enum.IntEnum):
    """Owner of a key, determined by the key."""

    OWN = 0
    OTHER_CLUSTER = 1
    FOREIGN = 2
    MARKER = 3
    LOG = 4
    QUARANTINED = 5
    # Only in inventories of buckets with versions: rows that are not current keys.
    OLD_VERSION = 6
    DELETE_MARKER = 7


class Reading(enum.IntEnum):
    """Finding about the bytes of an object, if a plan read them."""

    UNREAD = 0
    SOUND = 1
    CHECKSUM_DIFFERS = 2
    MALFORMED = 3  # its footer, index or links break the format


class Verdict(enum.StrEnum):
    """Verdict on a key. Only `ORPHAN` makes it a candidate for deletion."""

    LIVE = "live"
    LINKED = "linked"  # live too: only a composite object refers to it
    IN_FLIGHT = "in_flight"  # prepared, not committed: a writer may be working on it
    DELETING = "deleting"  # the controller deletes it, or just did
    ORPHAN = "orphan"  # issued once, forgotten by the metadata, older than the grace period
    TOO_YOUNG = "too_young"  # like an orphan, but within the grace period
    NOT_ISSUED = "not_issued"  # the cluster's key, but the metadata never issued its id
    UNDECIDED = "undecided"  # unknown, possibly from before a restore: never a candidate
    OTHER_CLUSTER = "other_cluster"
    FOREIGN = "foreign"
    MARKER = "marker"  # the cluster's marker, its claims on object ids, and reconciliation's lease
    LOG = "log"  # part of a broker's write-ahead log, which brokers clean up
    QUARANTINED = "quarantined"  # moved by an earlier run, which can be undone
    MISSING = "missing"  # in the metadata, but not in the bucket
    UNLISTED = "unlisted"  # the same, but committed so late that the listing may have missed it
    SIZE_MISMATCH = "size_mismatch"  # live, with another size than the metadata recorded
    CHECKSUM_MISMATCH = "checksum_mismatch"  # live, its checksum differs from the metadata
    MALFORMED = "malformed"  # live, but its footer, index or links can't be read
    UNKNOWN_STATE = "unknown_state"  # its state in the metadata is unknown to this version
    UNCOMPARED = "uncompared"  # the cluster's key, without a copy of the metadata to compare
    OLD_VERSION = "old_version"  # replaced or deleted, and kept by a bucket with versions
    DELETE_MARKER = "delete_marker"  # the mark of a deletion in such a bucket
    UNFINISHED_UPLOAD = "unfinished_upload"  # a multipart upload: no key, but its parts have bytes


DAMAGED = (Verdict.SIZE_MISMATCH, Verdict.CHECKSUM_MISMATCH, Verdict.MALFORMED)
"""Verdicts on objects in the bucket that differ from the metadata."""

NOT_LISTED = {Verdict.MISSING, Verdict.UNLISTED}
"""Verdicts on objects in the metadata without a listed row."""

LOST = (Verdict.MISSING, *DAMAGED)
"""Verdicts on objects with unreadable records."""


@dataclass(frozen=True, slots=True)
class JoinedColumns:
    """Rows of the listing joined with the metadata by id, `ABSENT` where one side is missing.

    A row with `size` `ABSENT` is an object in the metadata without a listed key. Sizes are bytes,
    times Unix milliseconds. `map_time_ms` is the commit time of a committed object, `reading` a
    `Reading`.
    """

    owner: Column
    object_id: Column
    size: Column
    modified_ms: Column
    map_state: Column
    map_size: Column
    map_time_ms: Column
    map_attributes: Column
    reading: Column


@dataclass(frozen=True, slots=True)
class Rules:
    """Inputs of verdicts in addition to the row.

    Ids below the metadata's `next_object_id` have been issued. Unknown objects modified at or after
    `young_from_ms` are left alone. Objects committed at or after `unlisted_from_ms` may have been
    stored after the listing passed their position, unless their ids are below `settled_below`.
    Those ids were issued before a restore, and the listing began after it. `undecided` are ranges
    of ids left open by a restore, where unknown objects may contain data.
    """

    next_object_id: int
    young_from_ms: int
    unlisted_from_ms: int
    undecided: tuple[tuple[int, int], ...] = ()
    settled_below: int = 0


WITHOUT_METADATA = {
    Owner.OWN: Verdict.UNCOMPARED,
    Owner.OTHER_CLUSTER: Verdict.OTHER_CLUSTER,
    Owner.FOREIGN: Verdict.FOREIGN,
    Owner.MARKER: Verdict.MARKER,
    Owner.LOG: Verdict.LOG,
    Owner.QUARANTINED: Verdict.QUARANTINED,
    Owner.OLD_VERSION: Verdict.OLD_VERSION,
    Owner.DELETE_MARKER: Verdict.DELETE_MARKER,
}
"""Verdicts on listed keys without a copy of the metadata."""


NUMBERED: tuple[str, ...] = ("", *Verdict)
"""Verdicts by number. Number 0, the empty string, means nothing to report."""

_NUMBER_OF = {verdict: number for number, verdict in enumerate(NUMBERED)}


def judge(rows: JoinedColumns, rules: Rules) -> VerdictColumn:
    """Return a verdict per row, the empty string for nothing to report."""
    return np.array([str(verdict) for verdict in NUMBERED])[verdict_numbers(rows, rules)]


def verdict_numbers(rows: JoinedColumns, rules: Rules) -> npt.NDArray[np.int8]:
    """Return the number of the verdict per row, its index in `NUMBERED`."""
    numbers = np.full(len(rows.size), _NUMBER_OF[OTHERWISE], dtype=np.int8)
    # Reversed, so that the first rule of the ladder is written last and wins.
    for condition, verdict in reversed(ladder(rows, rules)):
        if condition.any():  # most rules match no row of most batches
            np.copyto(numbers, np.int8(_NUMBER_OF[verdict]), where=condition)
    return numbers


OTHERWISE = Verdict.ORPHAN
"""Verdict on a row that no rule matches."""


def ladder(rows: JoinedColumns, rules: Rules) -> list[tuple[Column, str]]:
    """Return the rules in order, as conditions on rows. The first matching rule wins.

    An object that is neither in the bucket nor required there has an empty verdict. An orphan must
    pass every test that could save it. The rules use only comparison, arithmetic and `&`, `|`, `~`,
    which arrays and Spark columns share.
    """
    listed = rows.size != ABSENT
    own = rows.owner == Owner.OWN
    known = rows.map_state != ABSENT
    wanted = reduce(operator.or_, (rows.map_state == state for state in WANTED_STATES))
    issued = (rows.object_id >= 0) & (rows.object_id < rules.next_object_id)
    # Spark's remainder has the sign of the dividend, so compare only with 0.
    is_composite = (rows.map_attributes - int(ObjectKind.COMPOSITE)) % _KINDS == 0
    # The metadata records the data of a composite object, not the size of its links.
    wrong_size = (rows.size != rows.map_size) & ~is_composite
    undecided = [
        ((rows.object_id >= start) & (rows.object_id < end), Verdict.UNDECIDED)
        for start, end in rules.undecided
    ]
    was_stored = (rows.map_time_ms < rules.unlisted_from_ms) | (
        rows.object_id < rules.settled_below
    )

    return [
        # First the rows without a key: all other rules are about a listed key.
        (~listed & wanted & was_stored, Verdict.MISSING),
        (~listed & wanted, Verdict.UNLISTED),
        (~listed, ""),
        (rows.owner == Owner.OTHER_CLUSTER, Verdict.OTHER_CLUSTER),
        (rows.owner == Owner.MARKER, Verdict.MARKER),
        (rows.owner == Owner.LOG, Verdict.LOG),
        (rows.owner == Owner.QUARANTINED, Verdict.QUARANTINED),
        (rows.owner == Owner.OLD_VERSION, Verdict.OLD_VERSION),
        (rows.owner == Owner.DELETE_MARKER, Verdict.DELETE_MARKER),
        # Below here every key is one of this cluster's objects.
        (~own, Verdict.FOREIGN),
        (wanted & wrong_size, Verdict.SIZE_MISMATCH),
        (wanted & (rows.reading == Reading.CHECKSUM_DIFFERS), Verdict.CHECKSUM_MISMATCH),
        (wanted & (rows.reading == Reading.MALFORMED), Verdict.MALFORMED),
        (rows.map_state == common_pb2.OBJECT_STATE_LINKED, Verdict.LINKED),
        (wanted, Verdict.LIVE),
        (rows.map_state == common_pb2.OBJECT_STATE_PREPARED, Verdict.IN_FLIGHT),
        (rows.map_state == common_pb2.OBJECT_STATE_MARK_DESTROYED, Verdict.DELETING),
        (known, Verdict.UNKNOWN_STATE),
        # Before the rules that end in ORPHAN: a restore may still adopt these objects.
        *undecided,
        # A key with a future id is never deleted. It fails a guard.
        (~issued, Verdict.NOT_ISSUED),
        (rows.modified_ms >= rules.young_from_ms, Verdict.TOO_YOUNG),
    ]


# Single losses are findings. More than this looks like the wrong bucket or metadata.
MISSING_SHARE = 0.01
"""Largest fraction of the objects in the metadata that may be missing or damaged, 0..1."""

IN_BUCKET_AND_OURS = (
    Verdict.LIVE,
    Verdict.LINKED,
    Verdict.IN_FLIGHT,
    Verdict.DELETING,
    Verdict.ORPHAN,
    Verdict.TOO_YOUNG,
    Verdict.NOT_ISSUED,
    Verdict.UNDECIDED,
    *DAMAGED,
    Verdict.UNKNOWN_STATE,
)
"""Verdicts on keys in the bucket that are, or were, objects of this cluster."""


@dataclass(frozen=True, slots=True)
class GuardResult:
    """Finding of a guard. `detail` has the numbers and, after a failure, the next step."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """Counts of a plan: keys per verdict, committed objects in the metadata, bounds of issued ids.

    The metadata issues ids below `issued_below`, and the bucket's claims reach `claimed_below`.
    """

    counts: Mapping[Verdict, int]
    map_objects: int
    issued_below: int
    claimed_below: int

    def keys(self, *verdicts: Verdict) -> int:
        """Return the number of keys with one of these verdicts."""
        return sum(self.counts.get(verdict, 0) for verdict in verdicts)


def check_guards(
    found: Evidence, *, max_share: float, max_candidates: int, allow_empty_map: bool
) -> tuple[GuardResult, ...]:
    """Return the finding of every guard. `max_share` is a fraction, 0..1."""
    return (
        _empty_map(found, allow_empty_map),
        _missing_objects(found),
        _not_issued(found),
        _map_age(found),
        _share(found, max_share),
        _candidates(found, max_candidates),
    )


def fail_without_metadata(reason: str) -> tuple[GuardResult, ...]:
    """Return the finding for a listing without a copy of the metadata."""
    return (_finding("map_copied", False, reason, "make a new plan once the controllers answer"),)


def _finding(name: str, passed: bool, detail: str, advice: str) -> GuardResult:
    return GuardResult(name, passed, detail if passed else f"{detail}; {advice}")


def _empty_map(found: Evidence, allow_empty_map: bool) -> GuardResult:
    own = found.keys(*IN_BUCKET_AND_OURS)
    return _finding(
        "empty_map",
        found.map_objects > 0 or own == 0 or allow_empty_map,
        f"metadata has {found.map_objects} committed objects, the bucket {own} keys of the cluster",
        "check that --connect names the right cluster, then use --allow-empty-map if every object"
        " was really destroyed",
    )


def _missing_objects(found: Evidence) -> GuardResult:
    missing = found.keys(Verdict.MISSING)
    damaged = found.keys(*DAMAGED)
    # Objects too fresh for the listing are neither.
    expected = missing + damaged + found.keys(Verdict.LIVE, Verdict.LINKED)
    share = (missing + damaged) / expected if expected else 0.0
    return _finding(
        "missing_objects",
        share <= MISSING_SHARE,
        f"of {expected} objects in the metadata, {missing} are missing in the bucket and {damaged}"
        f" are damaged: {share:.1%}, allowed {MISSING_SHARE:.0%}",
        "find the cause before you delete anything: look up the keys in the plan's verdicts, and"
        " restore the objects or find the other program that deletes in the bucket",
    )


def _not_issued(found: Evidence) -> GuardResult:
    keys = found.keys(Verdict.NOT_ISSUED)
    return _finding(
        "not_issued",
        keys == 0,
        f"{keys} keys of this cluster have ids that the metadata never issued",
        "the metadata is older than the bucket, or another cluster writes under this namespace:"
        " find out which before you delete anything",
    )


def _map_age(found: Evidence) -> GuardResult:
    return _finding(
        "map_age",
        found.claimed_below <= found.issued_below,
        f"metadata issues object ids below {found.issued_below}, the bucket's claims reach"
        f" {found.claimed_below}",
        "the metadata was restored to an earlier state: delete nothing with it",
    )


def _share(found: Evidence, allowed: float) -> GuardResult:
    own = found.keys(*IN_BUCKET_AND_OURS)
    candidates = found.keys(Verdict.ORPHAN)
    share = candidates / own if own else 0.0
    return _finding(
        "max_share",
        share <= allowed,
        f"{candidates} of {own} keys of this cluster are candidates: {share:.1%}, allowed"
        f" {allowed:.1%}",
        "look at the candidates, then plan again with a larger --max-share",
    )


def _candidates(found: Evidence, allowed: int) -> GuardResult:
    candidates = found.keys(Verdict.ORPHAN)
    return _finding(
        "max_candidates",
        candidates <= allowed,
        f"{candidates} candidates, allowed {allowed}",
        "look at the candidates, then plan again with a larger --max-candidates",
    )
