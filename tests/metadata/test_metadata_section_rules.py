"""A checkpoint whose sections contradict each other is refused, and what is taken can be read.

`test_metadata_replay_checks` does the same for records.
"""

import io
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from streammeta.controller.errors import ApiError, DamagedMapError
from streammeta.controller.ids import ClusterId, EndOffset, Epoch, SnapshotId
from streammeta.controller.metadata import requests as r
from streammeta.controller.metadata.cluster_map import ClusterMap
from streammeta.controller.metadata.section_checks import Refers
from streammeta.controller.metadata.section_rules import SECTIONS
from streammeta.controller.metadata.values import NodeIdentity, ObjectState
from streammeta.controller.runtime.map_checkpoint import read_map
from streammeta.controller.snapshot.checkpoint_file import CheckpointError, write_checkpoint
from tests.metadata.rich_history import histories

Sections = dict[str, dict[str, Any]]
HOSTILE = (-(2**63), -2, -1, 0, 1, 6, 77, 2**31 - 1, 2**31, 2**40, 2**63 - 1)
ADDED_LATER = {"content_digest"}
"""Columns without a rule: any value is one."""


@cache
def _views() -> list[tuple[Sections, int]]:
    return [
        ({name: dict(columns) for name, columns in view.sections().items()}, view.end_offset)
        for made in histories()
        for view in (*made.views[::9], made.views[-1])
    ]


def _fullest(section: str) -> tuple[Sections, int]:
    return max(_views(), key=lambda view: _length(view[0][section]))


def _length(columns: dict[str, Any]) -> int:
    return len(next(iter(columns.values())))


def _with(sections: Sections, section: str, changes: dict[str, Any]) -> Sections:
    return {**sections, section: {**sections[section], **changes}}


def _changed(sections: Sections, section: str, field: str, row: int, value: Any) -> Sections:
    values = sections[section][field]
    values = values.astype(np.int64) if isinstance(values, np.ndarray) else list(values)
    values[row] = value
    return _with(sections, section, {field: values})


def _load(sections: Sections, end_offset: int) -> ClusterMap:
    return ClusterMap.from_sections(sections, end_offset)


def read_everything(cluster_map: ClusterMap) -> None:
    """Ask whatever can be asked."""
    size = cluster_map.size()
    described: Any = cluster_map.query(
        r.DescribeStreams(include_ranges=True, include_stream_objects=True)
    )
    nodes: Any = cluster_map.query(r.GetNodes(include_stream_set_objects=True))
    assert len(described.streams) == size.streams
    assert len(nodes.nodes) == size.nodes
    queries = tuple(
        r.ObjectQuery(stream.stream_id, offset, -1)
        for stream in described.streams
        for offset in (stream.start_offset, max(0, stream.end_offset - 1))
    )
    if queries:
        cluster_map.query(r.GetObjects(queries=queries))
    cluster_map.query(r.DescribeObjects())
    cluster_map.query(r.ListKVs())
    for node in nodes.nodes:
        cluster_map.query(r.ListStreamSetObjects(node_id=node.node_id))
        opening = r.GetOpeningStreams(node=NodeIdentity(node.node_id, node.node_epoch))
        cluster_map.decide(opening, 1, cluster_map.applied_end_offset)
    for request in (r.ExpireObjects(limit=9), r.SweepDeletedStreams(limit=9)):
        cluster_map.decide(request, 2**40, cluster_map.applied_end_offset)
    for stream in described.streams:
        one = r.StreamToDelete(stream.stream_id, stream.epoch)
        delete = r.DeleteStreams(node=NodeIdentity(7, 9), streams=(one,))
        cluster_map.decide(delete, 1, cluster_map.applied_end_offset)
    cluster_map.state_hash()


def test_every_section_and_column_has_rules() -> None:
    sections, _ = _views()[0]
    assert set(sections) == set(SECTIONS)
    for name, (columns, rules) in SECTIONS.items():
        assert set(sections[name]) - ADDED_LATER == set(columns)
        assert rules


def test_what_a_map_hands_over_is_taken() -> None:
    for sections, end_offset in _views():
        read_everything(_load(sections, end_offset))


REFERENCES = [
    (section, rule) for section, (_, rules) in SECTIONS.items() for rule in rules
    if isinstance(rule, Refers)
]  # fmt: skip


@pytest.mark.parametrize(
    ("section", "rule"), REFERENCES, ids=lambda given: getattr(given, "field", given)
)
def test_a_reference_to_nothing_is_refused_with_its_place(section: str, rule: Refers) -> None:
    sections, end_offset = next(
        view
        for view in sorted(_views(), key=lambda view: -_length(view[0][section]))
        if len(_asked(view[0], section, rule))
    )
    target = sections[rule.target]
    known = set(np.asarray(target[next(iter(target))]).tolist())
    for row in _asked(sections, section, rule).tolist():
        for value in {max(known, default=0) + 1, 2**31 - 2} | (set(range(9)) - known):
            broken = _changed(sections, section, rule.field, row, value)
            with pytest.raises(DamagedMapError) as caught:
                _load(broken, end_offset)
            assert caught.value.section == section
            assert f"section '{section}', row " in str(caught.value)


def _asked(sections: Sections, section: str, rule: Refers) -> Any:
    columns = {name: np.asarray(values) for name, values in sections[section].items()}
    if rule.only is None:
        return np.arange(_length(columns))
    return np.flatnonzero(rule.only(columns))


def _cells(section: str, rows: int) -> Iterator[tuple[str, int]]:
    sections, _ = _fullest(section)
    for field, values in sections[section].items():
        if isinstance(values, np.ndarray):
            yield from ((field, row) for row in range(min(rows, len(values))))


@pytest.mark.parametrize("rows", [2, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("section", SECTIONS)
def test_a_hostile_number_anywhere_is_refused_or_harms_no_read(section: str, rows: int) -> None:
    sections, end_offset = _fullest(section)
    refused = 0
    for field, row in _cells(section, rows):
        for value in HOSTILE:
            if field == "next_stream_id" and 77 < value < 2**31:
                continue  # no reference is wrong: so many streams only take too much memory
            broken = _changed(sections, section, field, row, value)
            try:
                loaded = _load(broken, end_offset)
            except DamagedMapError:
                refused += 1
                continue
            except Exception as error:
                raise AssertionError(f"{section}, row {row}, {field}: {value}") from error
            try:
                read_everything(loaded)
            except ApiError:
                pass
            except Exception as error:
                raise AssertionError(f"{section}, row {row}, {field}: {value}, read") from error
    assert refused


@pytest.mark.parametrize("section", SECTIONS)
def test_rows_and_columns_that_are_missing_twice_or_in_disorder_are_refused(section: str) -> None:
    sections, end_offset = _fullest(section)
    columns = sections[section]
    rows = _length(columns)
    for field in SECTIONS[section][0]:
        short = _with(sections, section, {field: columns[field][:-1]})
        without = {**sections, section: {k: v for k, v in columns.items() if k != field}}
        for broken in (short, without) if len(columns) > 1 else (without,):
            with pytest.raises(DamagedMapError) as caught:
                _load(broken, end_offset)
            assert caught.value.section == section
    with pytest.raises(DamagedMapError):
        _load({**sections, section: _picked(columns, [*range(rows), rows - 1])}, end_offset)
    if section in ("object_facts", "bucket_claim"):
        return  # older checkpoints have no such section
    gone = {name: given for name, given in sections.items() if name != section}
    with pytest.raises(DamagedMapError, match=f"section '{section}', .*no such section"):
        _load(gone, end_offset)


IN_ORDER_OF_TIME = {"requests", "rejected_rows", "removed_objects", "counters", "bucket_claim"}


@pytest.mark.parametrize("section", sorted(set(SECTIONS) - IN_ORDER_OF_TIME))
def test_rows_in_disorder_are_refused(section: str) -> None:
    sections, end_offset = _fullest(section)
    if section == "free_node_ids":
        sections = {**sections, section: {"node_id": np.array([5_000, 5_001])}}
    _load(sections, end_offset)
    rows = _length(sections[section])
    assert rows > 1
    for row in range(rows - 1):
        order = [*range(row), row + 1, row, *range(row + 2, rows)]
        with pytest.raises(DamagedMapError):
            _load({**sections, section: _picked(sections[section], order)}, end_offset)


def _picked(columns: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    return {
        name: values[rows] if isinstance(values, np.ndarray) else [values[row] for row in rows]
        for name, values in columns.items()
    }


def test_an_offset_in_two_objects_is_refused() -> None:
    found = 0
    for sections, end_offset in _views():
        ranges, objects, streams = (sections[n] for n in ("object_ranges", "objects", "streams"))
        state = dict(zip(objects["object_id"].tolist(), objects["state"].tolist(), strict=True))
        ends = dict(zip(streams["stream_id"].tolist(), streams["end_offset"].tolist(), strict=True))
        for row in range(len(ranges["stream_id"])):
            one = {name: int(values[row]) for name, values in ranges.items()}
            is_listed = state[one["object_id"]] == ObjectState.COMMITTED
            end = ends.get(one["stream_id"], -1)
            if not is_listed or end <= one["end_offset"]:
                continue
            # Its stream goes on behind it, mostly in another object.
            broken = _changed(sections, "object_ranges", "end_offset", row, end)
            try:
                read_everything(_load(broken, end_offset))
            except DamagedMapError as error:
                found += error.field == "start_offset"
    assert found > 5


def test_a_damaged_pending_upload_is_told_by_the_file_it_is_in() -> None:
    sections, end_offset = _fullest("pending_uploads")
    last = _length(sections["pending_uploads"]) - 1
    broken = _changed(sections, "pending_uploads", "stream_id", last, 10**6)
    file = io.BytesIO()
    write_checkpoint(file, SnapshotId(EndOffset(end_offset), Epoch(1)), ClusterId("c"), broken)
    snapshot_id = SnapshotId(EndOffset(end_offset), Epoch(1))
    with pytest.raises(
        CheckpointError, match=r"section 'pending_uploads', row \d, .*: got 1000000"
    ):
        read_map(file, snapshot_id)
