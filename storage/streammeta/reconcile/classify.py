"""What to say of one stored key, given what the map says of its object id.

Pure and vectorised: rows are columns of one joined table, and a verdict is a value of the report.
It reads no clock, no bucket and no map. Whose key it is was decided before, by the one strict
parser of keys.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64Column: TypeAlias = npt.NDArray[np.int64]
VerdictColumn: TypeAlias = npt.NDArray[np.str_]

ABSENT = -1
"""Stands for "no such value" in every column: not listed, not in the map, no object id."""

COMPOSITE_KIND = 1
_KIND_MASK = 0b11


class Owner(enum.IntEnum):
    """Whose key it is, from the key alone."""

    OWN = 0
    OTHER_CLUSTER = 1
    FOREIGN = 2
    MARKER = 3


class MapState(enum.IntEnum):
    """The state of an object in the map; the numbers are those of the contract's `ObjectState`."""

    PREPARED = 1
    COMMITTED = 2
    MARK_DESTROYED = 3
    LINKED = 5


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
    """What verdicts depend on besides the row.

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
    """One verdict per row; the empty string where there is nothing to report.

    Nothing to report there is of an object that the bucket does not have and need not have. The
    first matching rule wins, and an orphan must pass every test that could save it.
    """
    listed = rows.listed_size != ABSENT
    own = rows.owner == Owner.OWN
    known = rows.map_state != ABSENT
    wanted = np.isin(rows.map_state, (MapState.COMMITTED, MapState.LINKED))
    issued = (rows.object_id >= 0) & (rows.object_id < rules.next_object_id)
    composite = (rows.map_attributes & _KIND_MASK) == COMPOSITE_KIND
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
        (rows.map_state == MapState.PREPARED, Verdict.IN_FLIGHT),
        (rows.map_state == MapState.MARK_DESTROYED, Verdict.DELETING),
        (known, Verdict.UNKNOWN_STATE),
        (~issued, Verdict.NOT_ISSUED),
        (rows.modified_ms >= rules.young_from_ms, Verdict.TOO_YOUNG),
    ]
    conditions = [condition for condition, _ in ladder]
    verdicts = [str(verdict) for _, verdict in ladder]
    return np.select(conditions, verdicts, default=str(Verdict.ORPHAN))
