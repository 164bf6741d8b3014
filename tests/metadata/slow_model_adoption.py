"""The slow model's recovery mode: what a restored cluster refuses, and objects it takes back."""

from dataclasses import dataclass
from typing import Any

from streammeta.controller.errors import ErrorCode, InvalidRequestError, RecoveringError
from streammeta.controller.metadata.api import answers as a
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.tables import values as v
from streammeta.controller.metadata.tables.values import ObjectKind, ObjectState
from tests.metadata.slow_model_state import Object, Range, State, Stream
from tests.metadata.slow_model_uploads import Row, rows_of

WAITING = (
    *(r.CreateStreams, r.OpenStreams, r.CloseStreams, r.TrimStreams, r.DeleteStreams),
    *(r.GetOpeningStreams, r.AbandonUploads, r.PrepareObjects, r.CommitStreamSetObject),
    *(r.CommitUploads, r.CommitStreamObject, r.UnregisterNode, r.PutKVs, r.DeleteKVs),
    *(r.CommitNamedObjects, r.DeleteNamedObjects, r.ReleaseStreams),
    r.IssueProducerIds,
)
"""What is refused in recovery mode."""


def require_allowed(state: State, request: Any) -> None:
    if state.undecided is not None and isinstance(request, WAITING):
        raise RecoveringError


@dataclass(slots=True)
class _Item:
    object_id: int
    size: int
    times: tuple[int, int]
    crc32c: int
    rows: list[Row]
    codes: list[ErrorCode]
    error: ErrorCode = ErrorCode.NONE
    adopted: bool = False
    """Whether it was adopted before."""

    @property
    def content(self) -> object:
        held = sorted(row.held for row in self.rows)
        return ("adopted", self.object_id, self.size, self.times, self.crc32c, str(held))


def adopt(state: State, request: r.AdoptObjects, now: int) -> a.AdoptObjectsAnswer:
    """Try on a copy of the streams' ends, and change something if all is well."""
    items = _items(request)
    for item in items:
        _judge_object(state, item)
    free = _freed(state, request.replaced.tolist())
    held = {key: set(offsets) for key, offsets in free.items()}
    ends: dict[int, tuple[int, int]] = {}
    owed = {key: state.owed(*key) for key in state.pending}
    fresh = [item for item in items if not item.error and not item.adopted]
    places = [(row.stream, row.start, item, at) for item in fresh for at, row in _rows(item)]
    for _, _, item, at in sorted(places, key=lambda place: place[:2]):
        item.codes[at] = _judge_row(state, item.rows[at], ends, owed, free)
    for item in fresh:
        if _owner(state, item) < 0:
            item.error = ErrorCode.NODE_EPOCH_NOT_EXIST
        item.error = item.error or next((code for code in item.codes if code), ErrorCode.NONE)
    if fresh and not any(item.error for item in items):
        _require_touched(state, request.replaced.tolist(), held, free)
        _take(state, fresh, ends, now)
        gone = [id_ for id_ in request.replaced.tolist() if _is_committed(state, id_)]
        gone += [object_id for object_id, item in state.objects.items() if item.composite in gone]
        state.destroy(gone, now)
        for stream_id, offsets in free.items():
            state.streams[stream_id].lost |= offsets
            state.data[stream_id] -= offsets
        state.pending |= {key: span for key, span in owed.items() if span is not None}
    return a.AdoptObjectsAnswer(
        errors=v.column([int(item.error) for item in items]),
        range_errors=v.column([int(code) for item in items for code in item.codes]),
    )


def _is_committed(state: State, object_id: int) -> bool:
    item = state.objects.get(object_id)
    return item is not None and item.state is ObjectState.COMMITTED


def _visible(state: State, object_id: int) -> dict[int, set[int]]:
    """The offsets by stream that readers find in an object."""
    if not _is_committed(state, object_id):
        return {}
    found: dict[int, set[int]] = {}
    for stream_id, start, end in state.objects[object_id].held:
        stream = state.streams.get(stream_id)
        if stream is not None and end > stream.start:
            visible = range(max(start, stream.start), end)
            found.setdefault(stream_id, set()).update(visible)
    return found


def _freed(state: State, replaced: list[int]) -> dict[int, set[int]]:
    """The offsets by stream that the replaced objects have."""
    free: dict[int, set[int]] = {}
    for index, object_id in enumerate(replaced):
        item = state.objects.get(object_id)
        is_gone = item is None and object_id < state.next_object
        if not is_gone and (
            item is None or item.state not in (ObjectState.COMMITTED, ObjectState.MARK_DESTROYED)
        ):
            raise InvalidRequestError(f"replaced_object_ids[{index}]", "none that the map reads")
        for stream_id, offsets in _visible(state, object_id).items():
            free.setdefault(stream_id, set()).update(offsets)
    return free


def _require_touched(
    state: State, replaced: list[int], held: dict[int, set[int]], free: dict[int, set[int]]
) -> None:
    taken = {stream_id: held[stream_id] - free[stream_id] for stream_id in held}
    for index, object_id in enumerate(replaced):
        visible = _visible(state, object_id)
        if not _is_committed(state, object_id):
            continue
        if not any(offsets & taken[key] for key, offsets in visible.items()):
            raise InvalidRequestError(f"replaced_object_ids[{index}]", "replaced by nothing")


def _rows(item: _Item) -> list[tuple[int, Row]]:
    return list(enumerate(item.rows))


def _items(request: r.AdoptObjects) -> list[_Item]:
    items, first = [], 0
    for index, object_id in enumerate(request.object_id.tolist()):
        count = int(request.range_count[index])
        facts = [
            int(values[index]) if len(values) else -1
            for values in (request.min_timestamp_ms, request.max_timestamp_ms, request.crc32c)
        ]
        rows = rows_of(request.ranges, object_id)[first : first + count]
        size = int(request.object_size[index])
        nothing = [ErrorCode.NONE] * count
        items.append(_Item(object_id, size, (facts[0], facts[1]), facts[2], rows, nothing))
        first += count
    return items


def _judge_object(state: State, item: _Item) -> None:
    if state.was_committed(item.object_id):
        item.adopted = state.made_with[item.object_id] == item.content
        item.error = ErrorCode.NONE if item.adopted else ErrorCode.OBJECT_CONTENT_MISMATCH
    elif item.object_id in state.objects or not (
        state.undecided is not None and state.undecided[0] <= item.object_id < state.undecided[1]
    ):
        item.error = ErrorCode.OBJECT_NOT_EXIST
    item.codes = [item.error] * len(item.rows)


def _judge_row(
    state: State,
    row: Row,
    ends: dict[int, tuple[int, int]],
    owed: dict[tuple[int, int], tuple[int, int] | None],
    free: dict[int, set[int]],
) -> ErrorCode:
    stream = state.streams.get(row.stream)
    if stream is None:
        return ErrorCode.STREAM_NOT_EXIST
    if stream.shared and row.epoch:
        return ErrorCode.STREAM_KIND_MISMATCH
    for (node, of_stream), span in sorted(owed.items()):
        if of_stream != row.stream or span is None or span[0] == span[1]:
            continue
        fits = row.start == span[0] and row.end <= span[1]
        if fits and row.epoch == epoch_owed(state, node, row.stream):
            owed[(node, of_stream)] = (row.end, span[1])
            return ErrorCode.NONE
    end, epoch = ends.get(row.stream, (stream.end, stream.epoch))
    assert row.epoch is not None
    if row.start > end:
        return ErrorCode.OFFSET_NOT_MATCHED
    if row.start < end and not _cover(state, row, end, owed, free.setdefault(row.stream, set())):
        return ErrorCode.OFFSET_NOT_MATCHED
    if row.end <= end:
        return ErrorCode.NONE
    if row.epoch < epoch:
        return ErrorCode.STREAM_FENCED
    ends[row.stream] = (row.end, row.epoch)
    return ErrorCode.NONE


def _cover(
    state: State,
    row: Row,
    end: int,
    owed: dict[tuple[int, int], tuple[int, int] | None],
    free: set[int],
) -> bool:
    """Take the offsets of a row below the end from what replaced objects have, and what is owed."""
    start, limit = max(row.start, state.streams[row.stream].start), min(row.end, end)
    offsets = set(range(start, limit))
    filled = {}
    assert row.epoch is not None
    for key, span in owed.items():
        if key[1] != row.stream or span is None or not start <= span[0] < min(span[1], limit):
            continue
        if 0 <= epoch_owed(state, *key) <= row.epoch:
            filled[key] = (min(span[1], limit), span[1])
            offsets -= set(range(span[0], limit))
    taken = offsets & free
    if offsets - free or (not taken and row.end <= end):
        return False
    free -= taken
    owed |= filled
    return True


def epoch_owed(state: State, node_id: int, stream_id: int) -> int:
    """The epoch under which a node acknowledged what it owes of a stream, -1 if none is known."""
    span, stream = state.owed(node_id, stream_id), state.streams[stream_id]
    if span is None:
        return -1
    ranges = [(part.node, part.start, part.end, part.epoch) for part in stream.past]
    if stream.index >= 0:
        ranges.append((stream.node, stream.range_start, stream.end, stream.epoch))
    found = [
        epoch
        for owner, start, end, epoch in ranges
        if owner == node_id and start <= span[0] and end == span[1]
    ]
    return max(found, default=-1)


def _owner(state: State, item: _Item) -> int:
    stream = state.streams.get(item.rows[0].stream)
    return _known(state, -1 if stream is None else stream.node)


def _known(state: State, node_id: int) -> int:
    return node_id if node_id in state.nodes else min(state.nodes, default=-1)


def _take(state: State, items: list[_Item], ends: dict[int, tuple[int, int]], now: int) -> None:
    owners = [_owner(state, item) for item in items]
    for stream_id, (_, epoch) in ends.items():
        if epoch > state.streams[stream_id].epoch:
            _raise_epoch(state, state.streams[stream_id], epoch)
    for item, owner in zip(items, owners, strict=True):
        state.objects[item.object_id] = Object(
            timestamp=now,
            state=ObjectState.COMMITTED,
            kind=ObjectKind.STREAM_SET,
            size=item.size,
            node=owner,
            order=item.object_id,
            data_time=now,
            held=[row.held for row in item.rows],
            times=item.times,
            crc32c=item.crc32c,
        )
        state.made_with[item.object_id] = item.content
        state.raise_ends(row.held for row in item.rows)
    state.objects = dict(sorted(state.objects.items()))


def _raise_epoch(state: State, stream: Stream, epoch: int) -> None:
    """As if its owner had opened it under the epoch, and closed it."""
    if stream.index >= 0:
        ended = Range(stream.index, stream.epoch, stream.range_start, stream.end, stream.node)
        stream.past.append(ended)
    stream.index += 1
    stream.node = _known(state, stream.node)
    stream.epoch, stream.range_start, stream.opened = epoch, stream.end, False


def finish(state: State, _: r.FinishRestore) -> a.FinishRestoreAnswer:
    was, state.undecided = state.undecided is not None, None
    return a.FinishRestoreAnswer(was_recovering=was)


def set_feature_level(state: State, request: r.SetFeatureLevel) -> a.SetFeatureLevelAnswer:
    """The level is the highest there was."""
    before = state.feature_level
    if request.level > before:  # each level has changed what the log holds
        state.feature_level = request.level
    return a.SetFeatureLevelAnswer(before=before, level=state.feature_level)
