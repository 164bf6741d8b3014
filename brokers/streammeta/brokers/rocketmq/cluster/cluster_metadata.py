"""Metadata of a broker as keys of a cluster: one key for each topic, queue and segment.

Owns keys, values and their versions, and the streams of segments. Each change is a compare-and-set.
A start changes the key of the store's time and the keys of unsealed chunks, so that a replaced
process can no longer change either. A commit of bytes puts the segment's value itself, and the
keeper only notes it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from streammeta.brokers.rocketmq.formats import metadata as metadata_format
from streammeta.brokers.rocketmq.formats.names import SegmentType
from streammeta.client import OpenedStream, OwnerKey, StreamClient, ValueToPut
from streammeta.storage.parsing import parse_json

TAG = "rocketmq"
"""Tag of the streams of segments. Its value is cluster and broker."""
_SERIAL = "serial"
_TIME = "time"
_OPEN_ATTEMPTS = 5

SegmentPlace = tuple[str, SegmentType, int]
"""Path, type and base offset of a segment."""


class MetadataFencedError(Exception):
    """Another process of the broker has changed the metadata."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"key {key!r} was changed by another process of the broker. Stop this process"
        )


@dataclass(frozen=True, slots=True)
class _Kept:
    value: bytes
    version: int


class ClusterKeeper:
    """Metadata of one broker. Create it with `open`. Keys are `<broker>/...` in `namespace`."""

    def __init__(
        self, client: StreamClient, cluster: str, broker: str, *, new_in_chunks: bool = False
    ) -> None:
        self._client = client
        self._namespace = f"_rocketmq_{cluster}"
        self._prefix = f"{broker}/"
        self._tag = f"{cluster}/{broker}"
        self.table = metadata_format.MetadataTable()
        self.indexed: dict[metadata_format.Queue, int] = {}
        """For each queue, the end of the messages whose keys are in saved index files."""
        self.streams: dict[SegmentPlace, OpenedStream] = {}
        self.chunked: set[SegmentPlace] = set()
        """Segments in chunks of a bucket, without a stream."""
        self.new_in_chunks = new_in_chunks
        self._kept: dict[str, _Kept] = {}
        self._unsettled: set[str] = set()
        """Keys of calls without a known outcome."""
        self._may_change_late: set[str] = set()
        """Keys whose outcome was read, but that an unanswered call may still change."""
        self._saving = asyncio.Lock()
        self._replaced: MetadataFencedError | None = None

    @classmethod
    async def open(
        cls, client: StreamClient, cluster: str, broker: str, *, new_in_chunks: bool = False
    ) -> ClusterKeeper:
        """Read the metadata, open the named streams, and delete unnamed ones.

        A segment without its stream was being deleted when a process ended, and is forgotten.
        Raises errors of the node and of streams.
        """
        keeper = cls(client, cluster, broker, new_in_chunks=new_in_chunks)
        for _ in range(_OPEN_ATTEMPTS):
            # Each attempt starts without the verdict of the one before.
            keeper._replaced = None
            try:
                await keeper._take_over()
            except MetadataFencedError:
                # An earlier process wrote meanwhile. Its next write fails, so try again.
                continue
            return keeper

        assert keeper._replaced is not None
        raise keeper._replaced

    async def _take_over(self) -> None:
        named = await self._load()
        # From here on, writes of earlier processes fail.
        await self.prove_owner()
        self.streams = {place: opened for place, opened in self.streams.items() if place in named}
        # Streams opened by an earlier attempt stay open.
        missing = {place: id_ for place, id_ in named.items() if place not in self.streams}
        opened = await self._open_existing(list(missing.values()))
        for place, stream_id in missing.items():
            if stream_id in opened:
                self.streams[place] = opened[stream_id]
            else:
                # Its stream is gone: an earlier process was deleting the segment.
                self.table.delete_segments(*place)

        await self._delete_unnamed_streams()
        await self.save()

    @property
    def owner(self) -> OwnerKey:
        """A key that exists as long as the broker has metadata."""
        return OwnerKey(self._prefix + _SERIAL, self._namespace)

    # -- saving

    async def save(self) -> None:
        """Put changed keys and delete removed ones. New segments get a stream.

        Raises `MetadataFencedError`, and errors of the controllers.
        """
        self.require_owner()
        async with self._saving:
            # Versions are unknown after an unanswered call, so they are read first.
            await self._settle()
            await self._create_streams()

            # Streams exist before their keys are put, so a key never names a missing stream.
            wanted = self._encode_keys()
            changed = {
                key: value
                for key, value in wanted.items()
                if key not in self._kept or self._kept[key].value != value
            }
            await self._put(changed)

            gone = [key for key in self._kept if key not in wanted]
            await self._delete(gone)

    def require_owner(self) -> None:
        """Raise `MetadataFencedError` if the process is known to be replaced."""
        if self._replaced is not None:
            raise self._replaced

    async def prove_owner(self) -> None:
        """Raise `MetadataFencedError` unless this is the newest process of its broker.

        The proof is a change of the key that each process changes at its start.
        """
        self.require_owner()
        async with self._saving:
            await self._settle()
            key = self._prefix + _TIME
            # The put fails if a later process has changed the key.
            await self._put({key: _json(self._time_value())})

    async def _settle(self) -> None:
        """Read the outcome of unanswered calls.

        Until another process takes the broker over, every change of its keys is its own.
        """
        if not self._unsettled:
            return

        time_key = self._prefix + _TIME
        keys = sorted(self._unsettled | {time_key})
        found = await self._client.kv.get_many(keys, namespace=self._namespace)
        time = parse_json(found[time_key].value) if time_key in found else None
        if not isinstance(time, dict) or time.get("owner") != self._time_value()["owner"]:
            # Another owner's value: a later process has started.
            raise self._fence(time_key)
        for key in self._unsettled:
            self._kept.pop(key, None)
            if key in found:
                self._kept[key] = _Kept(found[key].value, found[key].version)

        # A call may still be on its way, and change a key after this read.
        self._may_change_late |= self._unsettled
        self._unsettled.clear()

    async def _read_late_change(self, key: str) -> None:
        """Read a key again after an unanswered call has changed it late.

        Raises `MetadataFencedError` without such a call, or if another process has taken over.
        """
        if key not in self._may_change_late:
            raise self._fence(key)
        self._unsettled.add(key)
        await self._settle()

    def _time_value(self) -> dict[str, int]:
        return {"ms": self.table.noted_ms, "owner": self._client.session.node.node_epoch}

    def _fence(self, key: str) -> MetadataFencedError:
        self._replaced = MetadataFencedError(key)
        return self._replaced

    def _version(self, key: str) -> int:
        return self._kept[key].version if key in self._kept else 0

    async def _put(self, values: Mapping[str, bytes]) -> None:
        items = [
            ValueToPut(
                key=key,
                value=value,
                namespace=self._namespace,
                expected_version=self._version(key),
            )
            for key, value in values.items()
        ]
        # Until the answer arrives, the outcome is unknown.
        self._unsettled |= values.keys()
        results = await self._client.kv.put_many(items)
        self._unsettled -= values.keys()
        failed = {}
        for item, result in zip(items, results, strict=True):
            # A retry of an applied put finds its own value.
            if result.is_conflict and result.value != item.value:
                failed[item.key] = item.value
                continue
            self._kept[item.key] = _Kept(item.value, result.version)
            self._may_change_late.discard(item.key)

        # Raised after the loop, so that the results of the other items are noted.
        for key in failed:
            await self._read_late_change(key)
        # The versions are read again, so the retry can only fail once another process writes.
        if failed:
            await self._put(failed)

    async def _delete(self, keys: Sequence[str]) -> None:
        versions = {key: self._kept[key].version for key in keys}
        self._unsettled |= versions.keys()
        failed = await self._client.kv.delete_many(versions, namespace=self._namespace)
        self._unsettled -= versions.keys()
        for key in versions.keys() - failed:
            del self._kept[key]

        for key in failed:
            await self._read_late_change(key)
        if left := [key for key in failed if key in self._kept]:
            await self._delete(left)

    # -- values in commits

    def encode_growth(self, place: SegmentPlace, size: int, times: tuple[int, int]) -> ValueToPut:
        """Return the value of a segment that has grown to `size`, for the commit of its bytes.

        The controller rejects commits of a replaced process, so no version is compared.
        """
        segment = self._grow(place, size, times)
        key = self._segment_key(place)
        return ValueToPut(
            key=key, value=self._segment_value(segment), namespace=self._namespace, overwrite=True
        )

    def note_growth(
        self, place: SegmentPlace, size: int, times: tuple[int, int], put: ValueToPut, version: int
    ) -> None:
        """Note the value that a commit has put."""
        self.table.put_segment(self._grow(place, size, times))
        self._kept[put.key] = _Kept(put.value, version)

    def _grow(
        self, place: SegmentPlace, size: int, times: tuple[int, int]
    ) -> metadata_format.SegmentMetadata:
        begin_ms, end_ms = times
        return replace(self.table.segments[place], size=size, begin_ms=begin_ms, end_ms=end_ms)

    async def reload(self, place: SegmentPlace) -> None:
        """Read the value of a segment again, after a commit without a known outcome.

        Only a process that could open the segment's stream again may call this: it was not
        replaced.
        """
        found = await self._client.kv.get(self._segment_key(place), namespace=self._namespace)
        if found is not None:
            self._kept[found.key] = _Kept(found.value, found.version)

    # -- streams

    async def reopen_stream(self, place: SegmentPlace) -> OpenedStream:
        """Close the stream of a segment and open it under its next epoch, with its final end.

        The current epoch is read first, because an unanswered attempt may have raised it. Raises
        `KeyError` if the segment has no stream, and errors of the node and of the stream.
        """
        session, known = self._client.session, self.streams[place]
        # An unanswered attempt may have raised the epoch already.
        epochs = await self._read_epochs([known.stream_id])
        epoch = epochs.get(known.stream_id, known.epoch)
        (await session.close_streams({known.stream_id: epoch})).require_all()
        opened = (await session.open_streams({known.stream_id: epoch + 1})).require_all()
        self.streams[place] = opened[known.stream_id]
        return self.streams[place]

    async def delete_stream(self, place: SegmentPlace) -> None:
        """Delete the stream of a segment with all its bytes, and forget the segment.

        A missing stream was deleted by an earlier attempt whose answer was lost.
        """
        stream = self.streams.get(place)
        if stream is not None:
            await self._delete_streams(await self._read_epochs([stream.stream_id]))
            del self.streams[place]
        self.table.delete_segments(*place)

    async def _delete_streams(self, epochs: Mapping[int, int]) -> None:
        session = self._client.session
        # Only closed streams can be deleted.
        (await session.close_streams(epochs)).require_all()
        (await session.delete_streams(epochs)).require_all()

    async def _create_streams(self) -> None:
        """Create and open streams for segments without one. Their keys are put afterwards.

        Includes segments that are added meanwhile.
        """
        # Segments that were deleted meanwhile need no place.
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
            # Streams of a process that ends before it puts their keys are found by these tags.
            ids = await self._client.create_streams(tags)
            opened = (await self._client.session.open_streams(dict.fromkeys(ids, 0))).require_all()
            for place, stream_id in zip(new, ids, strict=True):
                self.streams[place] = opened[stream_id]

    async def _read_epochs(self, stream_ids: list[int]) -> dict[int, int]:
        """Return the epochs of the existing streams."""
        return {
            stream.stream_id: stream.epoch or 0
            async for stream in self._client.controllers.describe_streams(stream_ids)
        }

    async def _open_existing(self, stream_ids: list[int]) -> dict[int, OpenedStream]:
        """Open the existing streams, and adopt streams that an earlier process left open.

        Raises errors of the node and of streams, such as one that another node has open.
        """
        if not stream_ids:
            return {}

        inherited = {stream.stream_id: stream for stream in self._client.inherited}
        opened: dict[int, OpenedStream] = {}
        epochs: dict[int, int] = {}
        async for stream in self._client.controllers.describe_streams(stream_ids):
            # The client has adopted streams that this node had open before a restart.
            if stream.is_open and stream.stream_id in inherited:
                opened[stream.stream_id] = inherited[stream.stream_id]
            else:
                epochs[stream.stream_id] = 0 if stream.epoch is None else stream.epoch + 1

        return opened | (await self._client.session.open_streams(epochs)).require_all()

    async def _delete_unnamed_streams(self) -> None:
        """Delete streams of segments whose process ended before it put their keys."""
        node_id = self._client.session.node.node_id
        named = {stream.stream_id for stream in self.streams.values()}
        described = self._client.controllers.describe_streams(owner_node_id=node_id)

        left = [
            stream.stream_id
            async for stream in described
            if stream.tags.get(TAG) == self._tag and stream.stream_id not in named
        ]
        if left:
            opened = await self._open_existing(left)
            await self._delete_streams(
                {stream.stream_id: stream.epoch for stream in opened.values()}
            )

    # -- keys and values

    async def _load(self) -> dict[SegmentPlace, int]:
        """Read all keys. Return the stream ids of segments."""
        self.table, self.indexed = metadata_format.MetadataTable(), {}
        self.chunked.clear()
        self._kept.clear()
        named: dict[SegmentPlace, int] = {}
        async for entry in self._client.kv.list(self._prefix, namespace=self._namespace):
            self._kept[entry.key] = _Kept(entry.value, entry.version)
            value = parse_json(entry.value)
            sort = entry.key[len(self._prefix) :].partition("/")[0]
            # The first part of a key names the kind of its value.
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
            topic = metadata_format.TopicMetadata(**value)
            self.table.topics[topic.topic] = topic
        elif sort == "queue":
            queue = metadata_format.Queue(**value["queue"])
            first, end = value["offsets"]
            self.table.queues[queue] = metadata_format.QueueMetadata(
                queue, first, end, value["update_ms"], value.get("log_end", 0)
            )
        elif sort == "indexed":
            self.indexed[metadata_format.Queue(**value["queue"])] = value["end"]

    def _encode_keys(self) -> dict[str, bytes]:
        """Return all keys and their values."""
        table = self.table
        wanted: dict[str, Any] = {_SERIAL: table.last_topic_id, _TIME: self._time_value()}
        for topic in table.topics.values():
            wanted[f"topic/{topic.topic}"] = {
                name: getattr(topic, name) for name in metadata_format.TopicMetadata.__slots__
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

    def _segment_value(self, segment: metadata_format.SegmentMetadata) -> bytes:
        value: dict[str, Any] = {
            "path": segment.path,
            "kind": int(segment.kind),
            "base": segment.base_offset,
            "status": int(segment.status),
            "size": segment.size,
            "times": [segment.create_ms, segment.begin_ms, segment.end_ms, segment.seal_ms],
        }
        place = (segment.path, segment.kind, segment.base_offset)
        if place not in self.chunked:
            value["stream"] = self.streams[place].stream_id
        elif segment.status is metadata_format.SegmentStatus.NEW:
            # Each process changes the keys of unsealed chunks, so a replaced one fails to save
            # them.
            value["owner"] = self._client.session.node.node_epoch

        return _json(value)


def _segment(value: Mapping[str, Any]) -> metadata_format.SegmentMetadata:
    return metadata_format.SegmentMetadata(
        value["path"],
        SegmentType(value["kind"]),
        value["base"],
        metadata_format.SegmentStatus(value["status"]),
        value["size"],
        *value["times"],
    )


def _queue(queue: metadata_format.Queue) -> dict[str, Any]:
    return {"broker": queue.broker, "topic": queue.topic, "queue_id": queue.queue_id}


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
