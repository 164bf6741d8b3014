"""Verdicts on stored keys, and guards on the plan as a whole.

Pure and vectorised: rows are columns of one joined table, and a verdict is a value of the report.
Reads no clock, no bucket and no map; the owner of a key was decided before, by the strict parser of
keys. Guards are reasons not to trust a plan, however sure each of its verdicts is: one with a
failed guard is still written, as a report, and refused by apply.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from streammeta.storage.object_format.object_key import ObjectKind
from streammeta.v1 import common_pb2

Int64Column: TypeAlias = npt.NDArray[np.int64]
VerdictColumn: TypeAlias = npt.NDArray[np.str_]

ABSENT = -1
"""No value, in every column: not listed, not in the map, no object id."""

_KIND_MASK = 0b11


WANTED_STATES = (common_pb2.OBJECT_STATE_COMMITTED, common_pb2.OBJECT_STATE_LINKED)
"""States in the map of objects that must be in the bucket."""


class Owner(enum.IntEnum):
    """Owner of a key, from the key alone."""

    OWN = 0
    OTHER_CLUSTER = 1
    FOREIGN = 2
    MARKER = 3


class Verdict(enum.StrEnum):
    """The verdict on one key; only `ORPHAN` makes it a candidate for deletion."""

    LIVE = "live"
    IN_FLIGHT = "in_flight"  # prepared, not committed yet: a writer may be at work
    DELETING = "deleting"  # the controller itself deletes it, or just has
    ORPHAN = "orphan"  # issued once, forgotten by the map, older than the grace period
    TOO_YOUNG = "too_young"  # an orphan but for its age
    NOT_ISSUED = "not_issued"  # ours by its name, but the map never issued the id
    OTHER_CLUSTER = "other_cluster"
    FOREIGN = "foreign"
    MARKER = "marker"  # the cluster's marker in its bucket, and its claims on object ids
    MISSING = "missing"  # the map wants it, the bucket does not have it
    UNLISTED = "unlisted"  # the same, but committed so late that the listing may have passed it
    SIZE_MISMATCH = "size_mismatch"  # live, with another size than the map recorded
    UNKNOWN_STATE = "unknown_state"  # the map knows it in a state this version does not
    UNCOMPARED = "uncompared"  # ours by its name; there was no copy of the map to compare with


@dataclass(frozen=True, slots=True)
class JoinedColumns:
    """Rows of the listing joined with the map by object id; `ABSENT` where one side has none.

    A row with `listed_size` `ABSENT` is an object of the map that no listed key belongs to. Sizes
    are bytes, times Unix milliseconds. `map_time_ms` is the commit time of a committed object.
    """

    owner: Int64Column
    object_id: Int64Column
    listed_size: Int64Column
    modified_ms: Int64Column
    map_state: Int64Column
    map_size: Int64Column
    map_time_ms: Int64Column
    map_attributes: Int64Column


@dataclass(frozen=True, slots=True)
class Rules:
    """Inputs of verdicts besides the row.

    `next_object_id` is the map's: ids below it have been issued. Unknown objects modified at or
    after `young_from_ms` are left alone. Objects committed at or after `unlisted_from_ms` may have
    been stored after the listing passed their place.
    """

    next_object_id: int
    young_from_ms: int
    unlisted_from_ms: int


WITHOUT_MAP = {
    Owner.OWN: Verdict.UNCOMPARED,
    Owner.OTHER_CLUSTER: Verdict.OTHER_CLUSTER,
    Owner.FOREIGN: Verdict.FOREIGN,
    Owner.MARKER: Verdict.MARKER,
}
"""The verdict on a listed key when there is no copy of the map."""


def judge(rows: JoinedColumns, rules: Rules) -> VerdictColumn:
    """Return one verdict per row; the empty string: nothing to report.

    Nothing is reported of an object that the bucket lacks and need not have. The first matching
    rule wins, and an orphan must pass every test that could save it.
    """
    listed = rows.listed_size != ABSENT
    own = rows.owner == Owner.OWN
    known = rows.map_state != ABSENT
    wanted = np.isin(rows.map_state, WANTED_STATES)
    issued = (rows.object_id >= 0) & (rows.object_id < rules.next_object_id)
    composite = (rows.map_attributes & _KIND_MASK) == ObjectKind.COMPOSITE
    wrong_size = ~composite & (rows.listed_size != rows.map_size)
    ladder: list[tuple[npt.NDArray[np.bool_], str]] = [
        (~listed & wanted & (rows.map_time_ms < rules.unlisted_from_ms), Verdict.MISSING),
        (~listed & wanted, Verdict.UNLISTED),
        (~listed, ""),
        (rows.owner == Owner.OTHER_CLUSTER, Verdict.OTHER_CLUSTER),
        (rows.owner == Owner.MARKER, Verdict.MARKER),
        (~own, Verdict.FOREIGN),
        (wanted & wrong_size, Verdict.SIZE_MISMATCH),
        (wanted, Verdict.LIVE),
        (rows.map_state == common_pb2.OBJECT_STATE_PREPARED, Verdict.IN_FLIGHT),
        (rows.map_state == common_pb2.OBJECT_STATE_MARK_DESTROYED, Verdict.DELETING),
        (known, Verdict.UNKNOWN_STATE),
        (~issued, Verdict.NOT_ISSUED),
        (rows.modified_ms >= rules.young_from_ms, Verdict.TOO_YOUNG),
    ]
    conditions = [condition for condition, _ in ladder]
    verdicts = [str(verdict) for _, verdict in ladder]
    return np.select(conditions, verdicts, default=str(Verdict.ORPHAN))


MISSING_SHARE = 0.01
"""Largest fraction of the map's objects that may be missing or of another size, 0..1."""

_IN_BUCKET_AND_OURS = (
    Verdict.LIVE,
    Verdict.IN_FLIGHT,
    Verdict.DELETING,
    Verdict.ORPHAN,
    Verdict.TOO_YOUNG,
    Verdict.NOT_ISSUED,
    Verdict.SIZE_MISMATCH,
    Verdict.UNKNOWN_STATE,
)


@dataclass(frozen=True, slots=True)
class GuardResult:
    """One guard's finding; `detail` gives the numbers and, if it failed, what to do."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """The limits chosen by the user; `max_share` is a fraction 0..1, `max_candidates` in keys."""

    max_share: float
    max_candidates: int
    allow_empty_map: bool


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


def check_guards(found: Evidence, settings: GuardSettings) -> tuple[GuardResult, ...]:
    """Every guard's finding."""
    return (
        _empty_map(found, settings),
        _missing_objects(found),
        _not_issued(found),
        _map_age(found),
        _share(found, settings),
        _candidates(found, settings),
    )


def without_map(reason: str) -> tuple[GuardResult, ...]:
    """The finding on a listing that could not be compared with the map."""
    return (
        GuardResult("map_copied", False, f"{reason}; make a new plan once the controllers answer"),
    )


def _empty_map(found: Evidence, settings: GuardSettings) -> GuardResult:
    own = found.keys(*_IN_BUCKET_AND_OURS)
    detail = (
        f"the map has {found.map_objects} committed objects, the bucket {own} keys of this cluster"
    )
    passed = found.map_objects > 0 or own == 0 or settings.allow_empty_map
    if not passed:
        detail += (
            "; check that --connect names the right cluster, then give --allow-empty-map if every"
            " object was really destroyed"
        )
    return GuardResult("empty_map", passed, detail)


def _missing_objects(found: Evidence) -> GuardResult:
    missing = found.keys(Verdict.MISSING)
    mismatched = found.keys(Verdict.SIZE_MISMATCH)
    expected = missing + mismatched + found.keys(Verdict.LIVE)
    share = (missing + mismatched) / expected if expected else 0.0
    detail = (
        f"of {expected} objects that the map expects, {missing} are missing in the bucket and"
        f" {mismatched} have another size: {share:.1%}, allowed {MISSING_SHARE:.0%}"
    )
    passed = share <= MISSING_SHARE
    if not passed:
        detail += (
            "; nothing may be deleted before this is explained: look the keys up in the plan's"
            " verdicts and restore the objects, or find what else deletes in the bucket"
        )
    return GuardResult("missing_objects", passed, detail)


def _not_issued(found: Evidence) -> GuardResult:
    keys = found.keys(Verdict.NOT_ISSUED)
    detail = f"{keys} keys of this cluster have ids that the map never issued"
    if keys:
        detail += (
            "; the map is older than the bucket or another cluster writes under this namespace:"
            " find out which before anything is deleted"
        )
    return GuardResult("not_issued", keys == 0, detail)


def _map_age(found: Evidence) -> GuardResult:
    detail = (
        f"the map issues object ids below {found.issued_below}, the bucket's claims reach"
        f" {found.claimed_below}"
    )
    passed = found.claimed_below <= found.issued_below
    if not passed:
        detail += "; the map was restored to an earlier state: nothing may be deleted by it"
    return GuardResult("map_age", passed, detail)


def _share(found: Evidence, settings: GuardSettings) -> GuardResult:
    own = found.keys(*_IN_BUCKET_AND_OURS)
    candidates = found.keys(Verdict.ORPHAN)
    share = candidates / own if own else 0.0
    detail = (
        f"{candidates} of {own} keys of this cluster are candidates: {share:.1%},"
        f" allowed {settings.max_share:.1%}"
    )
    passed = share <= settings.max_share
    if not passed:
        detail += "; look at the candidates, then plan again with a larger --max-share"
    return GuardResult("max_share", passed, detail)


def _candidates(found: Evidence, settings: GuardSettings) -> GuardResult:
    candidates = found.keys(Verdict.ORPHAN)
    detail = f"{candidates} candidates, allowed {settings.max_candidates}"
    passed = candidates <= settings.max_candidates
    if not passed:
        detail += "; look at the candidates, then plan again with a larger --max-candidates"
    return GuardResult("max_candidates", passed, detail)
