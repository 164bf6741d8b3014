"""The map's rules once more, slowly and obviously: dictionaries and loops, one row at a time.

Written from the contract, not from the map's code; the state machine compares the two.
"""

from dataclasses import dataclass, field
from typing import Any

from controller.errors import ErrorCode
from controller.metadata.values import ObjectState


@dataclass
class Stream:
    epoch: int = -1
    index: int = -1
    start: int = 0
    end: int = 0
    opened: bool = False
    node: int = -1
    ranges: list[dict[str, int]] = field(default_factory=list)
    tags: tuple[tuple[str, str], ...] = ()


@dataclass
class Object:
    deadline: int
    state: ObjectState = ObjectState.PREPARED
    kind: str = "UNKNOWN"
    size: int = 0
    node: int = -1
    held: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class Row:
    stream: int
    start: int
    end: int
    epoch: int | None
    object_id: int = -1


class Model:
    def __init__(self) -> None:
        self.nodes: dict[int, tuple[int, bool]] = {}
        self.streams: dict[int, Stream] = {}
        self.next_stream = 0
        self.objects: dict[int, Object] = {}
        self.next_object = 0
        self.forgotten_commits: set[int] = set()
        self.requests: dict[Any, Any] = {}
        self.rejected: dict[tuple[int, int], ErrorCode] = {}
        self.kvs: dict[tuple[str, str], tuple[bytes, int]] = {}

    def check(self, node: tuple[int, int], *, fence: bool = True) -> ErrorCode:
        known = self.nodes.get(node[0])
        if known is None:
            return ErrorCode.NODE_EPOCH_NOT_EXIST
        if known[0] > node[1]:
            return ErrorCode.NODE_EPOCH_EXPIRED
        return ErrorCode.NODE_FENCED if fence and known[1] else ErrorCode.NONE

    def register(self, node: tuple[int, int]) -> ErrorCode:
        epoch, failover = self.nodes.get(node[0], (-1, False))
        if epoch > node[1]:
            return ErrorCode.NODE_EPOCH_EXPIRED
        self.nodes[node[0]] = (node[1], failover and epoch == node[1])
        return ErrorCode.NONE

    def opening(self, node: tuple[int, int], *, failover: bool) -> tuple[ErrorCode, list[int]]:
        if node[0] in self.nodes and self.nodes[node[0]][0] > node[1]:
            return ErrorCode.NODE_EPOCH_EXPIRED, []
        self.nodes[node[0]] = (node[1], failover)
        owned = [i for i, s in self.streams.items() if s.opened and s.node == node[0]]
        return ErrorCode.NONE, sorted(owned)

    def create(self, request_id: str, node: tuple[int, int], tag_sets: list[Any]) -> Any:
        error = self.check(node)
        if error:
            return error, ()
        key = ("create", node[0], request_id)
        if key not in self.requests:
            ids = tuple(range(self.next_stream, self.next_stream + len(tag_sets)))
            for stream_id, tags in zip(ids, tag_sets, strict=True):
                self.streams[stream_id] = Stream(tags=tuple(sorted(tags)))
            self.next_stream += len(ids)
            self.requests[key] = ids
        return error, self.requests[key]

    def open(self, node: tuple[int, int], stream_id: int, epoch: int) -> tuple[ErrorCode, int, int]:
        error = self.check(node) or self._open(node[0], stream_id, epoch)
        if error:
            return error, -1, -1
        stream = self.streams[stream_id]
        return error, stream.start, stream.end

    def _open(self, node_id: int, stream_id: int, epoch: int) -> ErrorCode:
        stream = self.streams.get(stream_id)
        if stream is None:
            return ErrorCode.STREAM_NOT_EXIST
        if stream.epoch > epoch:
            return ErrorCode.STREAM_FENCED
        if stream.epoch == epoch:
            if stream.node != node_id:
                return ErrorCode.STREAM_FENCED
            stream.opened = True
            return ErrorCode.NONE
        if stream.opened:
            return ErrorCode.STREAM_NOT_CLOSED
        ranges_before = stream.ranges[:-1]
        covered = self._covered(stream_id)
        if covered is not None:
            for item in ranges_before:
                inside = covered[0] <= item["start"] and item["end"] <= covered[1]
                if item["start"] == item["end"] or inside:
                    stream.ranges.remove(item)
        if stream.ranges:
            stream.ranges[-1]["end"] = stream.end
        stream.index += 1
        stream.ranges.append(
            {"index": stream.index, "epoch": epoch, "node": node_id, "start": stream.end}
        )
        stream.epoch, stream.node, stream.opened = epoch, node_id, True
        return ErrorCode.NONE

    def _covered(self, stream_id: int) -> tuple[int, int] | None:
        held = sorted(
            (end, object_id, start)
            for object_id, item in self.objects.items()
            if item.kind == "STREAM" and item.state is ObjectState.COMMITTED
            for stream, start, end in item.held
            if stream == stream_id
        )
        if not held:
            return None
        low, high = held[0][2], held[0][0]
        for end, _, start in held[1:]:
            if start != high:
                break
            high = end
        return low, high

    def own(self, node_id: int, stream_id: int, epoch: int) -> ErrorCode:
        stream = self.streams.get(stream_id)
        if stream is None:
            return ErrorCode.STREAM_NOT_EXIST
        if stream.epoch > epoch:
            return ErrorCode.STREAM_FENCED
        if stream.epoch < epoch:
            return ErrorCode.STREAM_INNER_ERROR
        return ErrorCode.NONE if stream.node == node_id else ErrorCode.STREAM_FENCED

    def close(self, node: tuple[int, int], stream_id: int, epoch: int) -> ErrorCode:
        error = self.check(node, fence=False) or self.own(node[0], stream_id, epoch)
        if not error:
            self.streams[stream_id].opened = False
        return error

    def trim(self, node: tuple[int, int], stream_id: int, epoch: int, start: int) -> ErrorCode:
        error = self.check(node) or self.own(node[0], stream_id, epoch)
        if error:
            return error
        stream = self.streams[stream_id]
        if not stream.opened:
            return ErrorCode.STREAM_NOT_OPENED
        if start < stream.start:
            return ErrorCode.OFFSET_NOT_MATCHED
        stream.start, stream.end = start, max(stream.end, start)
        kept = [item for item in stream.ranges[:-1] if item["end"] > start]
        stream.ranges = [*kept, stream.ranges[-1]]
        for item in stream.ranges:
            item["start"] = max(item["start"], start)
        return error

    def delete(self, node: tuple[int, int], stream_id: int, epoch: int, now: int) -> ErrorCode:
        error = self.check(node)
        stream = self.streams.get(stream_id)
        if error or stream is None:
            return error
        if stream.epoch != epoch:
            later = stream.epoch > epoch
            return ErrorCode.STREAM_FENCED if later else ErrorCode.STREAM_INNER_ERROR
        if stream.opened:
            return ErrorCode.STREAM_NOT_CLOSED
        for item in self.objects.values():
            if item.kind == "STREAM" and any(held[0] == stream_id for held in item.held):
                self._destroy(item, now)
        del self.streams[stream_id]
        return error

    def _destroy(self, item: Object, now: int) -> None:
        item.state, item.deadline, item.held = ObjectState.MARK_DESTROYED, now, []

    def prepare(self, request_id: str, node: tuple[int, int], count: int, deadline: int) -> Any:
        error = self.check(node)
        if error:
            return error, -1, -1
        key = ("prepare", node[0], request_id)
        if key not in self.requests:
            first = self.next_object
            self.next_object += count
            self.objects.update({i: Object(deadline) for i in range(first, self.next_object)})
            self.requests[key] = (first, deadline)
        return error, *self.requests[key]

    def expire(self, now: int) -> int:
        due = [
            item
            for item in self.objects.values()
            if item.state is ObjectState.PREPARED and item.deadline < now
        ]
        for item in due:
            self._destroy(item, now)
        return len(due)

    def remove(self, object_ids: list[int]) -> int:
        gone = {
            object_id
            for object_id in object_ids
            if object_id in self.objects
            and self.objects[object_id].state is ObjectState.MARK_DESTROYED
        }
        for object_id in gone:
            if self.objects.pop(object_id).kind != "UNKNOWN":
                self.forgotten_commits.add(object_id)
        return len(gone)

    def was_committed(self, object_id: int) -> bool:
        item = self.objects.get(object_id)
        if item is None:
            return object_id in self.forgotten_commits
        return item.kind != "UNKNOWN"

    def commit(
        self,
        node: tuple[int, int],
        object_id: int,
        size: int,
        ranges: list[Row],
        objects: list[Row],
        *,
        failover: bool,
        accept_valid: bool,
        now: int,
    ) -> tuple[ErrorCode, list[ErrorCode], list[ErrorCode]]:
        """`ranges` carry the set object's id in `object_id`; `objects` each its own."""
        error = self.check(node, fence=not failover)
        if error:
            return error, [error] * len(ranges), [error] * len(objects)
        deciding = [object_id] if object_id >= 0 else [row.object_id for row in objects]
        if any(map(self.was_committed, deciding)):
            codes = [
                [self.rejected.get((row.object_id, row.stream), ErrorCode.NONE) for row in rows]
                for rows in (ranges, objects)
            ]
            return ErrorCode.NONE, codes[0], codes[1]
        if object_id >= 0 and not self._is_prepared(object_id):
            error = ErrorCode.OBJECT_NOT_EXIST
            return error, [error] * len(ranges), [error] * len(objects)
        range_codes = [self._continuity(node[0], row) for row in ranges]
        object_codes = [self._object_code(row) or self._continuity(node[0], row) for row in objects]
        codes_all = range_codes + object_codes
        first_error = next((code for code in codes_all if code), ErrorCode.NONE)
        if first_error and (not accept_valid or all(codes_all)):
            return first_error, range_codes, object_codes
        if object_id >= 0:
            valid = [row for row, code in zip(ranges, range_codes, strict=True) if not code]
            self._hold(object_id, "STREAM_SET", size, valid, node[0])
        for row, code in zip(objects, object_codes, strict=True):
            if not code:
                exists = row.stream in self.streams
                self._hold(row.object_id, "STREAM", size, [row], -1)
                if not exists:
                    self._destroy(self.objects[row.object_id], now)
        for row, code in zip(ranges + objects, codes_all, strict=True):
            if code:
                self.rejected[(row.object_id, row.stream)] = code
        return ErrorCode.NONE, range_codes, object_codes

    def _is_prepared(self, object_id: int) -> bool:
        item = self.objects.get(object_id)
        return item is not None and item.state is ObjectState.PREPARED

    def _object_code(self, row: Row) -> ErrorCode:
        if self.was_committed(row.object_id):
            return ErrorCode.INVALID_REQUEST
        prepared = self._is_prepared(row.object_id)
        return ErrorCode.NONE if prepared else ErrorCode.OBJECT_NOT_EXIST

    def _continuity(self, node_id: int, row: Row) -> ErrorCode:
        if row.stream >= self.next_stream:
            return ErrorCode.STREAM_NOT_EXIST
        stream = self.streams.get(row.stream)
        if stream is None or row.end <= stream.start:
            return ErrorCode.NONE
        if row.epoch is not None and stream.epoch > row.epoch:
            return ErrorCode.STREAM_FENCED
        if row.epoch is not None and stream.epoch < row.epoch:
            return ErrorCode.STREAM_INNER_ERROR
        if not stream.opened:
            return ErrorCode.STREAM_NOT_OPENED
        if stream.node != node_id:
            return ErrorCode.STREAM_FENCED
        fits = row.start == stream.end if stream.end > stream.start else row.start <= stream.start
        return ErrorCode.NONE if fits else ErrorCode.OFFSET_NOT_MATCHED

    def _hold(self, object_id: int, kind: str, size: int, rows: list[Row], node: int) -> None:
        item = self.objects[object_id]
        item.state, item.kind, item.size, item.node = ObjectState.COMMITTED, kind, size, node
        item.held = [(row.stream, row.start, row.end) for row in rows]
        for row in rows:
            if row.stream in self.streams:
                stream = self.streams[row.stream]
                stream.end = max(stream.end, row.end)

    def find(self, stream_id: int, start: int, end: int, limit: int) -> list[tuple[int, int, int]]:
        held = [
            (low, high, object_id)
            for object_id, item in self.objects.items()
            for stream, low, high in item.held
            if stream == stream_id
        ]
        found: list[tuple[int, int, int]] = []
        at = start
        while len(found) < limit and (end == -1 or not found or at < end):
            fitting = [
                item
                for item in held
                if (item[0] == at if found else item[0] <= at) and item[1] > at
            ]
            if not fitting:
                break
            (item,) = fitting
            found.append((item[2], item[0], item[1]))
            at = item[1]
        return found
