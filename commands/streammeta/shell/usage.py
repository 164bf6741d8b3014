"""Bytes of objects: by state and kind, stream, node, value of a tag, or age. Pure.

An object of one stream counts fully for it. A stream set object contains many streams, and the
metadata does not know the bytes of each. Its size is divided by the number of offsets of each
stream. Such bytes are in separate columns, `shared_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streammeta.controller.metadata.tables.values import ObjectKind, ObjectState
from streammeta.shell.state import MetadataCopy
from streammeta.shell.tree import Table

Array: TypeAlias = npt.NDArray[Any]

_HOUR_MS = 3_600_000
_AGES = (
    ("1 hour", _HOUR_MS),
    ("1 day", 24 * _HOUR_MS),
    ("7 days", 7 * 24 * _HOUR_MS),
    ("30 days", 30 * 24 * _HOUR_MS),
    ("365 days", 365 * 24 * _HOUR_MS),
)


@dataclass(frozen=True, slots=True)
class _Holding:
    """Contents of a live object by stream, one row each: its bytes, own or shared."""

    object_row: Array
    stream_id: Array
    bytes: Array
    is_shared: Array


def by_state(copy: MetadataCopy) -> Table:
    """All known objects, including those whose bytes are still to be deleted."""
    objects = copy.sections["objects"]
    pairs = np.stack((objects["state"], objects["kind"])).astype(np.int64)
    rows = []
    for state, kind in np.unique(pairs, axis=1).T.tolist():
        chosen = (pairs[0] == state) & (pairs[1] == kind)
        size = int(np.asarray(objects["object_size"])[chosen].sum())
        names = (ObjectState(state).name, ObjectKind(kind).name)
        rows.append((*names, int(np.count_nonzero(chosen)), size))
    return Table("usage", ("state", "kind", "objects", "bytes"), tuple(rows))


def by_stream(copy: MetadataCopy) -> Table:
    """Every stream that has bytes, the largest first."""
    held = _holding(copy)
    ids, at = np.unique(held.stream_id, return_inverse=True)
    counts, own, shared = _sums(held, at, len(ids))
    # lexsort sorts by its last key first: the largest, then the lowest id.
    order = np.lexsort((ids, -(own + shared)))
    rows = zip(*(values[order].tolist() for values in (ids, counts, own, shared)), strict=True)
    return Table("usage", ("stream_id", "objects", "bytes", "shared_bytes"), tuple(rows))


def by_node(copy: MetadataCopy) -> Table:
    """Stream set objects by their node, others by the node that last owned their stream."""
    held, objects, streams = _holding(copy), copy.sections["objects"], copy.sections["streams"]
    # -1 marks objects whose stream is unknown. They belong to no node.
    owner = _of_streams(held.stream_id, streams["stream_id"], np.asarray(streams["node_id"]), -1)
    nodes = np.where(held.is_shared, np.asarray(objects["node_id"])[held.object_row], owner)
    ids, at = np.unique(nodes, return_inverse=True)
    _, own, shared = _sums(held, at, len(ids))
    # An object with several ranges of a node counts once.
    pairs = np.unique(np.stack((at, held.object_row)), axis=1)[0] if len(at) else at
    counts = np.bincount(pairs, minlength=len(ids))
    rows = (
        (None if node < 0 else node, *figures)
        for node, *figures in zip(*(v.tolist() for v in (ids, counts, own, shared)), strict=True)
    )
    return Table("usage", ("node_id", "objects", "bytes", "shared_bytes"), tuple(rows))


def by_tag(copy: MetadataCopy, key: str) -> Table:
    """Streams by their value of a tag, the largest first. Streams without it have no value."""
    held, streams, tags = _holding(copy), copy.sections["streams"], copy.sections["stream_tags"]
    values = {
        int(stream_id): str(value)
        for stream_id, name, value in zip(
            tags["stream_id"], tags["key"], tags["value"], strict=True
        )
        if name == key
    }
    names: list[str | None] = [None, *sorted(set(values.values()))]
    place = {name: index for index, name in enumerate(names)}
    ids = np.asarray(streams["stream_id"])
    of_stream = np.array([place[values.get(stream_id)] for stream_id in ids.tolist()], np.int64)
    count = np.bincount(of_stream, minlength=len(names))
    at = _of_streams(held.stream_id, ids, of_stream, place[None])
    _, own, shared = _sums(held, at, len(names))
    rows = [
        (name, int(count[index]), int(own[index]), int(shared[index]))
        for index, name in enumerate(names)
        if count[index]
    ]
    rows.sort(key=lambda row: (-(row[2] + row[3]), row[0] or ""))

    return Table("usage", ("value", "streams", "bytes", "shared_bytes"), tuple(rows))


def by_age(copy: MetadataCopy, now_ms: int) -> Table:
    """Live objects by the time since their commit. A commit time in the future counts as age 0."""
    objects = copy.sections["objects"]
    rows = _live_rows(copy)
    ages = np.maximum(now_ms - np.asarray(objects["timestamp_ms"])[rows], 0)
    sizes = np.asarray(objects["object_size"])[rows]
    # The last class has no upper bound.
    bounds = [0, *(bound for _, bound in _AGES), np.iinfo(np.int64).max]
    names = [*(f"under {name}" for name, _ in _AGES), f"{_AGES[-1][0]} or more"]
    shown = []
    for name, (low, high) in zip(names, pairwise(bounds), strict=True):
        chosen = (ages >= low) & (ages < high)
        shown.append((name, int(np.count_nonzero(chosen)), int(sizes[chosen].sum())))
    return Table("usage", ("age", "objects", "bytes"), tuple(shown))


def _live_rows(copy: MetadataCopy) -> Array:
    state = np.asarray(copy.sections["objects"]["state"])
    return np.flatnonzero(np.isin(state, (ObjectState.COMMITTED, ObjectState.LINKED)))


def _holding(copy: MetadataCopy) -> _Holding:
    objects, ranges = copy.sections["objects"], copy.sections["object_ranges"]
    # Objects are sorted by id.
    object_row = np.searchsorted(objects["object_id"], ranges["object_id"])
    span = np.asarray(ranges["end_offset"]) - np.asarray(ranges["start_offset"])
    total = np.bincount(object_row, weights=span, minlength=len(objects["object_id"]))
    size = np.asarray(objects["object_size"])[object_row]
    is_shared = np.asarray(objects["kind"])[object_row] == ObjectKind.STREAM_SET
    # A stream set object is divided by offsets. All others belong to one stream.
    share = np.where(is_shared, size * (span / total[object_row]), size)
    return _Holding(object_row, np.asarray(ranges["stream_id"], np.int64), share, is_shared)


def _of_streams(stream_id: Array, known: Array, values: Array, missing: int) -> Array:
    """Return the value of each stream, `missing` for an unknown one."""
    if not len(known):
        return np.full(len(stream_id), missing)
    # searchsorted returns the length for ids beyond the last one.
    at = np.minimum(np.searchsorted(known, stream_id), len(known) - 1)
    return np.where(np.asarray(known)[at] == stream_id, values[at], missing)


def _sums(held: _Holding, at: Array, count: int) -> tuple[Array, Array, Array]:
    """Return rows, own bytes and shared bytes by group. `at` is the group of each row."""
    own = np.bincount(at, weights=np.where(held.is_shared, 0, held.bytes), minlength=count)
    shared = np.bincount(at, weights=np.where(held.is_shared, held.bytes, 0), minlength=count)
    rows = np.bincount(at, minlength=count)
    # Rounded only as sums, so that errors of single shares do not add up.
    return rows, np.rint(own).astype(np.int64), np.rint(shared).astype(np.int64)
