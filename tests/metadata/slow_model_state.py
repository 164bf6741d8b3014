"""What the slow model keeps: dictionaries of plain objects, and what all rules ask of them.

Nothing here is derived: counters, indexes and lists are looked for anew each time.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.tables.values import NodeIdentity, ObjectKind, ObjectState, Tags

DEEP_DELETE = 1 << 18
HOLDERS = (ObjectKind.STREAM, ObjectKind.COMPOSITE)


@dataclass(slots=True)
class Range:
    """One interval of ownership that has ended."""

    index: int
    epoch: int
    start: int
    end: int
    node: int


@dataclass(slots=True)
class Stream:
    """One stream with its current range."""

    epoch: int = -1
    index: int = -1
    start: int = 0
    end: int = 0
    opened: bool = False
    node: int = -1
    range_start: int = 0
    tags: Tags = ()
    past: list[Range] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    """Every offset that was given up."""
    shared: bool = False


@dataclass(slots=True)
class Object:
    """One object; `timestamp` is the deadline, commit time or mark time."""

    timestamp: int
    state: ObjectState = ObjectState.PREPARED
    kind: ObjectKind = ObjectKind.UNKNOWN
    size: int = 0
    attributes: int = 0
    node: int = -1
    order: int = -1
    data_time: int = -1
    composite: int = -1
    held: list[tuple[int, int, int]] = field(default_factory=list)
    """(stream, start, end) rows."""
    times: tuple[int, int] = (-1, -1)
    """Between which times its records are."""
    crc32c: int = -1


@dataclass(slots=True)
class Node:
    epoch: int
    failover: bool = False
    wal_config: str = ""
    tags: Tags = ()
    locked: bool = False
    departed: bool = False
    recovered_by: int = -1
    supervised: bool = False
    process_id: str = ""


@dataclass(slots=True)
class State:
    streams: dict[int, Stream] = field(default_factory=dict)
    next_stream: int = 0
    sweeping: set[int] = field(default_factory=set)
    objects: dict[int, Object] = field(default_factory=dict)
    next_object: int = 0
    forgotten_commits: set[int] = field(default_factory=set)
    made_with: dict[int, object] = field(default_factory=dict)
    """Per object ever committed the content of the commit it came with."""
    rejected: dict[tuple[str, int, int], ErrorCode] = field(default_factory=dict)
    """(content of the commit, empty below level 4; object; stream) -> verdict of a left-out row."""
    requests: dict[tuple[str, int, str], tuple[int, int, int]] = field(default_factory=dict)
    """(kind, node, request id) -> (first id, count, deadline)."""
    streams_of_requests: dict[tuple[str, int, str], list[tuple[Tags, bool]]] = field(
        default_factory=dict
    )
    producers: dict[tuple[int, int], Any] = field(default_factory=dict)
    """(stream, producer) -> what is remembered of the producer there."""
    next_producer: int = 0
    nodes: dict[int, Node] = field(default_factory=dict)
    freed_nodes: set[int] = field(default_factory=set)
    last_node: int = -1
    pending: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(node, stream) -> what the node still owes, as it was at its last commit or close."""
    hold: tuple[int, int] = (0, 0)
    """(since, until)."""
    claim: tuple[str, int] = ("", 0)
    feature_level: int = 1
    """(UUID of the cluster, object ids below it may be issued)."""
    undecided: tuple[int, int] | None = None
    """Ids that a restore has left undecided, as (first, end); None unless in recovery mode."""
    kvs: dict[tuple[str, str], tuple[bytes, int]] = field(default_factory=dict)

    # What no rule reads: the machine compares it with what the rules let happen.
    data: dict[int, set[int]] = field(default_factory=dict)
    """Per stream every offset that an upload brought and that is not trimmed."""
    blocks: dict[int, set[int]] = field(default_factory=dict)
    """Per composite ever committed the objects whose bytes it refers to."""
    lately: list[Any] = field(default_factory=list, compare=False)
    """The last requests that were made, to be repeated."""
    appends: list[Any] = field(default_factory=list, compare=False)
    """The last of them with shared rows."""

    # ---- nodes ----

    def check(
        self, node: NodeIdentity, *, fence: bool = True, recoverer: NodeIdentity | None = None
    ) -> ErrorCode:
        """Whether this process may speak for its node, and the recoverer for another's."""
        known = self.nodes.get(node.node_id)
        if known is None:
            return ErrorCode.NODE_EPOCH_NOT_EXIST
        if known.epoch > node.node_epoch:
            return ErrorCode.NODE_EPOCH_EXPIRED
        if fence and (known.failover or known.departed):
            return ErrorCode.NODE_FENCED
        if recoverer is None:
            return ErrorCode.NONE
        if known.recovered_by != recoverer.node_id:
            return ErrorCode.NODE_FENCED
        return self.check(recoverer)

    def stream_set_objects_of(self, node_id: int) -> list[int]:
        """Its committed set objects."""
        return [
            object_id
            for object_id, item in self.objects.items()
            if item.kind is ObjectKind.STREAM_SET
            and item.state is ObjectState.COMMITTED
            and item.node == node_id
        ]

    def stream_objects_of(self, stream_id: int) -> list[tuple[int, int, int]]:
        """(end, id, start) of the stream's committed objects, by where they end."""
        return sorted(
            (end, object_id, start)
            for object_id, item in self.objects.items()
            if item.kind in HOLDERS and item.state is ObjectState.COMMITTED
            for stream, start, end in item.held
            if stream == stream_id
        )

    def open_streams_of(self, node_id: int) -> list[int]:
        """Streams that are open with their current range there."""
        return sorted(i for i, s in self.streams.items() if s.opened and s.node == node_id)

    def owed(self, node_id: int, stream_id: int) -> tuple[int, int] | None:
        """What the node still has to upload of the stream, or None."""
        entry, stream = self.pending.get((node_id, stream_id)), self.streams.get(stream_id)
        if entry is None or stream is None:
            return None
        first = max(stream.start, entry[0])
        return (first, entry[1]) if first < entry[1] else None

    def owed_by(self, node_id: int) -> dict[int, tuple[int, int]]:
        """All of that, by stream."""
        mine = sorted(stream for node, stream in self.pending if node == node_id)
        owed = ((stream, self.owed(node_id, stream)) for stream in mine)
        return {stream: entry for stream, entry in owed if entry is not None}

    def forget_node(self, node_id: int) -> None:
        """A node is gone; its id may be issued again."""
        del self.nodes[node_id]
        self.freed_nodes.add(node_id)
        for key in [key for key in self.pending if key[0] == node_id]:
            del self.pending[key]

    # ---- streams ----

    def own(self, node_id: int, stream_id: int, epoch: int) -> ErrorCode:
        """Whether the node owns the stream under exactly this epoch."""
        stream = self.streams.get(stream_id)
        if stream is None:
            return ErrorCode.STREAM_NOT_EXIST
        if stream.epoch != epoch:
            later = stream.epoch > epoch
            return ErrorCode.STREAM_FENCED if later else ErrorCode.STREAM_INNER_ERROR
        is_own = stream.shared or stream.node == node_id
        return ErrorCode.NONE if is_own else ErrorCode.STREAM_FENCED

    def lost_at(self, stream_id: int, offset: int) -> int:
        """Where lost offsets end that `offset` lies in, or -1."""
        lost = self.streams[stream_id].lost
        if offset not in lost:
            return -1
        while offset in lost:
            offset += 1
        return offset

    def alive(self, rows: Iterable[tuple[int, int, int]]) -> dict[int, set[int]]:
        """Per stream the offsets of rows that a reader could ask for."""
        found: dict[int, set[int]] = {}
        for stream_id, start, end in rows:
            stream = self.streams.get(stream_id)
            if stream is not None and end > stream.start:
                offsets = range(max(start, stream.start), end)
                found.setdefault(stream_id, set()).update(offsets)
        return found

    # ---- objects ----

    def was_committed(self, object_id: int) -> bool:
        """Whether it is, or ever was, committed."""
        item = self.objects.get(object_id)
        if item is None:
            return object_id in self.forgotten_commits
        return item.kind is not ObjectKind.UNKNOWN

    def is_prepared(self, object_id: int) -> bool:
        """Whether it waits for its commit."""
        item = self.objects.get(object_id)
        return item is not None and item.state is ObjectState.PREPARED

    def is_destroyed(self, object_id: int) -> bool:
        """Whether it was committed, and its ranges are forgotten."""
        item = self.objects.get(object_id)
        is_held = item is not None and item.state is ObjectState.COMMITTED
        return self.was_committed(object_id) and not is_held

    def links_of(self, composite: int) -> list[int]:
        """Objects kept for a composite."""
        return [
            object_id
            for object_id, item in self.objects.items()
            if item.state is ObjectState.LINKED and item.composite == composite
        ]

    def destroy(self, object_ids: Iterable[int], now: int, *, deep: bool = False) -> None:
        """Mark objects destroyed; a departed node ends with its last set object."""
        owners = set()
        for object_id in object_ids:
            item = self.objects[object_id]
            owners.add(item.node)
            item.state, item.timestamp, item.held = ObjectState.MARK_DESTROYED, now, []
            item.composite = -1
            if deep:
                item.attributes |= DEEP_DELETE
        for node_id in owners:
            node = self.nodes.get(node_id)
            if node is not None and node.departed and not self.stream_set_objects_of(node_id):
                self.forget_node(node_id)

    def raise_ends(self, rows: Iterable[tuple[int, int, int]]) -> None:
        """Committed rows push the ends of their streams."""
        for stream_id, start, end in rows:
            stream = self.streams.get(stream_id)
            if stream is not None:
                stream.end = max(stream.end, end)
                brought = range(max(start, stream.start), end)
                self.data.setdefault(stream_id, set()).update(brought)
