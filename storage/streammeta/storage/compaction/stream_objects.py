"""Planning for the stream objects of a stream: kinds of compaction, groups, and the schedule.

Owns the members of each kind, the limits of groups, the intervals, and how streams are spread over
them. Uses metadata of objects, never their bytes. Callers pass the time, in seconds of a monotonic
clock, and keep the turns of each stream.
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
"""Checksum of an object without a recorded checksum."""

LOCAL_BUCKET = -2
"""Bucket id of objects in a broker's local files, which no other process can read."""

MAX_PARTS = 10_000
MAX_PART_BYTES = 5 * GIB
"""Limits of a multipart upload, and therefore of a group."""


class StreamCompaction(enum.Enum):
    """Kinds of compaction of a stream's objects.

    Each kind first removes the objects with only trimmed offsets.
    """

    REMOVE_EXPIRED = "remove-expired"
    """Only remove expired objects."""
    MERGE_SMALL = "merge-small"
    """Copy neighbours into one object, up to a moderate size (128 MiB)."""
    MERGE_LARGE = "merge-large"
    """Copy neighbours into one object, up to a large size (10 GiB)."""
    PRUNE_LINKS = "prune-links"
    """Drop the links with only trimmed offsets from the first object, a composite."""
    GATHER_SMALL = "gather-small"
    """Copy neighbours into one object until it is no longer small. The last may cross 4 MiB."""
    LINK = "link"
    """Link neighbours, including composites, into one composite, up to a large size (10 GiB)."""

    @property
    def is_composite(self) -> bool:
        """Whether the result is a composite. The other kinds copy bytes."""
        return self in (StreamCompaction.PRUNE_LINKS, StreamCompaction.LINK)


@dataclass(frozen=True, slots=True)
class StreamObject:
    """An object of one stream with offsets `[start_offset, end_offset)`, as in the metadata.

    `size` is in bytes, and for a composite counts the linked blocks. `crc32c` is -1 if unknown.
    """

    object_id: int
    start_offset: int
    end_offset: int
    size: int
    composite: bool = False
    bucket_id: int = 0
    crc32c: int = ANY_CRC

    def dirty_bytes(self, stream_start: int) -> int:
        """Estimate the bytes below the first visible offset, assuming equally large offsets."""
        # The metadata has no sizes below the object, so offsets stand for bytes.
        dead = min(stream_start, self.end_offset) - self.start_offset
        return max(0, dead) * self.size // (self.end_offset - self.start_offset)


@dataclass(frozen=True, slots=True)
class GroupRules:
    """Limits of a group. Sizes are in bytes.

    A group has up to `group_bytes`. If `is_soft`, the object that reaches the limit still belongs
    to it, unless it has more than `absorbed_bytes` itself: copying all of such an object to save
    one object is not worth it. If `is_tiered`, a group that may still grow begins with an object no
    larger than all later ones (see `newest_tier`). A composite links no normal object below
    `linked_bytes`, except to close the gap between two composites. PRUNE_LINKS waits for more than
    `dirty_bytes`.
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
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")

    def parts_of(self, item: StreamObject) -> int:
        """Return the number of parts for copying an object."""
        return -(-item.size // self.max_part_bytes)


DEFAULT_GROUP_BYTES: Mapping[StreamCompaction, int] = {
    StreamCompaction.REMOVE_EXPIRED: 1,
    StreamCompaction.MERGE_SMALL: 128 * MIB,
    StreamCompaction.MERGE_LARGE: 10 * GIB,
    StreamCompaction.PRUNE_LINKS: 10 * GIB,
    StreamCompaction.GATHER_SMALL: 4 * MIB,
    StreamCompaction.LINK: 10 * GIB,
}
ABSORBED_FACTOR = 8
"""GATHER_SMALL copies no object larger than this many times its target size."""


def rules_for(kind: StreamCompaction, group_bytes: int | None = None) -> GroupRules:
    """Return the rules of a kind with groups of `group_bytes`, see `DEFAULT_GROUP_BYTES`."""
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
    """Return the rules of every kind. Kinds that copy bytes are tiered."""
    return {kind: replace(rules_for(kind), is_tiered=kind in _TIERED) for kind in StreamCompaction}


Group = tuple[StreamObject, ...]


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """A compaction of a stream: objects to remove, and groups to replace by one object each."""

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
    """Plan the compaction of all stream objects of a stream, passed in any order.

    `stream_start` is the first visible offset. If an object is passed twice, the last one counts.
    `rules` default to `rules_for(kind)`.
    """
    chosen = rules_for(kind) if rules is None else rules
    ordered = sort_by_offset(objects)
    # Removed without reading, so they never join a group.
    expired = tuple(item for item in ordered if item.end_offset <= stream_start)
    live = [item for item in ordered if item.end_offset > stream_start]
    eligible = [item for at, item in enumerate(live) if is_eligible(live, at, kind, chosen)]
    groups = cut_groups(eligible, chosen)
    if chosen.is_tiered:
        groups = [newest_tier(group, chosen) for group in groups]
    worth = (group for group in groups if is_worth_compacting(group, kind, stream_start, chosen))
    return StreamPlan(kind, stream_start, expired, tuple(worth))


def sort_by_offset(objects: Iterable[StreamObject]) -> list[StreamObject]:
    """Return each object once, in its last version, by start offset."""
    by_id = {item.object_id: item for item in objects}
    return sorted(by_id.values(), key=lambda item: (item.start_offset, item.object_id))


def is_eligible(
    objects: Sequence[StreamObject], position: int, kind: StreamCompaction, rules: GroupRules
) -> bool:
    """Return whether an object may be in a group. `objects` are all live ones, in offset order.

    Only normal objects are copied. Small normal ones are not worth a link and are left to
    GATHER_SMALL. It cannot reach one between two composites, so LINK takes such an object.
    """
    item = objects[position]
    if kind is StreamCompaction.REMOVE_EXPIRED:
        return False
    if kind is StreamCompaction.PRUNE_LINKS:
        return position == 0 and item.composite
    if kind is not StreamCompaction.LINK:
        return not item.composite
    return item.composite or item.size >= rules.linked_bytes or _joins_composites(objects, position)


def _joins_composites(objects: Sequence[StreamObject], position: int) -> bool:
    if not 0 < position < len(objects) - 1:
        return False
    before, item, after = objects[position - 1 : position + 2]
    touches = before.end_offset == item.start_offset and item.end_offset == after.start_offset
    return touches and before.composite and after.composite


def cut_groups(objects: Iterable[StreamObject], rules: GroupRules) -> list[Group]:
    """Cut objects, in offset order, into groups without gaps that keep the rules.

    An object that needs all parts of an upload cannot be copied and is in no group.
    """
    groups: list[_OpenGroup] = []
    for item in objects:
        # No part would be left for index and footer.
        if rules.parts_of(item) >= rules.max_parts:
            continue
        if not groups or not groups[-1].accepts(item, rules):
            groups.append(_OpenGroup())
        groups[-1].add(item, rules)
    return [tuple(group.members) for group in groups]


@dataclass(slots=True)
class _OpenGroup:
    """A group under construction, with the sums for its limits."""

    members: list[StreamObject] = field(default_factory=list)
    size: int = 0
    parts: int = 0

    def accepts(self, item: StreamObject, rules: GroupRules) -> bool:
        """Return whether `item` may join the nonempty group."""
        first, last = self.members[0], self.members[-1]
        # With a soft limit only the size before this object counts.
        after = self.size + (1 if rules.is_soft else item.size)
        return (
            after <= rules.group_bytes
            and item.start_offset == last.end_offset
            # The store copies ranges within one bucket only.
            and item.bucket_id == last.bucket_id
            and len(self.members) < rules.max_objects
            and self.parts + rules.parts_of(item) <= rules.max_parts
            # The index of the result has 32 bits for a span of offsets.
            and item.end_offset - first.start_offset <= rules.max_span
            and not (_stands_alone(item, rules) or _stands_alone(last, rules))
        )

    def add(self, item: StreamObject, rules: GroupRules) -> None:
        """Add `item`."""
        self.members.append(item)
        self.size += item.size
        self.parts += rules.parts_of(item)


def newest_tier(group: Group, rules: GroupRules) -> Group:
    """Drop the first objects of a group while they are larger than all later ones together.

    Bytes are then copied once for each doubling of their object, not with every small object that
    arrives. A group of full size is complete and copied once more.
    """
    later_bytes = sum(item.size for item in group)
    if later_bytes >= rules.group_bytes:
        return group
    for at, item in enumerate(group):
        later_bytes -= item.size
        if item.size <= later_bytes:
            return group[at:]
    # The newest object alone. A single object is not worth compacting, so it waits.
    return group[-1:]


def _stands_alone(item: StreamObject, rules: GroupRules) -> bool:
    return rules.absorbed_bytes is not None and item.size > rules.absorbed_bytes


def is_worth_compacting(
    group: Sequence[StreamObject], kind: StreamCompaction, stream_start: int, rules: GroupRules
) -> bool:
    """Return whether replacing a group with one object is a gain.

    A single object stays unchanged, unless it is a composite with many trimmed bytes.
    """
    if not group or any(item.bucket_id == LOCAL_BUCKET for item in group):
        return False
    if kind is StreamCompaction.REMOVE_EXPIRED:
        return False
    if kind is StreamCompaction.PRUNE_LINKS:
        first = group[0]
        return first.composite and first.dirty_bytes(stream_start) > rules.dirty_bytes
    return len(group) > 1


# A hash without state: equal ids get equal turns after every restart.
_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio. Its multiples spread consecutive numbers evenly."""


@dataclass(frozen=True, slots=True)
class StreamSchedule:
    """Intervals in seconds. Every stream is checked once every `interval_s`.

    Small objects are merged every `small_interval_s`, all objects of a stream every
    `large_interval_s`. With `composites` they are linked, which moves no bytes. Otherwise they are
    copied, which leaves fewer objects. A stream opened less than `rest_s` ago is left alone.
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
                f" {self.large_interval_s:g} s, expected 0 < interval_s <= small_interval_s <="
                " large_interval_s"
            )

    @property
    def kinds(self) -> tuple[StreamCompaction, StreamCompaction, StreamCompaction]:
        """The kinds of every check, every small and every large interval."""
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
    """Time when a stream was first seen open, and the times of its last turns by kind."""

    opened_s: float
    small_s: float
    large_s: float


def first_turns(stream_id: int, now_s: float, schedule: StreamSchedule) -> StreamTurns:
    """Return the initial turns of a stream, as if it had had earlier ones.

    Stream ids spread the streams over the intervals, so that their turns do not coincide.
    """
    # Fraction of the interval that counts as passed already, 0..1.
    part = (stream_id * _GOLDEN % 2**64) / 2**64
    return StreamTurns(
        opened_s=now_s,
        small_s=now_s - part * schedule.small_interval_s,
        large_s=now_s - part * schedule.large_interval_s,
    )


def due_kind(turns: StreamTurns, now_s: float, schedule: StreamSchedule) -> StreamCompaction | None:
    """Return the kind that is due for a stream, or None while it rests after being opened."""
    # A stream that moves between brokers is reopened soon, and its new owner would repeat the work.
    if now_s - turns.opened_s < schedule.rest_s:
        return None
    every_check, small, large = schedule.kinds
    # The large turn includes the work of the small one.
    if now_s - turns.large_s >= schedule.large_interval_s:
        return large
    return small if now_s - turns.small_s >= schedule.small_interval_s else every_check


def after_turn(
    turns: StreamTurns, kind: StreamCompaction, now_s: float, schedule: StreamSchedule
) -> StreamTurns:
    """Return the turns of a stream after a turn of this kind now."""
    _, small, large = schedule.kinds
    return StreamTurns(
        turns.opened_s,
        now_s if kind is small else turns.small_s,
        now_s if kind is large else turns.large_s,
    )


def may_have_work(
    kind: StreamCompaction, stream_start: int, spans: Sequence[tuple[int, int]]
) -> bool:
    """Return whether a compaction may have work, from the offsets of a stream's objects.

    `spans` are the half-open offsets of all stream objects, in order. False is certain, True is
    not.
    """
    # Expired objects can be removed whatever the kind.
    if any(end <= stream_start for _, end in spans):
        return True
    if kind is StreamCompaction.REMOVE_EXPIRED:
        return False
    if kind is StreamCompaction.PRUNE_LINKS:
        return bool(spans) and spans[0][0] < stream_start
    return any(before[1] == after[0] for before, after in pairwise(spans))
