"""Bytes by stream, node, tag and age, and differences of two maps, on maps made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from streammeta.controller.metadata.tables.values import ObjectKind, ObjectState, StreamState
from streammeta.shell import metadata_commands
from streammeta.shell.differences import Difference, differences
from streammeta.shell.state import MetadataCopy

_NOW = 10 * 86_400_000
_SET, _STREAM = int(ObjectKind.STREAM_SET), int(ObjectKind.STREAM)
_LIVE, _GONE = int(ObjectState.COMMITTED), int(ObjectState.MARK_DESTROYED)


def columns(names: str, *rows: tuple[Any, ...]) -> dict[str, Any]:
    """A section of these rows: numbers as arrays, text as lists."""
    values = zip(*rows, strict=True) if rows else [()] * len(names.split())
    return {
        name: list(column) if any(isinstance(one, str) for one in column) else np.array(column, int)
        for name, column in zip(names.split(), values, strict=True)
    }


def a_map(**changed: dict[str, Any]) -> MetadataCopy:
    """Object 1 of node 7 holds streams 0 and 1, object 2 stream 1; object 3 is to be deleted."""
    day = 86_400_000
    sections = {
        "streams": columns(
            "stream_id epoch state node_id end_offset", (0, 4, 1, 7, 30), (1, 4, 2, 8, 20)
        ),
        "stream_tags": columns("stream_id key value", (0, "topic", "a"), (1, "colour", "red")),
        "ranges": columns(
            "stream_id range_index epoch start_offset end_offset node_id",
            (0, 0, 4, 0, 30, 7),
            (1, 0, 4, 0, 20, 8),
        ),
        "objects": columns(
            "object_id state kind node_id object_size timestamp_ms",
            (1, _LIVE, _SET, 7, 400, _NOW - 5),
            (2, _LIVE, _STREAM, -1, 50, _NOW - 3 * day),
            (3, _GONE, _STREAM, -1, 9, _NOW),
        ),
        "object_ranges": columns(
            "object_id stream_id start_offset end_offset",
            (1, 0, 0, 30),
            (1, 1, 0, 10),
            (2, 1, 10, 20),
        ),
        "nodes": columns("node_id node_epoch wal_config", (7, 1, "secret"), (8, 1, "")),
        "node_tags": columns("node_id key value"),
    }
    return MetadataCopy("by hand", "c", 9, {**sections, **changed})


def test_a_set_object_is_shared_by_offsets_and_an_object_of_one_stream_is_its_own() -> None:
    assert metadata_commands.by_stream(a_map()).rows == ((0, 1, 0, 300), (1, 2, 50, 100))


def test_a_node_has_its_set_objects_and_what_its_streams_hold() -> None:
    assert metadata_commands.by_node(a_map()).rows == ((7, 1, 0, 400), (8, 1, 50, 0))


def test_streams_without_the_tag_are_counted_together() -> None:
    assert metadata_commands.by_tag(a_map(), "topic").rows == (("a", 1, 0, 300), (None, 1, 50, 100))


def test_ages_and_states_count_whole_objects() -> None:
    by_age = [row for row in metadata_commands.by_age(a_map(), _NOW).rows if row[1]]
    assert by_age == [("under 1 hour", 1, 400), ("under 7 days", 1, 50)]
    assert metadata_commands.by_state(a_map()).rows == (
        ("COMMITTED", "STREAM_SET", 1, 400),
        ("COMMITTED", "STREAM", 1, 50),
        ("MARK_DESTROYED", "STREAM", 1, 9),
    )


def test_an_empty_map_has_no_bytes() -> None:
    sections = a_map().sections
    empty = {
        name: {column: np.empty(0, int) for column in section} for name, section in sections.items()
    }
    nothing = MetadataCopy("empty", "c", 0, empty)
    assert (
        metadata_commands.by_stream(nothing).rows == metadata_commands.by_node(nothing).rows == ()
    )
    assert (
        metadata_commands.by_tag(nothing, "x").rows
        == metadata_commands.by_state(nothing).rows
        == ()
    )


def test_equal_maps_do_not_differ() -> None:
    for kind in ("streams", "objects", "nodes"):
        assert differences(kind, a_map(), a_map()) == []


def test_every_field_tag_range_and_row_that_differs_is_named() -> None:
    after = a_map(
        streams=columns(
            "stream_id epoch state node_id end_offset", (1, 5, 1, 8, 20), (2, -1, 2, -1, 0)
        ),
        stream_tags=columns("stream_id key value", (1, "colour", "blue")),
        ranges=columns(
            "stream_id range_index epoch start_offset end_offset node_id",
            (1, 0, 4, 0, 20, 8),
            (1, 1, 5, 20, 20, 8),
        ),
        nodes=columns("node_id node_epoch wal_config", (7, 2, "other secret"), (8, 1, "")),
    )
    opened, closed = StreamState.OPENED.name, StreamState.CLOSED.name
    first = "0: 0..20 node 8 epoch 4"
    assert differences("streams", a_map(), after) == [
        Difference("removed", 0),
        Difference("changed", 1, "epoch", 4, 5),
        Difference("changed", 1, "state", closed, opened),
        Difference("changed", 1, "tags", "colour=red", "colour=blue"),
        Difference("changed", 1, "ranges", first, f"{first}, 1: 20..20 node 8 epoch 5"),
        Difference("added", 2),
    ]
    shown = differences("nodes", a_map(), after)
    assert [(row.id, row.field) for row in shown] == [(7, "node_epoch"), (7, "wal_config")]
    assert "secret" not in repr(shown)
