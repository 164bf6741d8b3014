"""Metadata of a broker as keys of a cluster: one for each topic, queue and segment.

Owns keys, values and their versions, and the streams that segments lie in. A change is a
compare-and-set. A start changes the key of the store's time and those of unsealed chunks, so a
process that was replaced can no longer change either. What a commit of bytes puts beside them is
noted here, and not put again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from streammeta.brokers.rocketmq.formats.metadata import (
    MetadataTable,
    Queue,
    QueueMetadata,
    SegmentMetadata,
    SegmentStatus,
    TopicMetadata,
)
from streammeta.brokers.rocketmq.formats.names import SegmentType
from streammeta.client import OpenedStream, OwnerKey, StreamClient, ValueToPut
from streammeta.client.controllers.methods import DELETE_KVS, GET_KVS, LIST_KVS, PUT_KVS
from streammeta.client.errors import refusal
from streammeta.storage.parsing import parse_json
from streammeta.v1 import kv_pb2
from streammeta.v1.common_pb2 import (
    ERROR_CODE_KEY_EXIST,
    ERROR_CODE_KEY_NOT_EXIST,
    ERROR_CODE_NONE,
)

TAG = "rocketmq"
"""Tag of the streams of segments; its value is cluster and broker."""
_SERIAL = "serial"
_TIME = "time"
_BATCH = 1000
_OPEN_ATTEMPTS = 5

SegmentPlace = tuple[str, SegmentType, int]
"""Path, type and base offset of a segment."""


class MetadataFencedError(Exception):
    """Another process of the broker has changed the metadata."""

    def __init__(self, key: str) -> None:
        super().__init__(f"key {key!r} was changed by another process of the broker; end this one")


@dataclass(frozen=True, slots=True)
class _Kept:
    value: bytes
    version: int


class ClusterKeeper:
    """Metadata of one broker; make it with `open`. Keys are `<broker>/...` in `namespace`."""

    def __init__(
        self, client: StreamClient, cluster: str, broker: str, *, new_in_chunks: bool = False
    ) -> None:
        self._client = client
        self._namespace = f"_rocketmq_{cluster}"
        self._prefix = f"{broker}/"
        self._tag = f"{cluster}/{broker}"
        self.table = MetadataTable()
        self.indexed: dict[Queue, int] = {}
        """End of the messages of each queue whose keys are in saved index files."""
        self.streams: dict[SegmentPlace, OpenedStream] = {}
        self.chunked: set[SegmentPlace] = set()
        """Segments that lie in chunks of a bucket, and have no stream."""
        self.new_in_chunks = new_in_chunks
        self._kept: dict[str, _Kept] = {}
        self._unsettled: set[str] = set()
        """Keys of calls whose outcome is not known."""
        self._may_change_late: set[str] = set()
        """Keys whose outcome was read, and that a call without an answer may still change."""
        self._saving = asyncio.Lock()
        self._replaced: MetadataFencedError | None = None

    @classmethod
    async def open(
        cls, client: StreamClient, cluster: str, broker: str, *, new_in_chunks: bool = False
    ) -> ClusterKeeper:
        """Read the metadata, open the streams it names, and delete those that nothing names.

        A segment whose stream is gone was being deleted when a process ended, and is forgotten.
        Raises what bars the node or a stream.
        """
        keeper = cls(client, cluster, broker, new_in_chunks=new_in_chunks)
        for _ in range(_OPEN_ATTEMPTS):
            keeper._replaced = None
            try:
                await keeper._take_over()
            except MetadataFencedError:
                continue  # an earlier process wrote meanwhile, for the last time
            return keeper
        assert keeper._replaced is not None
        raise keeper._replaced

    async def _take_over(self) -> None:
        named = await self._load()
        await self.prove_owner()
        self.streams = {place: opened for place, opened in self.streams.items() if place in named}
        missing = {place: id_ for place, id_ in named.items() if place not in self.streams}
        opened = await self._open_existing(list(missing.values()))
        for place, stream_id in missing.items():
            if stream_id in opened:
                self.streams[place] = opened[stream_id]
            else:
                self.table.delete_segments(*place)
        await self._delete_unnamed()
        await self.save()

    @property
    def owner(self) -> OwnerKey:
        """A key that is there as long as the broker has metadata."""
        return OwnerKey(self._prefix + _SERIAL, self._namespace)

    # -- saving

    async def save(self) -> None:
        """Put what has changed and delete what is gone; segments that are new get a stream.

        Raises `MetadataFencedError`, and errors of the controllers.
        """
        self.require_owner()
        async with self._saving:
            await self._settle()
            await self._create_streams()
            wanted = self._wanted()
            changed = [
                kv_pb2.KVToPut(
                    namespace=self._namespace,
                    key=key,
                    value=value,
                    expected_version=self._version(key),
                )
                for key, value in wanted.items()
                if key not in self._kept or self._kept[key].value != value
            ]
            for at in range(0, len(changed), _BATCH):
                await self._put(changed[at : at + _BATCH])
            gone = [key for key in self._kept if key not in wanted]
            for at in range(0, len(gone), _BATCH):
                await self._delete(gone[at : at + _BATCH])

    def require_owner(self) -> None:
        """Raise `MetadataFencedError` if the process is known to be replaced."""
        if self._replaced is not None:
            raise self._replaced

    async def prove_owner(self) -> None:
        """Raise `MetadataFencedError` unless this is the newest process of its broker.

        Its proof is a change of the key that each process changes when it starts.
        """
        self.require_owner()
        async with self._saving:
            await self._settle()
            key = self._prefix + _TIME
            proof = kv_pb2.KVToPut(
                namespace=self._namespace,
                key=key,
                value=_json(self._time_value()),
                expected_version=self._version(key),
            )
            await self._put([proof])

    async def _settle(self) -> None:
        """Learn what became of calls whose outcome is not known.

        As long as no other process has taken the broker over, any change of its keys is its own.
        """
        if not self._unsettled:
            return
        time_key = self._prefix + _TIME
        keys = sorted(self._unsettled | {time_key})
        found: dict[str, kv_pb2.KVResult] = {}
        for at in range(0, len(keys), _BATCH):
            batch = keys[at : at + _BATCH]
            named = [kv_pb2.KVKey(namespace=self._namespace, key=key) for key in batch]
            request = kv_pb2.GetKVsRequest(keys=named)
            answer = await self._client.controllers.call(GET_KVS, request)
            found |= dict(zip(batch, answer.results, strict=True))

        stored = found[time_key]
        time = parse_json(stored.value) if stored.found else None
        if not isinstance(time, dict) or time.get("owner") != self._time_value()["owner"]:
            raise self._fenced(time_key)
        for key in self._unsettled:
            self._kept.pop(key, None)
            if found[key].found:
                self._kept[key] = _Kept(found[key].value, found[key].version)
        self._may_change_late |= self._unsettled
        self._unsettled.clear()

    async def _read_late_change(self, key: str) -> None:
        """Read a key again that a call without an answer has changed after all.

        Raises `MetadataFencedError` if no such call was made, or another process has taken over.
        """
        if key not in self._may_change_late:
            raise self._fenced(key)
        self._unsettled.add(key)
        await self._settle()

    def _time_value(self) -> dict[str, int]:
        return {"ms": self.table.noted_ms, "owner": self._client.session.node.node_epoch}

    def _fenced(self, key: str) -> MetadataFencedError:
        self._replaced = MetadataFencedError(key)
        return self._replaced

    def _version(self, key: str) -> int:
        return self._kept[key].version if key in self._kept else 0

    async def _put(self, items: list[kv_pb2.KVToPut]) -> None:
        request = kv_pb2.PutKVsRequest(items=items)
        keys = {item.key for item in items}
        self._unsettled |= keys
        answer = await self._client.controllers.call(PUT_KVS, request)
        self._unsettled -= keys
        failed = []
        for item, result in zip(items, answer.results, strict=True):
            is_own = result.error == ERROR_CODE_KEY_EXIST and result.value == item.value
            if result.error != ERROR_CODE_NONE and not is_own:
                failed.append((item, result.error))
                continue
            self._kept[item.key] = _Kept(item.value, result.version)
            self._may_change_late.discard(item.key)

        for item, error in failed:
            if error != ERROR_CODE_KEY_EXIST:
                raise refusal(error, f"key {item.key!r}")
            await self._read_late_change(item.key)
            item.expected_version = self._version(item.key)
        if failed:
            await self._put([item for item, _ in failed])

    async def _delete(self, keys: list[str]) -> None:
        named = [
            kv_pb2.KVKey(
                namespace=self._namespace, key=key, expected_version=self._kept[key].version
            )
            for key in keys
        ]
        request = kv_pb2.DeleteKVsRequest(keys=named)
        self._unsettled |= set(keys)
        answer = await self._client.controllers.call(DELETE_KVS, request)
        self._unsettled -= set(keys)
        failed = []
        for key, result in zip(keys, answer.results, strict=True):
            if result.error in (ERROR_CODE_NONE, ERROR_CODE_KEY_NOT_EXIST):
                del self._kept[key]
            else:
                failed.append((key, result.error))

        for key, error in failed:
            if error != ERROR_CODE_KEY_EXIST:
                raise refusal(error, f"key {key!r}")
            await self._read_late_change(key)
        if left := [key for key, _ in failed if key in self._kept]:
            await self._delete(left)

    # -- what commits put

    def grown(self, place: SegmentPlace, size: int, times: tuple[int, int]) -> ValueToPut:
        """Return the value of a segment that has grown to `size`, for the commit of its bytes.

        The commit is refused to a process that was replaced, so no version is compared.
        """
        segment = self._grown(place, size, times)
        key = self._segment_key(place)
        return ValueToPut(
            key=key, value=self._segment_value(segment), namespace=self._namespace, overwrite=True
        )

    def note_grown(
        self, place: SegmentPlace, size: int, times: tuple[int, int], put: ValueToPut, version: int
    ) -> None:
        """Take over what a commit has put."""
        self.table.put_segment(self._grown(place, size, times))
        self._kept[put.key] = _Kept(put.value, version)

    def _grown(self, place: SegmentPlace, size: int, times: tuple[int, int]) -> SegmentMetadata:
        begin_ms, end_ms = times
        return replace(self.table.segments[place], size=size, begin_ms=begin_ms, end_ms=end_ms)

    async def reload(self, place: SegmentPlace) -> None:
        """Read the value of a segment again, after a commit whose outcome is not known.

        Only a process that could open the segment's stream again may do so: it was not replaced.
        """
        named = kv_pb2.KVKey(namespace=self._namespace, key=self._segment_key(place))
        request = kv_pb2.GetKVsRequest(keys=[named])
        (found,) = (await self._client.controllers.call(GET_KVS, request)).results
        if found.found:
            self._kept[named.key] = _Kept(found.value, found.version)

    # -- streams

    async def reopened(self, place: SegmentPlace) -> OpenedStream:
        """Close the stream of a segment and open it under its next epoch; it has its end then.

        Its epoch is read first: an earlier attempt may have raised it without an answer. Raises
        `KeyError` if the segment has none, and what bars the node or the stream.
        """
        session, known = self._client.session, self.streams[place]
        epochs = await self._epochs([known.stream_id])
        epoch = epochs.get(known.stream_id, known.epoch)
        (await session.close_streams({known.stream_id: epoch})).require_all()
        opened = (await session.open_streams({known.stream_id: epoch + 1})).require_all()
        self.streams[place] = opened[known.stream_id]
        return self.streams[place]

    async def delete_stream(self, place: SegmentPlace) -> None:
        """Delete the stream of a segment with all its bytes, and forget the segment.

        A stream that is gone was deleted by an earlier attempt whose answer was lost.
        """
        stream = self.streams.get(place)
        if stream is not None:
            await self._delete_streams(await self._epochs([stream.stream_id]))
            del self.streams[place]
        self.table.delete_segments(*place)

    async def _delete_streams(self, epochs: Mapping[int, int]) -> None:
        session = self._client.session
        (await session.close_streams(epochs)).require_all()
        (await session.delete_streams(epochs)).require_all()

    async def _create_streams(self) -> None:
        """Create and open streams for segments that need one; their keys are put afterwards.

        Segments that come while that is under way are taken along.
        """
        self.chunked.intersection_update(self.table.segments)
        if self.new_in_chunks:
            self.chunked.update(self.table.segments.keys() - self.streams.keys())
        while new := [
            place
            for place in self.table.segments
            if place not in self.streams and place not in self.chunked
        ]:
            tags = [
                {TAG: self._tag, "path": path, "kind": kind.name, "base": str(base)}
                for path, kind, base in new
            ]
            ids = await self._client.create_streams(tags)
            opened = (await self._client.session.open_streams(dict.fromkeys(ids, 0))).require_all()
            for place, stream_id in zip(new, ids, strict=True):
                self.streams[place] = opened[stream_id]

    async def _epochs(self, stream_ids: list[int]) -> dict[int, int]:
        """Return the epochs that those of the streams have that exist."""
        return {
            stream.stream_id: stream.epoch or 0
            async for stream in self._client.controllers.describe_streams(stream_ids)
        }

    async def _open_existing(self, stream_ids: list[int]) -> dict[int, OpenedStream]:
        """Open those of the streams that exist; what an earlier process left open is taken over.

        Raises what bars the node or a stream, such as one that another node has open.
        """
        if not stream_ids:
            return {}
        inherited = {one.stream_id: one for one in self._client.inherited}
        opened: dict[int, OpenedStream] = {}
        epochs: dict[int, int] = {}
        async for one in self._client.controllers.describe_streams(stream_ids):
            if one.is_open and one.stream_id in inherited:
                opened[one.stream_id] = inherited[one.stream_id]
            else:
                epochs[one.stream_id] = 0 if one.epoch is None else one.epoch + 1
        return opened | (await self._client.session.open_streams(epochs)).require_all()

    async def _delete_unnamed(self) -> None:
        """Delete streams that a process created for a segment whose key it did not live to put."""
        node_id = self._client.session.node.node_id
        named = {one.stream_id for one in self.streams.values()}
        described = self._client.controllers.describe_streams(owner_node_id=node_id)
        left = [
            one.stream_id
            async for one in described
            if one.tags.get(TAG) == self._tag and one.stream_id not in named
        ]
        if left:
            opened = await self._open_existing(left)
            await self._delete_streams({one.stream_id: one.epoch for one in opened.values()})

    # -- keys and values

    async def _load(self) -> dict[SegmentPlace, int]:
        """Read all keys; return the stream ids of segments."""
        self.table, self.indexed = MetadataTable(), {}
        self.chunked.clear()
        self._kept.clear()
        named: dict[SegmentPlace, int] = {}
        request = kv_pb2.ListKVsRequest(namespace=self._namespace, prefix=self._prefix)
        async for answer in self._client.controllers.pages(LIST_KVS, request):
            for entry in answer.entries:
                self._kept[entry.key] = _Kept(entry.value, entry.version)
                value = parse_json(entry.value)
                sort = entry.key[len(self._prefix) :].partition("/")[0]
                if sort == "segment":
                    segment = _segment(value)
                    self.table.put_segment(segment)
                    place = (segment.path, segment.kind, segment.base_offset)
                    if "stream" in value:
                        named[place] = value["stream"]
                    else:
                        self.chunked.add(place)
                else:
                    self._take(sort, value)
        return named

    def _take(self, sort: str, value: Any) -> None:
        if sort == _SERIAL:
            self.table.last_topic_id = value
        elif sort == _TIME:
            self.table.noted_ms = value["ms"]
        elif sort == "topic":
            topic = TopicMetadata(**value)
            self.table.topics[topic.topic] = topic
        elif sort == "queue":
            queue = Queue(**value["queue"])
            first, end = value["offsets"]
            self.table.queues[queue] = QueueMetadata(
                queue, first, end, value["update_ms"], value.get("log_end", 0)
            )
        elif sort == "indexed":
            self.indexed[Queue(**value["queue"])] = value["end"]

    def _wanted(self) -> dict[str, bytes]:
        """Return all keys and their values."""
        table = self.table
        wanted: dict[str, Any] = {_SERIAL: table.last_topic_id, _TIME: self._time_value()}
        for topic in table.topics.values():
            wanted[f"topic/{topic.topic}"] = {
                name: getattr(topic, name) for name in TopicMetadata.__slots__
            }
        for queue, noted in table.queues.items():
            wanted[f"queue/{queue.path}"] = {
                "queue": _queue(queue),
                "offsets": [noted.min_offset, noted.max_offset],
                "update_ms": noted.update_ms,
                "log_end": noted.log_end,
            }
        for queue, end in self.indexed.items():
            wanted[f"indexed/{queue.path}"] = {"queue": _queue(queue), "end": end}
        values = {self._prefix + key: _json(value) for key, value in wanted.items()}
        for place, segment in table.segments.items():
            values[self._segment_key(place)] = self._segment_value(segment)
        return values

    def _segment_key(self, place: SegmentPlace) -> str:
        path, kind, base_offset = place
        return f"{self._prefix}segment/{kind.name}/{path}/{base_offset:020}"

    def _segment_value(self, one: SegmentMetadata) -> bytes:
        value: dict[str, Any] = {
            "path": one.path,
            "kind": int(one.kind),
            "base": one.base_offset,
            "status": int(one.status),
            "size": one.size,
            "times": [one.create_ms, one.begin_ms, one.end_ms, one.seal_ms],
        }
        place = (one.path, one.kind, one.base_offset)
        if place not in self.chunked:
            value["stream"] = self.streams[place].stream_id
        elif one.status is SegmentStatus.NEW:
            value["owner"] = self._client.session.node.node_epoch
        return _json(value)


def _segment(value: Mapping[str, Any]) -> SegmentMetadata:
    return SegmentMetadata(
        value["path"],
        SegmentType(value["kind"]),
        value["base"],
        SegmentStatus(value["status"]),
        value["size"],
        *value["times"],
    )


def _queue(queue: Queue) -> dict[str, Any]:
    return {"broker": queue.broker, "topic": queue.topic, "queue_id": queue.queue_id}


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
