"""Planning for the stream objects of one stream: kinds of compaction, groups, and the schedule.

Owns the members of each kind, the ends of groups, the intervals, and how streams are spread over
them. It knows objects by their metadata, never their bytes. Callers bring the time, in seconds of a
monotonic clock, and keep the turns of each stream.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from streammeta.storage.object_format.record import INT32_MAX

MIB = 1024 * 1024
GIB = 1024 * MIB

ANY_CRC = -1
"""An object whose checksum is not recorded."""

LOCAL_BUCKET = -2
"""Objects in a broker's own files, which no other process could read."""

MAX_PARTS = 10_000
MAX_PART_BYTES = 5 * GIB
"""Limits of one multipart upload, and so of a group."""


class StreamCompaction(enum.Enum):
    """Kinds of compaction of one stream's objects.

    Each kind first removes the objects that hold nothing but trimmed offsets.
    """

    REMOVE_EXPIRED = "remove-expired"
    """Nothing more."""
    MERGE_SMALL = "merge-small"
    """Copy neighbours into one object, up to a moderate size (128 MiB)."""
    MERGE_LARGE = "merge-large"
    """Copy neighbours into one object, up to a large size (10 GiB)."""
    PRUNE_LINKS = "prune-links"
    """Drop links of the first object, a composite, that hold only trimmed offsets."""
    GATHER_SMALL = "gather-small"
    """Copy neighbours into one object until it is no longer small: the last may cross 4 MiB."""
    LINK = "link"
    """Link neighbours, composites included, into one composite, up to a large size (10 GiB)."""

    @property
    def is_composite(self) -> bool:
        """Whether the result is a composite; the other kinds copy bytes."""
        return self in (StreamCompaction.PRUNE_LINKS, StreamCompaction.LINK)


@dataclass(frozen=True, slots=True)
class StreamObject:
    """An object of one stream, with offsets `[start_offset, end_offset)`, as metadata has it.

    `size` is in bytes, that of a composite counts the blocks it links; `crc32c` -1: unknown.
    """

    object_id: int
    start_offset: int
    end_offset: int
    size: int
    composite: bool = False
    bucket_id: int = 0
    crc32c: int = ANY_CRC

    def dirty_bytes(self, stream_start: int) -> int:
        """Estimate the bytes below the first visible offset: as if offsets were equally large."""
        dead = min(stream_start, self.end_offset) - self.start_offset
        return max(0, dead) * self.size // (self.end_offset - self.start_offset)


@dataclass(frozen=True, slots=True)
class GroupRules:
    """Limits of a group. Sizes are in bytes.

    A group holds up to `group_bytes`; if `is_soft` the object that reaches it still belongs to it,
    unless it alone has more than `absorbed_bytes`: such an object stays as it is, since to make one
    object fewer all of it would have to be copied. If it `is_tiered`, a group that is still to grow
    begins with an object no larger than all behind it (see `newest_tier`). A composite links no
    normal object below `linked_bytes`, except to close the gap between two composites. PRUNE_LINKS
    waits for more than `dirty_bytes`.
    """

    group_bytes: int
    is_soft: bool = False
    absorbed_bytes: int | None = None
    is_tiered: bool = False
    linked_bytes: int = 4 * MIB
    dirty_bytes: int = 512 * MIB
    max_objects: int = 5_000
    max_parts: int = MAX_PARTS
    max_part_bytes: int = MAX_PART_BYTES
    max_span: int = INT32_MAX

    def __post_init__(self) -> None:
        for name in ("group_bytes", "max_objects", "max_parts", "max_part_bytes", "max_span"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted at least 1")

    def parts_of(self, one: StreamObject) -> int:
        """Return how many parts it takes to copy an object."""
        return -(-one.size // self.max_part_bytes)


DEFAULT_GROUP_BYTES: Mapping[StreamCompaction, int] = {
    StreamCompaction.REMOVE_EXPIRED: 1,
    StreamCompaction.MERGE_SMALL: 128 * MIB,
    StreamCompaction.MERGE_LARGE: 10 * GIB,
    StreamCompaction.PRUNE_LINKS: 10 * GIB,
    StreamCompaction.GATHER_SMALL: 4 * MIB,
    StreamCompaction.LINK: 10 * GIB,
}
ABSORBED_FACTOR = 8
"""GATHER_SMALL copies no object that is so many times larger than what it aims at."""


def rules_for(kind: StreamCompaction, group_bytes: int | None = None) -> GroupRules:
    """Return the rules of a kind, with groups of `group_bytes`, by default as listed above."""
    size = DEFAULT_GROUP_BYTES[kind] if group_bytes is None else group_bytes
    if kind is StreamCompaction.GATHER_SMALL:
        return GroupRules(size, is_soft=True, absorbed_bytes=ABSORBED_FACTOR * size)
    return GroupRules(size)


_TIERED = (
    StreamCompaction.GATHER_SMALL,
    StreamCompaction.MERGE_SMALL,
    StreamCompaction.MERGE_LARGE,
)


def tiered_rules() -> dict[StreamCompaction, GroupRules]:
    """Return the rules of every kind; those of kinds that copy bytes are tiered."""
    return {kind: replace(rules_for(kind), is_tiered=kind in _TIERED) for kind in StreamCompaction}


Group = tuple[StreamObject, ...]


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """One compaction of a stream: objects to remove, and groups to make one object of each."""

    kind: StreamCompaction
    stream_start: int
    expired: Group
    groups: tuple[Group, ...]


def plan_stream(
    objects: Iterable[StreamObject],
    stream_start: int,
    kind: StreamCompaction,
    rules: GroupRules | None = None,
) -> StreamPlan:
    """Plan the compaction of all stream objects of one stream, given in any order.

    `stream_start` is the first visible offset. An object that is given twice counts as it was given
    last. `rules` are by default those of `rules_for`.
    """
    chosen = rules_for(kind) if rules is None else rules
    ordered = in_offset_order(objects)
    expired = tuple(one for one in ordered if one.end_offset <= stream_start)
    live = [one for one in ordered if one.end_offset > stream_start]
    taking_part = [one for at, one in enumerate(live) if takes_part(live, at, kind, chosen)]
    groups = cut_groups(taking_part, chosen)
    if chosen.is_tiered:
        groups = [newest_tier(group, chosen) for group in groups]
    worth = (one for one in groups if is_worth_compacting(one, kind, stream_start, chosen))
    return StreamPlan(kind, stream_start, expired, tuple(worth))


def in_offset_order(objects: Iterable[StreamObject]) -> list[StreamObject]:
    """Return each object once, as it was given last, by start offset."""
    by_id = {one.object_id: one for one in objects}
    return sorted(by_id.values(), key=lambda one: (one.start_offset, one.object_id))


def takes_part(
    objects: Sequence[StreamObject], position: int, kind: StreamCompaction, rules: GroupRules
) -> bool:
    """Tell whether the object at a position of all live ones, in offset order, may be in a group.

    Objects are copied only if they are normal. Small normal ones are not worth a link: they are
    left to GATHER_SMALL, which has no other way to reach one that lies between two composites.
    """
    one = objects[position]
    if kind is StreamCompaction.REMOVE_EXPIRED:
        return False
    if kind is StreamCompaction.PRUNE_LINKS:
        return position == 0 and one.composite
    if kind is not StreamCompaction.LINK:
        return not one.composite
    return one.composite or one.size >= rules.linked_bytes or _joins_composites(objects, position)


def _joins_composites(objects: Sequence[StreamObject], position: int) -> bool:
    if not 0 < position < len(objects) - 1:
        return False
    before, one, after = objects[position - 1 : position + 2]
    touches = before.end_offset == one.start_offset and one.end_offset == after.start_offset
    return touches and before.composite and after.composite


def cut_groups(objects: Iterable[StreamObject], rules: GroupRules) -> list[Group]:
    """Cut objects, in offset order, into groups without a gap that keep the rules.

    What could not be copied at all, needing all the parts of an upload, is in none.
    """
    groups: list[_OpenGroup] = []
    for one in objects:
        if rules.parts_of(one) >= rules.max_parts:
            continue
        if not groups or not groups[-1].takes(one, rules):
            groups.append(_OpenGroup())
        groups[-1].add(one, rules)
    return [tuple(group.members) for group in groups]


@dataclass(slots=True)
class _OpenGroup:
    """A group in the making, with the sums that its rules are about."""

    members: list[StreamObject] = field(default_factory=list)
    size: int = 0
    parts: int = 0

    def takes(self, one: StreamObject, rules: GroupRules) -> bool:
        """Tell whether `one` may join; there is a member already."""
        first, last = self.members[0], self.members[-1]
        after = self.size + (1 if rules.is_soft else one.size)
        return (
            after <= rules.group_bytes
            and one.start_offset == last.end_offset
            and one.bucket_id == last.bucket_id
            and len(self.members) < rules.max_objects
            and self.parts + rules.parts_of(one) <= rules.max_parts
            and one.end_offset - first.start_offset <= rules.max_span
            and not (_stands_alone(one, rules) or _stands_alone(last, rules))
        )

    def add(self, one: StreamObject, rules: GroupRules) -> None:
        """Let `one` join."""
        self.members.append(one)
        self.size += one.size
        self.parts += rules.parts_of(one)


def newest_tier(group: Group, rules: GroupRules) -> Group:
    """Leave out the first objects of a group as long as they are larger than all behind them.

    So bytes are copied once for each doubling of their object, instead of with every small object
    that arrives. A group of full size is complete, and copied once more.
    """
    behind = sum(one.size for one in group)
    if behind >= rules.group_bytes:
        return group
    for at, one in enumerate(group):
        behind -= one.size
        if one.size <= behind:
            return group[at:]
    return group[-1:]


def _stands_alone(one: StreamObject, rules: GroupRules) -> bool:
    return rules.absorbed_bytes is not None and one.size > rules.absorbed_bytes


def is_worth_compacting(
    group: Sequence[StreamObject], kind: StreamCompaction, stream_start: int, rules: GroupRules
) -> bool:
    """Tell whether one object in place of a group is a gain.

    One object alone stays as it is, but for a composite that holds much that is trimmed.
    """
    if not group or any(one.bucket_id == LOCAL_BUCKET for one in group):
        return False
    if kind is StreamCompaction.REMOVE_EXPIRED:
        return False
    if kind is StreamCompaction.PRUNE_LINKS:
        first = group[0]
        return first.composite and first.dirty_bytes(stream_start) > rules.dirty_bytes
    return len(group) > 1


_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 by the golden ratio: multiples of it spread consecutive numbers evenly."""


@dataclass(frozen=True, slots=True)
class StreamSchedule:
    """Intervals in seconds; every stream is looked at once every `interval_s`.

    Small objects are put together every `small_interval_s`, all of a stream's every
    `large_interval_s`: linked if `composites`, which moves no bytes, copied otherwise, which leaves
    fewer objects. A stream that was opened less than `rest_s` ago is left alone.
    """

    interval_s: float = 60.0
    small_interval_s: float = 600.0
    large_interval_s: float = 3600.0
    rest_s: float = 60.0
    composites: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.interval_s <= self.small_interval_s <= self.large_interval_s:
            raise ValueError(
                f"intervals are {self.interval_s:g}, {self.small_interval_s:g} and"
                f" {self.large_interval_s:g} s, wanted 0 < interval_s <= small_interval_s <="
                " large_interval_s"
            )

    @property
    def kinds(self) -> tuple[StreamCompaction, StreamCompaction, StreamCompaction]:
        """The kinds of every look, every small and every large interval."""
        if self.composites:
            return (
                StreamCompaction.PRUNE_LINKS,
                StreamCompaction.GATHER_SMALL,
                StreamCompaction.LINK,
            )
        return (
            StreamCompaction.REMOVE_EXPIRED,
            StreamCompaction.MERGE_SMALL,
            StreamCompaction.MERGE_LARGE,
        )


@dataclass(frozen=True, slots=True)
class StreamTurns:
    """When a stream was opened, as far as it was seen, and when it last had a turn of each kind."""

    opened_s: float
    small_s: float
    large_s: float


def first_turns(stream_id: int, now_s: float, schedule: StreamSchedule) -> StreamTurns:
    """Return the turns of a stream seen for the first time, as if it had had some before.

    Streams are spread over the intervals by their ids, so that not all have their turns at once.
    """
    part = (stream_id * _GOLDEN % 2**64) / 2**64
    return StreamTurns(
        opened_s=now_s,
        small_s=now_s - part * schedule.small_interval_s,
        large_s=now_s - part * schedule.large_interval_s,
    )


def due_kind(turns: StreamTurns, now_s: float, schedule: StreamSchedule) -> StreamCompaction | None:
    """Return the kind that is due for a stream; None while it rests after being opened."""
    if now_s - turns.opened_s < schedule.rest_s:
        return None
    every_look, small, large = schedule.kinds
    if now_s - turns.large_s >= schedule.large_interval_s:
        return large
    return small if now_s - turns.small_s >= schedule.small_interval_s else every_look


def after_turn(
    turns: StreamTurns, kind: StreamCompaction, now_s: float, schedule: StreamSchedule
) -> StreamTurns:
    """Return the turns of a stream after one of this kind now."""
    _, small, large = schedule.kinds
    return StreamTurns(
        turns.opened_s,
        now_s if kind is small else turns.small_s,
        now_s if kind is large else turns.large_s,
    )


def may_have_work(
    kind: StreamCompaction, stream_start: int, spans: Sequence[tuple[int, int]]
) -> bool:
    """Tell whether a compaction could do anything, by the offsets of a stream's objects alone.

    `spans` are the half-open offsets of all stream objects, in order. False is certain, True may
    still turn out to be nothing.
    """
    if any(end <= stream_start for _, end in spans):
        return True
    if kind is StreamCompaction.REMOVE_EXPIRED:
        return False
    if kind is StreamCompaction.PRUNE_LINKS:
        return bool(spans) and spans[0][0] < stream_start
    return any(before[1] == after[0] for before, after in pairwise(spans))
