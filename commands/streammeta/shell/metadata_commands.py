"""Commands that need the whole metadata or its log: `du`, `diff` and `tail`.

Like all commands they are generators from (state, words) to events. The metadata comes from the
state's source.

An object of one stream counts fully for it. A stream set object contains many streams, and the
metadata does not know the bytes of each. Its size is divided by the number of offsets of each
stream. Such bytes are in separate columns, `shared_bytes`.

Changes of the log show values of keys by their length. Configurations that may contain secrets are
hidden.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, fields, is_dataclass
from itertools import chain, islice, pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streammeta.controller.errors import ApiError, NewerLogError
from streammeta.controller.metadata.tables.values import ObjectKind, ObjectState
from streammeta.controller.records.codec import RecordCodecError, decode_records
from streammeta.shell import events
from streammeta.shell.differences import KINDS, Difference, differences
from streammeta.shell.state import Change, Command, MetadataCopy, MetadataSource, ShellState
from streammeta.shell.tree import Document, Table, Value

# wal_config may contain access keys. The others mean nothing to people.
_HIDDEN = frozenset(("wal_config", "content_digest", "request_id"))
_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")


class UnknownChangeError(ApiError):
    """Change that this version can't read."""


def describe_change(change: Change) -> Iterator[events.Changed]:
    """Yield the records of a change, in their order.

    Raises:
        UnknownChangeError: a newer version wrote it.
    """
    try:
        records = decode_records(change.records)
    except (RecordCodecError, NewerLogError) as error:
        raise UnknownChangeError(
            f"offset {change.offset}: {error}. Use a version as new as the controllers'"
        ) from error
    for record in records:
        # CamelCase becomes the snake_case of all other output.
        kind = _WORD.sub("_", type(record).__name__).lower()
        yield events.Changed(change.offset, kind, tuple(_facts(record)))


def _facts(record: Any) -> Iterator[tuple[str, events.Fact]]:
    for field in fields(record):
        value = getattr(record, field.name)
        if field.name in _HIDDEN or (not np.isscalar(value) and _is_empty(value)):
            continue
        if is_dataclass(value):
            yield from _facts(value)
        # json needs Python's own numbers.
        elif isinstance(value, np.ndarray):
            yield field.name, value.tolist()
        elif field.name == "values":
            yield "value_bytes", [len(item) for item in value]
        elif isinstance(value, tuple):
            yield field.name, [_text(item) for item in value]
        else:
            yield field.name, value


def _is_empty(value: Any) -> bool:
    return not is_dataclass(value) and not len(value)


def _text(item: Any) -> str:
    """Return a key or namespace unchanged, a tag as KEY=VALUE, the tags of a stream in a list."""
    if isinstance(item, str):
        return item
    if item and isinstance(item[0], str):
        return "=".join(item)
    return " ".join(map(_text, item))


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


_NO_MAP = events.usage_problem("this tree has no metadata source", "open a cluster or a file")


def _du(state: ShellState, words: list[str]) -> Iterator[events.Event]:
    if state.source is None:
        yield _NO_MAP
        return
    by = words[0] if words else "state"
    # Only `tag` has a second word, its key.
    if by not in _USAGES or (by == "tag") != (len(words) == 2):
        yield events.usage_problem(
            f"du: can't count bytes by {' '.join(words)}",
            "try `du`, `du stream`, `du node`, `du tag KEY` or `du age`",
        )
        return
    copy = state.source.copy()
    yield events.Content(("du", *words), _about(copy, _USAGES[by](copy, words, state.source)))


_USAGES: Mapping[str, Callable[[MetadataCopy, list[str], MetadataSource], Table]] = {
    "state": lambda copy, _, __: by_state(copy),
    "stream": lambda copy, _, __: by_stream(copy),
    "node": lambda copy, _, __: by_node(copy),
    "tag": lambda copy, words, _: by_tag(copy, words[1]),
    "age": lambda copy, _, source: by_age(copy, source.now_ms()),
}
"""Tables of bytes by the first word of `du`."""


def _about(copy: MetadataCopy, table: Table) -> Document:
    facts = (("map", copy.name), ("cluster_id", copy.cluster_id), ("end_offset", copy.end_offset))
    return Document(facts, (table,))


def _diff(state: ShellState, words: list[str]) -> Iterator[events.Event]:
    if state.source is None:
        yield _NO_MAP
        return
    address, *kinds = words

    # All kinds are checked first, because a copy takes long.
    for kind in kinds:
        if kind not in KINDS:
            yield events.usage_problem(
                f"diff: can't compare {kind}", f"choose from {', '.join(KINDS)}, or none for all"
            )
            return

    mine, other = state.source.copy(), state.source.other(address)
    # Compared nevertheless, because a restored cluster has a new id.
    if mine.cluster_id != other.cluster_id:
        yield events.Caption(
            f"The two copies belong to different clusters, {mine.cluster_id} and"
            f" {other.cluster_id}."
        )

    yield events.Content(("diff", *words), _compare(mine, other, kinds or list(KINDS)))


def _compare(mine: MetadataCopy, other: MetadataCopy, kinds: list[str]) -> Document:
    """Return the differences from the copy with the lower offset to the other."""
    # The older copy is `before`, in whichever order the user names them.
    is_later = (mine.end_offset, mine.name) > (other.end_offset, other.name)
    before, after = (other, mine) if is_later else (mine, other)
    tables, counts = [], []

    for kind in kinds:
        found = differences(kind, before, after)
        counts.append((kind, len({difference.id for difference in found})))
        names = tuple(field.name for field in fields(Difference))
        rows = tuple(map(astuple, found))
        tables.append(Table(f"{kind}_changes", names, rows))

    facts: tuple[tuple[str, Value], ...] = (
        ("before", before.name),
        ("before_offset", before.end_offset),
        ("after", after.name),
        ("after_offset", after.end_offset),
        ("equal", not any(count for _, count in counts)),
        *((f"{kind}_that_differ", count) for kind, count in counts),
    )
    return Document(facts, tuple(tables))


def _tail(state: ShellState, words: list[str]) -> Iterator[events.Event]:
    if state.source is None:
        yield _NO_MAP
        return
    if not all(word.isascii() and word.isdigit() for word in words):
        yield events.usage_problem(
            f"tail: {' '.join(words)}: expected a number of changes and an offset",
            "try `tail`, `tail 10` or `tail 10 12000`",
        )
        return
    count = int(words[0]) if words else None
    from_offset = int(words[1]) if len(words) > 1 else None
    changes = state.source.changes(from_offset)

    # The count bounds records. One log entry may have several.
    yield from islice(chain.from_iterable(map(describe_change, changes)), count)


MAP_COMMANDS: Mapping[str, Command] = {
    "du": Command(
        "du [stream|node|tag KEY|age]",
        "count the bytes of objects, by default by state",
        _du,
        0,
        2,
    ),
    "diff": Command(
        "diff MAP [streams] [objects] [nodes]",
        "compare with other metadata: `live`, a checkpoint, an export or a BACKUP@OFFSET",
        _diff,
        1,
        1 + len(KINDS),
    ),
    "tail": Command(
        "tail [COUNT [OFFSET]]",
        "print changes as they are committed, from now or from an offset",
        _tail,
        0,
        2,
        goes_on=True,
    ),
}
