"""Verdicts on stored keys, and guards on the plan as a whole.

Pure and vectorised: rows are columns of one joined table, and a verdict is a value of the report.
Reads no clock, no bucket and no map; the owner of a key was decided before, by the strict parser of
keys. Guards are reasons not to trust a plan, however sure each of its verdicts is: one with a
failed guard is still written, as a report, and refused by apply.
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
"""Numbers or truths of all rows: an array, or a column of Spark, which compute alike."""

ABSENT = -1
"""No value, in every column: not listed, not in the map, no object id."""

_KINDS = 4
"""Kinds that the lowest bits of an object's attributes tell apart."""

WANTED_STATES = (common_pb2.OBJECT_STATE_COMMITTED, common_pb2.OBJECT_STATE_LINKED)
"""States in the map of objects that must be in the bucket."""


class Owner(enum.IntEnum):
    """Owner of a key, from the key alone."""

    OWN = 0
    OTHER_CLUSTER = 1
    FOREIGN = 2
    MARKER = 3
    LOG = 4
    QUARANTINED = 5
    # Not of a key, but of what a bucket with versions keeps behind one, where an inventory tells.
    OLD_VERSION = 6
    DELETE_MARKER = 7


class Reading(enum.IntEnum):
    """Finding on the bytes of an object, if a plan read them."""

    UNREAD = 0
    SOUND = 1
    CHECKSUM_DIFFERS = 2
    MALFORMED = 3  # its footer, index or links break the format


class Verdict(enum.StrEnum):
    """The verdict on one key; only `ORPHAN` makes it a candidate for deletion."""

    LIVE = "live"
    LINKED = "linked"  # live too: a composite object links it, and nothing else names it
    IN_FLIGHT = "in_flight"  # prepared, not committed yet: a writer may be at work
    DELETING = "deleting"  # the controller itself deletes it, or just has
    ORPHAN = "orphan"  # issued once, forgotten by the map, older than the grace period
    TOO_YOUNG = "too_young"  # an orphan but for its age
    NOT_ISSUED = "not_issued"  # ours by its name, but the map never issued the id
    UNDECIDED = "undecided"  # unknown, and perhaps of before a restore: never a candidate
    OTHER_CLUSTER = "other_cluster"
    FOREIGN = "foreign"
    MARKER = "marker"  # the cluster's marker, its claims on object ids, and reconciliation's lease
    LOG = "log"  # of a broker's write-ahead log: brokers delete what is past
    QUARANTINED = "quarantined"  # moved by an earlier run, which can be undone
    MISSING = "missing"  # the map wants it, the bucket does not have it
    UNLISTED = "unlisted"  # the same, but committed so late that the listing may have passed it
    SIZE_MISMATCH = "size_mismatch"  # live, with another size than the map recorded
    CHECKSUM_MISMATCH = "checksum_mismatch"  # live, with other bytes than the map has a sum of
    MALFORMED = "malformed"  # live, but its footer, index or links can't be read
    UNKNOWN_STATE = "unknown_state"  # the map knows it in a state this version does not
    UNCOMPARED = "uncompared"  # ours by its name; there was no copy of the map to compare with
    OLD_VERSION = "old_version"  # replaced or deleted, and kept by a bucket with versions
    DELETE_MARKER = "delete_marker"  # the mark of a deletion in such a bucket
    UNFINISHED_UPLOAD = "unfinished_upload"  # begun in parts: no key, though its parts have bytes


DAMAGED = (Verdict.SIZE_MISMATCH, Verdict.CHECKSUM_MISMATCH, Verdict.MALFORMED)
"""Verdicts on objects that are in the bucket, but not as the map has them."""

NOT_LISTED = {Verdict.MISSING, Verdict.UNLISTED}
"""Verdicts on objects of the map without a row of the listing."""

LOST = (Verdict.MISSING, *DAMAGED)
"""Verdicts on objects of which records can't be read."""


@dataclass(frozen=True, slots=True)
class JoinedColumns:
    """Rows of the listing joined with the map by object id; `ABSENT` where one side has none.

    A row with `size` `ABSENT` is an object of the map that no listed key belongs to. Sizes
    are bytes, times Unix milliseconds. `map_time_ms` is the commit time of a committed object,
    `reading` a `Reading`.
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
    """Inputs of verdicts besides the row.

    `next_object_id` is the map's: ids below it have been issued. Unknown objects modified at or
    after `young_from_ms` are left alone. Objects committed at or after `unlisted_from_ms` may have
    been stored after the listing passed their place, unless their ids are below `settled_below`:
    those were issued before a restore, and the listing began after it. `undecided` are ranges of
    ids that a restore has left open: what the map does not know there may be data.
    """

    next_object_id: int
    young_from_ms: int
    unlisted_from_ms: int
    undecided: tuple[tuple[int, int], ...] = ()
    settled_below: int = 0


WITHOUT_MAP = {
    Owner.OWN: Verdict.UNCOMPARED,
    Owner.OTHER_CLUSTER: Verdict.OTHER_CLUSTER,
    Owner.FOREIGN: Verdict.FOREIGN,
    Owner.MARKER: Verdict.MARKER,
    Owner.LOG: Verdict.LOG,
    Owner.QUARANTINED: Verdict.QUARANTINED,
    Owner.OLD_VERSION: Verdict.OLD_VERSION,
    Owner.DELETE_MARKER: Verdict.DELETE_MARKER,
}
"""The verdict on a listed key when there is no copy of the map."""


NUMBERED: tuple[str, ...] = ("", *Verdict)
"""Verdicts as `verdict_numbers` counts them; the empty string, 0: nothing to report."""

_NUMBER_OF = {verdict: number for number, verdict in enumerate(NUMBERED)}


def judge(rows: JoinedColumns, rules: Rules) -> VerdictColumn:
    """Return one verdict per row; the empty string: nothing to report."""
    return np.array([str(one) for one in NUMBERED])[verdict_numbers(rows, rules)]


def verdict_numbers(rows: JoinedColumns, rules: Rules) -> npt.NDArray[np.int8]:
    """Return the number of one verdict per row of arrays, the place of it in `NUMBERED`."""
    numbers = np.full(len(rows.size), _NUMBER_OF[OTHERWISE], dtype=np.int8)
    for condition, verdict in reversed(ladder(rows, rules)):
        if condition.any():  # most rules match no row of most batches
            np.copyto(numbers, np.int8(_NUMBER_OF[verdict]), where=condition)
    return numbers


OTHERWISE = Verdict.ORPHAN
"""The verdict on a row that no rule of the ladder matches."""


def ladder(rows: JoinedColumns, rules: Rules) -> list[tuple[Column, str]]:
    """Return the rules in their order, as conditions on rows: the first that matches wins.

    Nothing is reported, the verdict being empty, of an object that the bucket lacks and need not
    have. An orphan must pass every test that could save it. Uses nothing but comparison,
    arithmetic and `&`, `|`, `~`, which arrays and columns of Spark have in common.
    """
    listed = rows.size != ABSENT
    own = rows.owner == Owner.OWN
    known = rows.map_state != ABSENT
    wanted = reduce(operator.or_, (rows.map_state == one for one in WANTED_STATES))
    issued = (rows.object_id >= 0) & (rows.object_id < rules.next_object_id)
    # A remainder of Spark has the sign of what was divided, but for 0.
    is_composite = (rows.map_attributes - int(ObjectKind.COMPOSITE)) % _KINDS == 0
    wrong_size = (rows.size != rows.map_size) & ~is_composite
    undecided = [
        ((rows.object_id >= start) & (rows.object_id < end), Verdict.UNDECIDED)
        for start, end in rules.undecided
    ]
    was_stored = (rows.map_time_ms < rules.unlisted_from_ms) | (
        rows.object_id < rules.settled_below
    )

    return [
        (~listed & wanted & was_stored, Verdict.MISSING),
        (~listed & wanted, Verdict.UNLISTED),
        (~listed, ""),
        (rows.owner == Owner.OTHER_CLUSTER, Verdict.OTHER_CLUSTER),
        (rows.owner == Owner.MARKER, Verdict.MARKER),
        (rows.owner == Owner.LOG, Verdict.LOG),
        (rows.owner == Owner.QUARANTINED, Verdict.QUARANTINED),
        (rows.owner == Owner.OLD_VERSION, Verdict.OLD_VERSION),
        (rows.owner == Owner.DELETE_MARKER, Verdict.DELETE_MARKER),
        (~own, Verdict.FOREIGN),
        (wanted & wrong_size, Verdict.SIZE_MISMATCH),
        (wanted & (rows.reading == Reading.CHECKSUM_DIFFERS), Verdict.CHECKSUM_MISMATCH),
        (wanted & (rows.reading == Reading.MALFORMED), Verdict.MALFORMED),
        (rows.map_state == common_pb2.OBJECT_STATE_LINKED, Verdict.LINKED),
        (wanted, Verdict.LIVE),
        (rows.map_state == common_pb2.OBJECT_STATE_PREPARED, Verdict.IN_FLIGHT),
        (rows.map_state == common_pb2.OBJECT_STATE_MARK_DESTROYED, Verdict.DELETING),
        (known, Verdict.UNKNOWN_STATE),
        *undecided,
        (~issued, Verdict.NOT_ISSUED),
        (rows.modified_ms >= rules.young_from_ms, Verdict.TOO_YOUNG),
    ]


MISSING_SHARE = 0.01
"""Largest fraction of the map's objects that may be missing or damaged, 0..1."""

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
    """One guard's finding; `detail` gives the numbers and, if it failed, what to do."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """Counts of a plan: keys per verdict, committed objects of the map, bounds of issued ids.

    The map issues ids below `issued_below`; the bucket's claims reach `claimed_below`.
    """

    counts: Mapping[Verdict, int]
    map_objects: int
    issued_below: int
    claimed_below: int

    def keys(self, *verdicts: Verdict) -> int:
        """The number of keys with one of these verdicts."""
        return sum(self.counts.get(verdict, 0) for verdict in verdicts)


def check_guards(
    found: Evidence, *, max_share: float, max_candidates: int, allow_empty_map: bool
) -> tuple[GuardResult, ...]:
    """Every guard's finding; the limits are the user's, `max_share` a fraction 0..1."""
    return (
        _empty_map(found, allow_empty_map),
        _missing_objects(found),
        _not_issued(found),
        _map_age(found),
        _share(found, max_share),
        _candidates(found, max_candidates),
    )


def without_map(reason: str) -> tuple[GuardResult, ...]:
    """The finding on a listing that could not be compared with the map."""
    return (_finding("map_copied", False, reason, "make a new plan once the controllers answer"),)


def _finding(name: str, passed: bool, detail: str, advice: str) -> GuardResult:
    return GuardResult(name, passed, detail if passed else f"{detail}; {advice}")


def _empty_map(found: Evidence, allow_empty_map: bool) -> GuardResult:
    own = found.keys(*IN_BUCKET_AND_OURS)
    return _finding(
        "empty_map",
        found.map_objects > 0 or own == 0 or allow_empty_map,
        f"the map has {found.map_objects} committed objects, the bucket {own} keys of this cluster",
        "check that --connect names the right cluster, then give --allow-empty-map if every object"
        " was really destroyed",
    )


def _missing_objects(found: Evidence) -> GuardResult:
    missing = found.keys(Verdict.MISSING)
    damaged = found.keys(*DAMAGED)
    expected = missing + damaged + found.keys(Verdict.LIVE, Verdict.LINKED)
    share = (missing + damaged) / expected if expected else 0.0
    return _finding(
        "missing_objects",
        share <= MISSING_SHARE,
        f"of {expected} objects that the map expects, {missing} are missing in the bucket and"
        f" {damaged} are damaged: {share:.1%}, allowed {MISSING_SHARE:.0%}",
        "nothing may be deleted before this is explained: look the keys up in the plan's verdicts"
        " and restore the objects, or find what else deletes in the bucket",
    )


def _not_issued(found: Evidence) -> GuardResult:
    keys = found.keys(Verdict.NOT_ISSUED)
    return _finding(
        "not_issued",
        keys == 0,
        f"{keys} keys of this cluster have ids that the map never issued",
        "the map is older than the bucket or another cluster writes under this namespace: find out"
        " which before anything is deleted",
    )


def _map_age(found: Evidence) -> GuardResult:
    return _finding(
        "map_age",
        found.claimed_below <= found.issued_below,
        f"the map issues object ids below {found.issued_below}, the bucket's claims reach"
        f" {found.claimed_below}",
        "the map was restored to an earlier state: nothing may be deleted by it",
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
