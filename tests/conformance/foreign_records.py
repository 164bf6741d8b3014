"""Replays records of the scenarios' vocabulary on the rows of a map.

Those records say what a row is from now on; ours say what happened. Where one of ours says the same
it is replayed by the map itself; the others edit the rows of a checkpoint that is loaded instead.
Ends never fall. `image` records are replayed as a reader of the metadata does, who takes an unknown
node or owner as it comes; without it as the controller does, who passes such records over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from streammeta.controller.metadata.tables.values import (
    ObjectKind,
    ObjectState,
    StreamState,
    column,
)
from streammeta.controller.records import record as ours
from streammeta.controller.records.codec import decode_records, encode_records
from tests.conformance.conformance_report import Mismatch
from tests.conformance.live_controller import LiveController
from tests.conformance.map_rows import MetadataRows, Row
from tests.conformance.scenario_args import Args, UnknownFieldsError

EPOCH_SHIFT = 1
"""The scenarios number node epochs from -1, the contract from 0."""


class ForeignRecords:
    def __init__(self, live: LiveController, *, image: bool = False) -> None:
        self._live = live
        self._image = image
        self._claimed: dict[int, int] = {}
        self.recorded_ends: dict[int, int] = {}

    def replay(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Replay records.

        Raises:
            RecordCodecError: the log refuses a record like this.
            UnknownFieldsError: what is known was replayed, and this was left out.
        """
        unknown: list[Mismatch] = []
        edited: MetadataRows | None = None  # edits that follow each other are loaded as one
        for index, content in enumerate(records):
            args = Args(content, f"records[{index}]")
            kind = args.take("type", "")
            if kind in _REPLAYED:
                self._load(edited)
                edited = None
                self._replay_ours(_REPLAYED[kind](self, args))
            elif kind in _EDITED:
                edited = edited or self._live.rows()
                _EDITED[kind](self, args, edited)
            else:
                unknown.append(Mismatch(f"{args.path}.type", kind, "unknown record type"))
                continue
            unknown.extend(args.unknown())
        self._load(edited)
        if unknown:
            raise UnknownFieldsError(unknown)

    def _load(self, edited: MetadataRows | None) -> None:
        if edited is not None:
            self._live.load(edited.sections())

    def _replay_ours(self, record: ours.Record | None) -> None:
        if record is not None:
            decode_records(encode_records([record]))  # a refused record never reaches the log
            self._live.replay([record])

    # ---- records of ours that say the same ----

    def _node(self, args: Args) -> ours.Record:
        node_id = args.take("node", 0)
        epoch = args.take("node_epoch", 0) + EPOCH_SHIFT
        return ours.NodeEpochSet(
            node_id=node_id, node_epoch=epoch, failover=bool(args.take("failover", False))
        )

    def _uncommitted(self, args: Args) -> ours.Record | None:
        node_id, entries = args.take("node", 0), args.take("entries", [])
        rows = [Args(entry, "records.entries") for entry in entries]
        wanted = [(row.take("stream", 0), row.take("start", 0), row.take("end", 0)) for row in rows]
        wanted = sorted(row for row in wanted if row[1] <= row[2])
        if not wanted:
            return None
        ids, starts, ends = zip(*wanted, strict=True)
        return ours.PendingUploadsSet(
            node_id=node_id,
            stream_id=column(ids),
            start_offset=column(starts),
            end_offset=column(ends),
        )

    def _kv(self, args: Args) -> ours.Record:
        entries = args.take("entries", None)
        if entries is None:
            entries = [{name: args.take(name, None) for name in ("key", "value", "namespace")}]
        return ours.KVsPut(
            namespaces=tuple(entry.get("namespace") or "" for entry in entries),
            keys=tuple(entry["key"] for entry in entries),
            values=tuple(entry["value"].encode() for entry in entries),
        )

    def _remove_kv(self, args: Args) -> ours.Record | None:
        keys, namespaces = args.take("keys", []), args.take("namespaces", None)
        if namespaces is None:
            namespaces = [None] * len(keys)
        names = [namespace or "" for namespace in namespaces]
        if len(keys) == len(names):
            held = self._live.rows()
            pairs = [
                (name, key)
                for name, key in zip(names, keys, strict=True)
                if held.one("kvs", namespace=name, key=key)
            ]
            names, keys = [name for name, _ in pairs], [key for _, key in pairs]
            if not pairs:
                return None
        return ours.KVsDeleted(namespaces=tuple(names), keys=tuple(keys))

    # ---- edits ----

    def _stream(self, args: Args, rows: MetadataRows) -> None:
        stream_id, start = args.take("stream", 0), args.take("start", 0)
        tags, known = args.take("tags", {}) or {}, rows.one("streams", stream_id=stream_id)
        if known is not None and not self._image:
            start = max(start, known["start_offset"])
        end = max(start, known["end_offset"] if known is not None else 0)
        rows.put(
            "streams",
            {"stream_id": stream_id},
            epoch=args.take("epoch", 0),
            start_offset=start,
            end_offset=end,
            state=int(StreamState[args.take("state", "CLOSED")]),
        )
        self._claimed[stream_id] = args.take("range_index", 0)
        if tags and (self._image or not rows.one("stream_tags", stream_id=stream_id)):
            rows.drop("stream_tags", stream_id=stream_id)
            for key, value in sorted(tags.items()):
                rows.put("stream_tags", {"stream_id": stream_id, "key": key}, value=value)
        counters = rows.counters
        counters["next_stream_id"] = max(counters["next_stream_id"], stream_id + 1)
        self._settle(rows, stream_id)

    def _settle(self, rows: MetadataRows, stream_id: int) -> None:
        """Make the stream's owner that of its current range, as far as that is known."""
        stream = rows.one("streams", stream_id=stream_id)
        ranges = rows.rows("ranges", stream_id=stream_id)
        if stream is None:
            return
        claimed = self._claimed.get(stream_id, stream["range_index"])
        if self._image:
            claimed = max((row["range_index"] for row in ranges), default=-1)
        current = next((row for row in ranges if row["range_index"] == claimed), None)
        stream["range_index"] = claimed if current else -1
        stream["node_id"] = current["node_id"] if current else -1

    def _range(self, args: Args, rows: MetadataRows) -> None:
        stream_id, index = args.take("stream", 0), args.take("index", 0)
        end = args.take("end", 0)
        stream = rows.one("streams", stream_id=stream_id)
        values = {
            "epoch": args.take("epoch", 0),
            "start_offset": args.take("start", 0),
            "end_offset": end,
            "node_id": args.take("node", 0),
        }
        if stream is None:
            return
        rows.put("ranges", {"stream_id": stream_id, "range_index": index}, **values)
        stream["end_offset"] = max(stream["end_offset"], end)
        self.recorded_ends[stream_id] = end
        self._settle(rows, stream_id)

    def _remove_range(self, args: Args, rows: MetadataRows) -> None:
        stream_id = args.take("stream", 0)
        rows.drop("ranges", stream_id=stream_id, range_index=args.take("index", 0))
        self._settle(rows, stream_id)

    def _remove_stream(self, args: Args, rows: MetadataRows) -> None:
        stream_id = args.take("stream", 0)
        for held in rows.rows("object_ranges", stream_id=stream_id):
            kept = rows.one("objects", object_id=held["object_id"])
            if kept is not None and kept["kind"] != ObjectKind.STREAM_SET:
                self._forget_holder(rows, held["object_id"])
        for section in ("streams", "stream_tags", "ranges"):
            rows.drop(section, stream_id=stream_id)

    def _forget_holder(self, rows: MetadataRows, object_id: int) -> None:
        rows.drop("object_ranges", object_id=object_id)
        kept = rows.one("objects", object_id=object_id)
        if kept is not None:
            kept.update(kind=int(ObjectKind.UNKNOWN), node_id=-1, order_id=-1)

    def _object_row(self, rows: MetadataRows, object_id: int) -> Row:
        counters = rows.counters
        counters["next_object_id"] = max(counters["next_object_id"], object_id + 1)
        return rows.put("objects", {"object_id": object_id})

    def _hold(self, rows: MetadataRows, object_id: int, ranges: list[Mapping[str, Any]]) -> None:
        rows.drop("object_ranges", object_id=object_id)
        for held in ranges:
            stream_id, start, end = held["stream"], held["start"], held["end"]
            key = {"object_id": object_id, "stream_id": stream_id, "start_offset": start}
            rows.put("object_ranges", key, end_offset=end)
            stream = rows.one("streams", stream_id=stream_id)
            if stream is not None:
                stream["end_offset"] = max(stream["end_offset"], end)

    def _set_object(self, args: Args, rows: MetadataRows) -> None:
        object_id, node_id = args.take("object", 0), args.take("node", 0)
        order_id, ranges = args.take("order", 0), args.take("ranges", [])
        data_time_ms = args.take("data_time_ms", 0)
        if rows.one("nodes", node_id=node_id) is None:
            if not self._image:
                return
            rows.put("nodes", {"node_id": node_id}, node_epoch=-1 + EPOCH_SHIFT)
        row = self._object_row(rows, object_id)
        row.update(state=int(ObjectState.COMMITTED), kind=int(ObjectKind.STREAM_SET))
        row.update(node_id=node_id, order_id=order_id)
        if "data_time_ms" in row:
            row["data_time_ms"] = data_time_ms
        self._hold(rows, object_id, ranges)

    def _remove_holder(self, args: Args, rows: MetadataRows) -> None:
        args.take("node", 0), args.take("stream", 0)
        self._forget_holder(rows, args.take("object", 0))

    def _stream_object(self, args: Args, rows: MetadataRows) -> None:
        object_id, stream_id = args.take("object", 0), args.take("stream", 0)
        held = {"stream": stream_id, "start": args.take("start", 0), "end": args.take("end", 0)}
        if rows.one("streams", stream_id=stream_id) is None:
            return
        row = self._object_row(rows, object_id)
        row.update(state=int(ObjectState.COMMITTED), kind=int(ObjectKind.STREAM))
        self._hold(rows, object_id, [held])

    def _end_offsets(self, args: Args, rows: MetadataRows) -> None:
        for item in args.take("end_offsets", []):
            stream = rows.one("streams", stream_id=item["stream"])
            if stream is not None:
                stream["end_offset"] = max(stream["end_offset"], item["end"])

    def _object(self, args: Args, rows: MetadataRows) -> None:
        row = self._object_row(rows, args.take("object", 0))
        row["state"] = int(ObjectState[args.take("state", "PREPARED")])
        row["object_size"] = args.take("size", 0)
        row["timestamp_ms"] = args.take("timestamp", args.take("timestamp_ms", 0))
        row["attributes"] = args.take("attributes", 0)

    def _remove_object(self, args: Args, rows: MetadataRows) -> None:
        object_id = args.take("object", 0)
        rows.drop("object_ranges", object_id=object_id)
        rows.drop("objects", object_id=object_id)

    def _remove_node(self, args: Args, rows: MetadataRows) -> None:
        node_id = args.take("node", 0)
        for row in rows.rows("objects", node_id=node_id, kind=int(ObjectKind.STREAM_SET)):
            self._forget_holder(rows, row["object_id"])
        rows.drop("nodes", node_id=node_id)
        rows.drop("node_tags", node_id=node_id)

    def _assigned_stream(self, args: Args, rows: MetadataRows) -> None:
        rows.counters["next_stream_id"] = args.take("assigned", 0) + 1

    def _assigned_object(self, args: Args, rows: MetadataRows) -> None:
        rows.counters["next_object_id"] = args.take("assigned", 0) + 1


def stream_records(stream_id: int, fields: Args) -> Iterator[dict[str, Any]]:
    """Yield the records of a stream that a scenario describes with its ranges and objects."""
    named = {name: fields.take(name) for name in ("epoch", "state", "start") if fields.has(name)}
    yield {"type": "S3Stream", "stream": stream_id, "range_index": -1, **named}
    for item in fields.take("ranges", []):
        yield {"type": "Range", "stream": stream_id, **item}
    for item in fields.take("stream_objects", []):
        yield {"type": "S3StreamObject", "stream": stream_id, **item}


def node_records(
    node_id: int, epoch: int, set_objects: Iterable[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    yield {"type": "NodeWALMetadata", "node": node_id, "node_epoch": epoch}
    for item in set_objects:
        yield {"type": "S3StreamSetObject", "node": node_id, **item}


_REPLAYED: dict[str, Callable[[ForeignRecords, Args], ours.Record | None]] = {
    "NodeWALMetadata": ForeignRecords._node,
    "NodeWALUncommittedOffsets": ForeignRecords._uncommitted,
    "KV": ForeignRecords._kv,
    "RemoveKV": ForeignRecords._remove_kv,
}
_EDITED: dict[str, Callable[[ForeignRecords, Args, MetadataRows], None]] = {
    "AssignedStreamId": ForeignRecords._assigned_stream,
    "AssignedS3ObjectId": ForeignRecords._assigned_object,
    "S3Stream": ForeignRecords._stream,
    "RemoveS3Stream": ForeignRecords._remove_stream,
    "Range": ForeignRecords._range,
    "RemoveRange": ForeignRecords._remove_range,
    "S3StreamSetObject": ForeignRecords._set_object,
    "RemoveStreamSetObject": ForeignRecords._remove_holder,
    "S3StreamObject": ForeignRecords._stream_object,
    "RemoveS3StreamObject": ForeignRecords._remove_holder,
    "S3StreamEndOffsets": ForeignRecords._end_offsets,
    "S3Object": ForeignRecords._object,
    "RemoveS3Object": ForeignRecords._remove_object,
    "RemoveNodeWALMetadata": ForeignRecords._remove_node,
}
