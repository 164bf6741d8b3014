"""Rules of every section of a checkpoint: columns, ranges, order, references.

One table for all sections, which `frozen` describes. A section that breaks a rule would make
metadata that answers wrongly or not at all. Replay preserves all rules, so such a checkpoint was
damaged, or written by a faulty controller.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from streammeta.controller.errors import DamagedMetadataError, ErrorCode
from streammeta.controller.features import BASE_LEVEL
from streammeta.controller.metadata.api.request_identity import RequestKind
from streammeta.controller.metadata.sections.producer_rules import PRODUCER_SECTIONS
from streammeta.controller.metadata.tables.object_facts import CRC32C_MAX, UNKNOWN
from streammeta.controller.metadata.tables.section_checks import (
    Ascending,
    Between,
    Columns,
    Holds,
    Loaded,
    OneRow,
    Refers,
    Rule,
    Unique,
    check_columns,
    is_in,
    repeat_in_parts,
    require,
    windows,
)
from streammeta.controller.metadata.tables.values import (
    INT32_MAX,
    INT64_MAX,
    SHARED_EPOCH,
    Mask,
    ObjectKind,
    ObjectState,
    StreamState,
)

_OPENED = int(StreamState.OPENED)
_SHARED = int(StreamState.SHARED)
_PREPARED = int(ObjectState.PREPARED)
_COMMITTED = int(ObjectState.COMMITTED)
_LINKED = int(ObjectState.LINKED)
_UNKNOWN = int(ObjectKind.UNKNOWN)
_SET = int(ObjectKind.STREAM_SET)
_COMPOSITE = int(ObjectKind.COMPOSITE)
_NAMED = int(ObjectKind.NAMED)
_REMOVED = int(ObjectState.REMOVED)
_ERRORS = tuple(int(code) for code in ErrorCode if code is not ErrorCode.NONE)
_COUNTERS = {
    RequestKind.CREATE_STREAMS: "next_stream_id",
    RequestKind.PREPARE_OBJECTS: "next_object_id",
}

_REFERRED_TO = frozenset(("counters", "nodes", "streams", "objects", "producers"))
"""Sections that rules of others refer to. Only these stay in memory."""


class SectionChecker:
    """Checks the sections of one checkpoint as they are loaded."""

    def __init__(self) -> None:
        self._loaded: dict[str, Columns] = {}

    def check(self, section: str, columns: Columns) -> None:
        """Raise `DamagedMetadataError` unless a section satisfies its rules.

        Sections arrive in the order of `SECTIONS`, and later ones may refer to this one.
        """
        names, rules = SECTIONS[section]
        check_columns(section, columns, names)
        self._loaded[section] = columns

        # Local rules run together on each window, while its rows are in the cache.
        local = [rule for rule in rules if rule.is_local]
        for rows in windows(len(columns[names[0]]), overlap=1):
            part = {name: values[rows] for name, values in columns.items()}
            _check_part(section, {**self._loaded, section: part}, local, rows.start)

        for rule in rules:
            if not rule.is_local:
                rule.check(section, self._loaded)

        if section not in _REFERRED_TO:
            del self._loaded[section]


def _check_part(section: str, loaded: Loaded, rules: Sequence[Rule], first_row: int) -> None:
    try:
        for rule in rules:
            rule.check(section, loaded)
    except DamagedMetadataError as error:
        if first_row:
            raise error.moved(first_row) from None
        raise


def _in_set(objects: Columns) -> Mask:
    found: Mask = (objects["state"] == _COMMITTED) & (objects["kind"] == _SET)
    return found


def _linked(objects: Columns) -> Mask:
    found: Mask = objects["state"] == _LINKED
    return found


def _below(low: str, high: str) -> Holds:
    return Holds(high, f"above {low}", lambda rows, _: rows[high] > rows[low])


def _not_below(low: str, high: str) -> Holds:
    return Holds(high, f"{low} or more", lambda rows, _: rows[high] >= rows[low])


def _among(field: str, values: tuple[int, ...]) -> Holds:
    shown = ", ".join(map(str, values))
    return Holds(field, f"one of {shown}", lambda rows, _: np.isin(rows[field], values))


def _owned_at_all(streams: Columns, _: Loaded) -> Mask:
    # A stream that was never opened is closed, without epoch and owner. A shared one has epoch 0.
    never, shared = streams["range_index"] == -1, streams["state"] == _SHARED
    found: Mask = (
        np.where(shared, streams["epoch"] == SHARED_EPOCH, (streams["epoch"] == -1) == never)
        & ((streams["node_id"] == -1) == never)
        & np.where(never, streams["state"] != _OPENED, ~shared)
    )
    return found


class _CurrentRanges:
    """The last range of each stream ever opened is the stream's current range."""

    is_local = False

    def check(self, section: str, loaded: Loaded) -> None:
        """Check the rule, see `Rule`."""
        ranges, streams = loaded[section], loaded["streams"]
        ids = ranges["stream_id"]
        # Most streams have a single range, and then no column needs to be copied.
        last = _all_or_some(np.append(ids[1:] != ids[:-1], True)[: len(ids)])
        owned = _all_or_some(streams["range_index"] >= 0)
        wanted = streams["stream_id"][owned]

        if not np.array_equal(ids[last], wanted):
            missing = np.isin(wanted, ids[last], invert=True)
            stray = np.isin(ids[last], wanted)
            require(section, "stream_id", stray, ids[last], "a stream that was opened")
            require("streams", "stream_id", ~missing, wanted, "in 'ranges', as it was opened")

        for field in ("range_index", "epoch", "end_offset", "node_id"):
            same = ranges[field][last] == streams[field][owned]
            if np.count_nonzero(same) < len(same):
                good = np.ones(len(ids), dtype=np.bool_)
                good[last] = same
                wanted_cell = "the value of its stream, as it is the last range"
                require(section, field, good, ranges[field], wanted_cell)


def _all_or_some(chosen: Mask) -> slice | Mask:
    return slice(None) if np.count_nonzero(chosen) == len(chosen) else chosen


def _do_ranges_follow(ranges: Columns, _: Loaded) -> Mask:
    good = np.ones(len(ranges["stream_id"]), dtype=np.bool_)
    ids, start, end = ranges["stream_id"], ranges["start_offset"], ranges["end_offset"]
    good[1:] = (ids[1:] != ids[:-1]) | (start[1:] >= end[:-1])
    return good


def _kind_fits(objects: Columns, _: Loaded) -> Mask:
    state, kind = objects["state"], objects["kind"]
    # A commit sets the kind, and only objects of one stream can be linked.
    known, of_stream = kind != _UNKNOWN, (kind != _SET) & (kind != _NAMED)
    found: Mask = np.where(state == _LINKED, known & of_stream, (state != _COMMITTED) | known) & ~(
        (state == _PREPARED) & known
    )
    return found


def _holds_as_many_as_its_kind(objects: Columns, _: Loaded) -> Mask:
    state, count = objects["state"], objects["range_count"]
    holds = ((state == _COMMITTED) | (state == _LINKED)) & (objects["kind"] != _NAMED)
    of_one = holds & (objects["kind"] != _SET)
    found: Mask = (count >= 0) & np.where(of_one, count == 1, holds | (count == 0))
    return found


def _composite_of_link(objects: Columns, _: Loaded) -> Mask:
    good = np.ones(len(objects["object_id"]), dtype=np.bool_)
    linked = np.flatnonzero(_linked(objects))
    if len(linked):
        at = objects["object_id"].searchsorted(objects["order_id"][linked])
        kept = (objects["state"][at] == _COMMITTED) & (objects["kind"][at] == _COMPOSITE)
        good[linked] = kept
    return good


class _RangesOfObjects:
    """Ranges are grouped by object, in the objects' order, as many as each object counts."""

    is_local = False

    def check(self, section: str, loaded: Loaded) -> None:
        """Check the rule, see `Rule`."""
        objects, ids = loaded["objects"], loaded[section]["object_id"]
        counts = objects["range_count"]
        total = int(counts.sum())
        if total != len(ids):
            raise DamagedMetadataError(
                section, -1, "object_id", f"{len(ids)} rows", f"{total} rows, as objects count"
            )
        for first, wanted in repeat_in_parts(objects["object_id"], counts):
            good = ids[first : first + len(wanted)] == wanted
            require(section, "object_id", good, ids, "the object whose ranges follow here", first)


def _ranges_of_one_follow(ranges: Columns, _: Loaded) -> Mask:
    good = np.ones(len(ranges["stream_id"]), dtype=np.bool_)
    again = ranges["object_id"][1:] == ranges["object_id"][:-1]
    if np.count_nonzero(again):
        ids, start, end = ranges["stream_id"], ranges["start_offset"], ranges["end_offset"]
        follows = (ids[1:] > ids[:-1]) | ((ids[1:] == ids[:-1]) & (start[1:] >= end[:-1]))
        good[1:] = ~again | follows
    return good


def _facts_of_committed(facts: Columns, loaded: Loaded) -> Mask:
    objects = loaded["objects"]
    at = objects["object_id"].searchsorted(facts["object_id"])
    found: Mask = np.asarray(objects["kind"])[at] != _UNKNOWN
    return found


def _crossed(facts: Columns, _: Loaded) -> Mask:
    low, high = facts["min_timestamp_ms"], facts["max_timestamp_ms"]
    found: Mask = (high >= low) & ((low == UNKNOWN) == (high == UNKNOWN))
    return found


def _spans_apart(spans: Columns, _: Loaded) -> Mask:
    good = np.ones(len(spans["stream_id"]), dtype=np.bool_)
    ids, start, end = spans["stream_id"], spans["start_offset"], spans["end_offset"]
    good[1:] = (ids[1:] != ids[:-1]) | (start[1:] > end[:-1])
    return good


def _within_stream(spans: Columns, loaded: Loaded) -> Mask:
    streams = loaded["streams"]
    at = streams["stream_id"].searchsorted(spans["stream_id"])
    inside: Mask = spans["end_offset"] <= streams["end_offset"][at]
    return inside & (spans["start_offset"] >= streams["start_offset"][at])


def _within_stream_if_it_exists(spans: Columns, loaded: Loaded) -> Mask:
    streams, ids = loaded["streams"], spans["stream_id"]
    good = np.ones(len(ids), dtype=np.bool_)
    if len(ids) and len(streams["stream_id"]):
        at = np.minimum(streams["stream_id"].searchsorted(ids), len(streams["stream_id"]) - 1)
        exists = streams["stream_id"][at] == ids
        good = ~exists | (spans["end_offset"] <= streams["end_offset"][at])
    return good


def _not_registered(ids: Columns, loaded: Loaded) -> Mask:
    return np.isin(ids["node_id"], loaded["nodes"]["node_id"], invert=True)


def _issued_once(requests: Columns, loaded: Loaded) -> Mask:
    kind, first, count = (np.asarray(requests[name]) for name in ("kind", "first_id", "count"))
    counters = loaded["counters"]
    good = (first >= 0) & (count >= 1)
    # Ids of remembered requests were issued, so their counter is larger.
    for number, counter in _COUNTERS.items():
        good &= (kind != number) | (first <= int(counters[counter][0]) - count)
    found: Mask = good & (
        (kind != RequestKind.NEXT_NODE_ID) | (first <= int(counters["last_node_id"][0]))
    )
    return found


def _not_present(removed: Columns, loaded: Loaded) -> Mask:
    return ~is_in(removed["object_id"], loaded["objects"]["object_id"])


def _was_issued(recovery: Columns, loaded: Loaded) -> Mask:
    found: Mask = recovery["undecided_below"] <= loaded["counters"]["next_object_id"]
    return found


_OFFSETS = (Between("start_offset", 0, INT64_MAX), _below("start_offset", "end_offset"))

SECTIONS: Mapping[str, tuple[tuple[str, ...], tuple[Rule, ...]]] = {
    "counters": (
        (
            "next_stream_id",
            "next_object_id",
            "last_node_id",
            "deletions_held_since_ms",
            "deletions_held_until_ms",
        ),
        (
            OneRow(),
            Between("next_stream_id", 0, INT32_MAX),
            Between("next_object_id", 0, INT64_MAX),
            Between("last_node_id", -1, INT32_MAX),
            _not_below("deletions_held_since_ms", "deletions_held_until_ms"),
        ),
    ),
    "bucket_claim": (
        ("cluster_uuid", "issued_below"),
        (OneRow(), Between("issued_below", 0, INT64_MAX)),
    ),
    "feature_level": (("level",), (OneRow(), Between("level", BASE_LEVEL, INT32_MAX))),
    "recovery": (
        ("undecided_from", "undecided_below"),
        (
            OneRow(),
            Between("undecided_from", 0, INT64_MAX),
            _not_below("undecided_from", "undecided_below"),
            Holds("undecided_below", "next_object_id or less", _was_issued),
        ),
    ),
    "nodes": (
        (
            "node_id",
            "node_epoch",
            "failover",
            "wal_config",
            "locked",
            "departed",
            "recovered_by",
            "supervised",
        ),
        (
            Ascending(("node_id",)),
            Between("node_id", 0, INT32_MAX),
            Between("node_epoch", 0, INT64_MAX),
            Between("recovered_by", -1, INT32_MAX),
        ),
    ),
    "node_tags": (
        ("node_id", "key", "value"),
        (Ascending(("node_id", "key")), Refers("node_id", "nodes")),
    ),
    "node_processes": (
        ("node_id", "process_id"),
        (Ascending(("node_id",)), Refers("node_id", "nodes")),
    ),
    "free_node_ids": (
        ("node_id",),
        (
            Ascending(("node_id",)),
            Between("node_id", 0, INT32_MAX),
            Holds("node_id", "not a node of 'nodes'", _not_registered),
        ),
    ),
    "streams": (
        ("stream_id", "epoch", "range_index", "start_offset", "end_offset", "state", "node_id"),
        (
            Between("stream_id", 0, "next_stream_id"),
            Ascending(("stream_id",)),
            Between("epoch", -1, INT64_MAX),
            Between("range_index", -1, INT32_MAX),
            Between("start_offset", 0, INT64_MAX),
            _not_below("start_offset", "end_offset"),
            Between("state", _OPENED, _SHARED),
            Between("node_id", -1, INT32_MAX),
            Holds(
                "range_index",
                "-1 exactly if epoch and node_id are, and if the stream is shared",
                _owned_at_all,
            ),
            Refers("node_id", "nodes", only=lambda streams: streams["state"] == _OPENED),
        ),
    ),
    "stream_tags": (
        ("stream_id", "key", "value"),
        (Ascending(("stream_id", "key")), Refers("stream_id", "streams")),
    ),
    "ranges": (
        ("stream_id", "range_index", "epoch", "start_offset", "end_offset", "node_id"),
        (
            Refers("stream_id", "streams"),
            Ascending(("stream_id", "range_index")),
            Between("range_index", 0, INT32_MAX),
            Between("epoch", 0, INT64_MAX),
            Between("start_offset", 0, INT64_MAX),
            _not_below("start_offset", "end_offset"),
            Between("node_id", 0, INT32_MAX),
            Holds("start_offset", "the end of the range before it, or above", _do_ranges_follow),
            _CurrentRanges(),
        ),
    ),
    "objects": (
        (
            "object_id",
            "state",
            "kind",
            "attributes",
            "node_id",
            "object_size",
            "timestamp_ms",
            "order_id",
            "data_time_ms",
            "range_count",
        ),
        (
            Between("object_id", 0, "next_object_id"),
            Ascending(("object_id",)),
            Between("state", _PREPARED, _LINKED),
            Holds("state", "not REMOVED", lambda rows, _: rows["state"] != _REMOVED),
            Between("kind", _UNKNOWN, _NAMED),
            Holds("kind", "0 if and only if it was never committed", _kind_fits),
            Between("attributes", -(2**31), INT32_MAX),
            Between("node_id", -1, INT32_MAX),
            Between("object_size", 0, INT64_MAX),
            Between("timestamp_ms", 0, INT64_MAX),
            Between("order_id", -1, INT64_MAX),
            Between("data_time_ms", -1, INT64_MAX),
            Holds("range_count", "a count allowed by state and kind", _holds_as_many_as_its_kind),
            Refers("node_id", "nodes", only=_in_set),
            Refers("order_id", "objects", only=_linked, is_local=False),
            Holds(
                "order_id",
                "a committed composite, as the object is linked",
                _composite_of_link,
                is_local=False,
            ),
        ),
    ),
    "object_ranges": (
        ("object_id", "stream_id", "start_offset", "end_offset"),
        (
            _RangesOfObjects(),
            Between("stream_id", 0, "next_stream_id"),
            *_OFFSETS,
            Holds(
                "start_offset",
                "at or after the end of the object's row before, in order of stream ids",
                _ranges_of_one_follow,
            ),
        ),
    ),
    "object_facts": (
        ("object_id", "min_timestamp_ms", "max_timestamp_ms", "crc32c"),
        (
            Ascending(("object_id",)),
            Refers("object_id", "objects"),
            Holds("object_id", "an object that was committed", _facts_of_committed),
            Between("min_timestamp_ms", UNKNOWN, INT64_MAX),
            Holds("max_timestamp_ms", "min_timestamp_ms or more, -1 if that is -1", _crossed),
            Between("crc32c", UNKNOWN, CRC32C_MAX),
        ),
    ),
    "pending_uploads": (
        ("node_id", "stream_id", "start_offset", "end_offset"),
        (
            Ascending(("node_id", "stream_id")),
            Refers("node_id", "nodes"),
            Between("stream_id", 0, "next_stream_id"),
            *_OFFSETS,
            Holds("end_offset", "at most its stream's end", _within_stream_if_it_exists),
        ),
    ),
    "lost_ranges": (
        ("stream_id", "start_offset", "end_offset"),
        (
            Ascending(("stream_id", "start_offset")),
            Refers("stream_id", "streams"),
            *_OFFSETS,
            Holds("start_offset", "after the range before it", _spans_apart),
            Holds("end_offset", "within its stream", _within_stream),
        ),
    ),
    "kvs": (
        ("namespace", "key", "value", "version"),
        (Ascending(("namespace", "key")), Between("version", 1, INT64_MAX)),
    ),
    "requests": (
        ("kind", "node_id", "request_id", "first_id", "count", "deadline_ms"),
        (
            Unique(("kind", "node_id", "request_id")),
            _among("kind", tuple(int(kind) for kind in RequestKind)),
            Between("node_id", -1, INT32_MAX),
            Between("count", 1, INT64_MAX),
            Holds("first_id", "issued ids", _issued_once),
            Between("deadline_ms", -1, INT64_MAX),
        ),
    ),
    "rejected_rows": (
        ("object_id", "stream_id", "error"),
        (
            Unique(("object_id", "stream_id")),
            Between("object_id", 0, INT64_MAX),
            Between("stream_id", 0, INT64_MAX),
            _among("error", _ERRORS),
        ),
    ),
    "left_out_rows": (
        ("content_digest", "object_id", "stream_id", "error"),
        (
            Unique(("content_digest", "object_id", "stream_id")),
            Between("object_id", 0, INT64_MAX),
            Between("stream_id", 0, INT64_MAX),
            _among("error", _ERRORS),
        ),
    ),
    "removed_objects": (
        ("object_id",),
        (
            Unique(("object_id",)),
            Between("object_id", 0, "next_object_id"),
            Holds("object_id", "not an object of 'objects'", _not_present),
        ),
    ),
    **PRODUCER_SECTIONS,
}
"""Columns and rules of each section, in the order of loading."""

COLUMNS = {name: columns for name, (columns, _) in SECTIONS.items()}
"""Columns of each section, without those added later, which have no rule."""
ADDED_COLUMNS = dict.fromkeys(("objects", "requests", "removed_objects"), ("content_digest",))
"""Columns missing in files of older versions."""
TEXTS = frozenset(
    ("cluster_uuid", "key", "value", "namespace", "wal_config", "process_id", "request_id")
)
"""Columns of texts, in any section."""
FLAGS = frozenset(("failover", "locked", "departed", "supervised"))
"""Columns of truth values."""
