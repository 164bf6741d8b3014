"""Watch of the metadata: committed changes as plain values, in order and without a gap."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, Self, TypeAlias

import numpy as np

from streammeta.client.arguments import check_client, check_int, check_items
from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.controllers.metadata_watch import Change, MetadataWatch
from streammeta.client.errors import ChangesLostError
from streammeta.client.resources.resources import ClosedAtExit
from streammeta.v1 import metadata_pb2, records_pb2

ChangeKind: TypeAlias = Literal["stream", "object", "node", "key"]

_KINDS: dict[ChangeKind, metadata_pb2.EntityKind.ValueType] = {
    "stream": metadata_pb2.ENTITY_KIND_STREAM,
    "object": metadata_pb2.ENTITY_KIND_OBJECT,
    "node": metadata_pb2.ENTITY_KIND_NODE,
    "key": metadata_pb2.ENTITY_KIND_KV,
}

_Entity: TypeAlias = Literal["stream", "object", "node"]
_STREAM_ID, _OBJECT_ID = attrgetter("stream_id"), attrgetter("object_id")
_NODE_ID = attrgetter("node_id")

_ENTITIES: dict[str, Sequence[tuple[_Entity, str, Any]]] = {
    "streams_created": [("stream", "created", attrgetter("first_stream_id"))],
    "streams_opened": [("stream", "opened", _STREAM_ID)],
    "streams_reopened": [("stream", "opened", _STREAM_ID)],
    "streams_closed": [("stream", "closed", _STREAM_ID)],
    "streams_trimmed": [("stream", "trimmed", _STREAM_ID)],
    "streams_deleted": [("stream", "deleted", _STREAM_ID)],
    "uploads_abandoned": [("stream", "abandoned", _STREAM_ID)],
    "stream_set_objects_committed": [
        ("stream", "committed", attrgetter("ranges.stream_id")),
        ("object", "committed", _OBJECT_ID),
    ],
    "stream_objects_committed": [
        ("stream", "committed", _STREAM_ID),
        ("object", "committed", _OBJECT_ID),
    ],
    "named_objects_committed": [("object", "committed", _OBJECT_ID)],
    "objects_prepared": [("object", "prepared", attrgetter("first_object_id"))],
    "objects_destroyed": [("object", "destroyed", _OBJECT_ID)],
    "objects_removed": [("object", "removed", _OBJECT_ID)],
    "node_registered": [("node", "registered", _NODE_ID)],
    "node_epoch_set": [("node", "epoch set", _NODE_ID)],
    "node_locked": [("node", "lock set", _NODE_ID)],
    "node_supervised": [("node", "supervised", _NODE_ID)],
    "node_unregistered": [("node", "unregistered", _NODE_ID)],
    "recovery_assigned": [("node", "recovery assigned", _NODE_ID)],
}
"""Entities of each record: their kind, the event, and the column or number with their ids."""


@dataclass(frozen=True, slots=True)
class EntityChange:
    """A change of a stream, an object or a node, in the log entries up to `offset`.

    `event` is created, opened, closed, trimmed, committed, deleted or abandoned for a stream,
    prepared, committed, destroyed or removed for an object. A stream is also committed when its
    objects are compacted. For a node it is registered, epoch set, lock set, supervised,
    unregistered or recovery assigned.
    """

    offset: int
    kind: Literal["stream", "object", "node"]
    event: str
    id: int


@dataclass(frozen=True, slots=True)
class KeyChange:
    """A new value of a key, or None for a deleted one, in the log entries up to `offset`."""

    offset: int
    namespace: str
    key: str
    value: bytes | None


class Watch(ClosedAtExit):
    """An endless iterator over changes. Create it with `StreamClient.watch`.

    Without a `from_offset` it begins at the committed end when it is entered or first awaited. So
    state that is read inside of `async with` has all earlier changes. It continues at another
    controller after a failure, and a cancelled wait loses no change. Raises `ChangesLostError` if
    the next change is compacted away everywhere, `ControllerUnavailableError` if no controller
    serves the watch, and a `RejectedError` for a rejected request.
    """

    def __init__(
        self,
        controllers: ControllerClient,
        kinds: Collection[ChangeKind] = (),
        *,
        stream_ids: Sequence[int] = (),
        key_prefixes: Iterable[tuple[str, str]] = (),
        from_offset: int | None = None,
    ) -> None:
        check_client(controllers)
        for kind in check_items("kinds", kinds, f"some of {[*_KINDS]}"):
            if kind not in _KINDS:
                raise ValueError(f"kinds has {kind!r}, expected some of {[*_KINDS]}")
        self._controllers = controllers
        self._kinds = frozenset(kinds or _KINDS)
        self._watch = MetadataWatch(
            controllers,
            kinds=[_KINDS[kind] for kind in kinds],
            stream_ids=stream_ids,
            kv_prefixes=tuple(key_prefixes),
            combine=True,
        )
        self._has_begun = from_offset is not None
        if from_offset is not None:
            self._watch.next_offset = check_int("from_offset", from_offset)
        self._changes: AsyncGenerator[Change | None, None] | None = None
        self._waiting: deque[EntityChange | KeyChange] = deque()
        self._received_from = 0
        self._is_closed = False

    @property
    def position(self) -> int:
        """The offset from which another watch would miss no change, but may repeat some."""
        return self._received_from if self._waiting else self._watch.next_offset

    async def __aenter__(self) -> Self:
        await self._begin()
        return self

    async def close(self) -> None:
        """End the watch, in the task that iterates. The iteration ends."""
        self._is_closed = True
        self._waiting.clear()
        if self._changes is not None:
            await self._changes.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EntityChange | KeyChange:
        await self._begin()
        while not self._waiting:
            if self._is_closed:
                raise StopAsyncIteration
            await self._receive()
        return self._waiting.popleft()

    async def _begin(self) -> None:
        if not self._has_begun:
            described = await self._controllers.describe_cluster()
            self._watch.next_offset = described.high_watermark or 0
            self._has_begun = True

    async def _receive(self) -> None:
        """Wait for the next answer of a controller."""
        # A generator ends with its error, so each failure or cancellation needs a new one.
        changes, self._changes = self._changes or self._watch.follow(), None
        self._received_from = self._watch.next_offset
        try:
            change = await anext(changes)
        except StopAsyncIteration:
            if self._is_closed:
                raise
            raise ChangesLostError(self._watch.next_offset) from None
        self._changes = changes
        if change is not None:
            self._waiting.extend(self._translate(change))

    def _translate(self, change: Change) -> Iterator[EntityChange | KeyChange]:
        for record in change.records.records:
            name = record.WhichOneof("kind")
            if name is None:
                continue
            content = getattr(record, name)
            for kind, event, ids in _ENTITIES.get(name, ()):
                # The record of a commit has objects and streams, perhaps only one is wanted.
                if kind in self._kinds:
                    for id_ in _ids(ids(content), getattr(content, "count", 1)):
                        yield EntityChange(change.offset, kind, event, id_)
            if "key" in self._kinds:
                yield from _key_changes(change.offset, record)


def _ids(value: int | bytes, count: int) -> Iterable[int]:
    """Return the ids of a column, each once, or `count` ids from the first."""
    if isinstance(value, int):
        return range(value, value + count)
    return dict.fromkeys(np.frombuffer(value, dtype="<i8").tolist())


def _key_changes(offset: int, record: records_pb2.Record) -> Iterator[KeyChange]:
    put, deleted = record.kvs_put, record.kvs_deleted
    for namespace, key, value in zip(put.namespaces, put.keys, put.values, strict=True):
        yield KeyChange(offset, namespace, key, value)
    for namespace, key in zip(deleted.namespaces, deleted.keys, strict=True):
        yield KeyChange(offset, namespace, key, None)
