"""Checkpoints and records that contradict each other, or name what there is not, are refused.

Every record that a history decided is spoilt in one cell at a time. A spoilt record is refused, or
makes a map that answers everything that can be asked, and undo takes it back.
"""

import io
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, get_args

import numpy as np
import pytest

from streammeta.controller import errors, features
from streammeta.controller.ids import ClusterId, EndOffset, Epoch, SnapshotId
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.api.object_listings import ListStreamSetObjects
from streammeta.controller.metadata.api.object_slices import ObjectQuery
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.sections.rules import SECTIONS
from streammeta.controller.metadata.tables.section_checks import Refers
from streammeta.controller.metadata.tables.values import NodeIdentity, ObjectState, column
from streammeta.controller.records import record as rec
from streammeta.controller.records.codec import RecordCodecError, decode_records, encode_records
from streammeta.controller.runtime.persistence.metadata_checkpoint import read_metadata
from streammeta.controller.snapshot.checkpoint_file import CheckpointError, write_checkpoint
from tests.metadata.map_pair import told
from tests.metadata.rich_history import batches, histories, picked, recovering_views, width
from tests.metadata.small_world import World, stream_objects, upload

Sections = dict[str, dict[str, Any]]
HOSTILE = (-(2**63), -2, -1, 0, 1, 6, 77, 2**31 - 1, 2**31, 2**40, 2**63 - 1)
ADDED_LATER = {"content_digest"}
"""Columns without a rule: any value is one."""


@cache
def _views() -> list[tuple[Sections, int]]:
    views = [view for made in histories() for view in (*made.views[::9], made.views[-1])]
    return [
        ({name: dict(columns) for name, columns in view.sections().items()}, view.end_offset)
        for view in (*views, *recovering_views())
    ]


def _fullest(section: str) -> tuple[Sections, int]:
    having = [view for view in _views() if section in view[0]]
    return max(having, key=lambda view: width(view[0][section]))


def _with(sections: Sections, section: str, changes: dict[str, Any]) -> Sections:
    return {**sections, section: {**sections[section], **changes}}


def _changed(sections: Sections, section: str, field: str, row: int, value: Any) -> Sections:
    values = sections[section][field]
    values = values.astype(np.int64) if isinstance(values, np.ndarray) else list(values)
    values[row] = value
    return _with(sections, section, {field: values})


def _load(sections: Sections, end_offset: int) -> ClusterMetadata:
    return ClusterMetadata.from_sections(sections, end_offset)


def read_everything(cluster_metadata: ClusterMetadata) -> None:
    size = cluster_metadata.size()
    described: Any = cluster_metadata.query(
        r.DescribeStreams(include_ranges=True, include_stream_objects=True)
    )
    nodes: Any = cluster_metadata.query(r.GetNodes(include_stream_set_objects=True))
    assert len(described.streams) == size.streams
    assert len(nodes.nodes) == size.nodes
    queries = tuple(
        ObjectQuery(stream.stream_id, offset, -1)
        for stream in described.streams
        for offset in (stream.start_offset, max(0, stream.end_offset - 1))
    )
    if queries:
        cluster_metadata.query(r.GetObjects(queries=queries))
    cluster_metadata.query(r.DescribeObjects())
    cluster_metadata.query(r.ListKVs())
    for node in nodes.nodes:
        cluster_metadata.query(ListStreamSetObjects(node_id=node.node_id))
        opening = r.GetOpeningStreams(node=NodeIdentity(node.node_id, node.node_epoch))
        _decide(cluster_metadata, opening, 1)
    for request in (r.ExpireObjects(limit=9), r.SweepDeletedStreams(limit=9)):
        _decide(cluster_metadata, request, 2**40)
    for stream in described.streams:
        one = r.StreamToDelete(stream.stream_id, stream.epoch)
        delete = r.DeleteStreams(node=NodeIdentity(7, 9), streams=(one,))
        _decide(cluster_metadata, delete, 1)
    cluster_metadata.state_hash()


def _decide(cluster_metadata: ClusterMetadata, request: Any, now_ms: int) -> None:
    with suppress(errors.RecoveringError):
        cluster_metadata.decide(request, now_ms, cluster_metadata.applied_end_offset)


def test_every_section_and_column_has_rules() -> None:
    sections, _ = _views()[-1]
    assert set(sections) == set(SECTIONS)
    for name, (columns, rules) in SECTIONS.items():
        assert set(sections[name]) - (ADDED_LATER - set(columns)) == set(columns)
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
    having = [view for view in _views() if section in view[0]]
    sections, end_offset = next(
        view
        for view in sorted(having, key=lambda view: -width(view[0][section]))
        if len(_asked(view[0], section, rule))
    )
    target = sections[rule.target]
    known = set(np.asarray(target[next(iter(target))]).tolist())
    for row in _asked(sections, section, rule).tolist():
        for value in {max(known, default=0) + 1, 2**31 - 2} | (set(range(9)) - known):
            broken = _changed(sections, section, rule.field, row, value)
            with pytest.raises(errors.DamagedMetadataError) as caught:
                _load(broken, end_offset)
            assert caught.value.section == section
            assert f"section '{section}', row " in str(caught.value)


def _asked(sections: Sections, section: str, rule: Refers) -> Any:
    columns = {name: np.asarray(values) for name, values in sections[section].items()}
    if rule.only is None:
        return np.arange(width(columns))
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
            where = f"{section}, row {row}, {field}: {value}"
            try:
                with told(where, errors.DamagedMetadataError):
                    loaded = _load(broken, end_offset)
            except errors.DamagedMetadataError:
                refused += 1
                continue
            with suppress(errors.ApiError), told(f"{where}, read", errors.ApiError):
                read_everything(loaded)
    assert refused


@pytest.mark.parametrize("section", SECTIONS)
def test_rows_and_columns_that_are_missing_twice_or_in_disorder_are_refused(section: str) -> None:
    sections, end_offset = _fullest(section)
    columns = sections[section]
    rows = width(columns)
    for field in SECTIONS[section][0]:
        short = _with(sections, section, {field: columns[field][:-1]})
        without = {**sections, section: {k: v for k, v in columns.items() if k != field}}
        for broken in (short, without) if len(columns) > 1 else (without,):
            with pytest.raises(errors.DamagedMetadataError) as caught:
                _load(broken, end_offset)
            assert caught.value.section == section
    with pytest.raises(errors.DamagedMetadataError):
        _load({**sections, section: picked(columns, [*range(rows), rows - 1])}, end_offset)
    if section in ("object_facts", "bucket_claim", *features.SECTIONS, "feature_level"):
        return  # older checkpoints have no such section, or not all maps have it
    gone = {name: given for name, given in sections.items() if name != section}
    with pytest.raises(errors.DamagedMetadataError, match=f"section '{section}'"):
        _load(gone, end_offset)


IN_ORDER_OF_TIME = {
    "requests",
    "rejected_rows",
    "left_out_rows",
    "removed_objects",
    "counters",
    "bucket_claim",
    "feature_level",
    "producer_ids",
    "recovery",
}


@pytest.mark.parametrize("section", sorted(set(SECTIONS) - IN_ORDER_OF_TIME))
def test_rows_in_disorder_are_refused(section: str) -> None:
    sections, end_offset = _fullest(section)
    if section == "free_node_ids":
        sections = {**sections, section: {"node_id": np.array([5_000, 5_001])}}
    _load(sections, end_offset)
    rows = width(sections[section])
    assert rows > 1
    for row in range(rows - 1):
        order = [*range(row), row + 1, row, *range(row + 2, rows)]
        with pytest.raises(errors.DamagedMetadataError):
            _load({**sections, section: picked(sections[section], order)}, end_offset)


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
            except errors.DamagedMetadataError as error:
                found += error.field == "start_offset"
    assert found > 5


def test_a_damaged_pending_upload_is_told_by_the_file_it_is_in() -> None:
    sections, end_offset = _fullest("pending_uploads")
    last = width(sections["pending_uploads"]) - 1
    broken = _changed(sections, "pending_uploads", "stream_id", last, 10**6)
    file = io.BytesIO()
    write_checkpoint(file, SnapshotId(EndOffset(end_offset), Epoch(1)), ClusterId("c"), broken)
    snapshot_id = SnapshotId(EndOffset(end_offset), Epoch(1))
    with pytest.raises(CheckpointError, match=r"'pending_uploads'.*1000000"):
        read_metadata(file, snapshot_id)


HOSTILE_RECORDS = (-(2**63), -2, -1, 0, 5, 77, 2**31 - 1, 2**40, 2**63 - 1)
_ONE = column([99])
DANGLING: list[tuple[rec.Record, str]] = [
    (rec.PendingUploadsSet(node_id=0, stream_id=_ONE, start_offset=column([0]),
                           end_offset=column([5])),
     r"stream_id\[0\]: names 99, must be one of the 4 streams"),
    (rec.PendingUploadsSet(node_id=9, stream_id=column([0]), start_offset=column([0]),
                       end_offset=column([5])), "node_id: names node 9"),
    (rec.PendingUploadsSet(node_id=0, stream_id=column([1, 1]), start_offset=column([0, 0]),
                       end_offset=column([5, 5])), "stream_id: names 1 twice"),
    (rec.UploadsAbandoned(node_id=0, stream_id=_ONE), "names 99"),
    (rec.StreamsOpened(node_id=9, stream_id=column([0]), stream_epoch=column([2])), "node 9"),
    (rec.StreamsOpened(node_id=0, stream_id=_ONE, stream_epoch=column([2])), "names 99"),
    (rec.StreamsOpened(node_id=0, stream_id=column([0]), stream_epoch=column([1])), "stream_epoch"),
    (rec.StreamsReopened(stream_id=column([0])), "a stream that is CLOSED"),
    (rec.StreamsClosed(stream_id=column([-1]), end_offset=column([-1])), "names -1"),
    (rec.StreamsTrimmed(stream_id=_ONE, start_offset=column([1])), "names 99"),
    (rec.StreamsDeleted(stream_id=_ONE), "names 99"),
    (rec.ObjectsDestroyed(object_id=_ONE, marked_at_ms=1), "names 99"),
    (rec.ObjectsDestroyed(object_id=column([3, 3]), marked_at_ms=1), "names 3 twice"),
    (rec.ObjectsRemoved(object_id=column([0])), "MARK_DESTROYED"),
    (rec.ObjectAttributesSet(object_id=99, attributes=4), "names 99"),
    (rec.ObjectAttributesSet(object_id=9, attributes=4), "COMMITTED"),
    (rec.ObjectsLinked(composite_id=9, object_id=column([1])), "composite_id: names object 9"),
    (rec.ObjectsLinked(composite_id=99, object_id=column([1])), "composite_id: names object 99"),
    (rec.ObjectsLinked(composite_id=1, object_id=column([0])), "a stream object"),
    (rec.StreamObjectsCommitted(committed_at_ms=1, object_id=column([0]), object_size=column([1]),
                            attributes=column([0]), stream_id=column([0]),
                            start_offset=column([5]), end_offset=column([6])), "PREPARED"),
    (rec.ObjectsReclaimed(object_id=_ONE, deadline_ms=1), "an id that was issued"),
    (rec.ObjectsReclaimed(object_id=column([3]), deadline_ms=1), "an id that no object has"),
    (rec.NodeLocked(node_id=9, locked=True), "node 9"),
    (rec.NodeUnregistered(node_id=9), "node 9"),
    (rec.NodeSupervised(node_id=9), "node 9"),
    (rec.RecoveryAssigned(node_id=9, target_id=0), "node 9"),
    (batches((99, 1, 0, 0, 5)), "names 99"),
    (batches((0, -1, 0, 0, 5)), r"producer_id\[0\]: names -1"),
    (batches((0, 1, 0, 0, 0)), r"record_count\[0\]: names 0"),
    (batches((0, 1, 0, 0, 5), (0, 1, 0, 6, 5)), "sequence 6 .* does not follow"),
    (batches((0, 1, 1, 0, 5), (0, 1, 0, 5, 5)), "epoch 0.* does not follow"),
    (batches((0, 1, 1, 0, 5), (0, 1, 2, 5, 5)), "epoch 2.* does not follow"),
    (rec.ProducerIdsIssued(first_producer_id=1, count=5), "the next id 0"),
    (rec.ProducerIdsIssued(first_producer_id=0, count=0), "count: 0"),
    (rec.ProducersExpired(stream_id=column([0]), producer_id=column([1])), "names 1"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "said"), DANGLING, ids=lambda given: type(given).__name__)
def test_a_record_that_names_what_there_is_not_is_refused(record: rec.Record, said: str) -> None:
    world = World()
    world.write(upload(0, (0, 0, 5), stream_objects=stream_objects((1, 1, 0, 5))))
    before, offset = world.map.state_hash(), world.map.applied_end_offset
    with pytest.raises(errors.InvariantError, match=f"{type(record).__name__}: .*{said}"):
        world.apply(record)
    assert (world.map.state_hash(), world.map.applied_end_offset) == (before, offset)
    read_everything(world.map)


def _spoilt(record: Any) -> Iterator[tuple[str, Any]]:
    """Yield a record with one number changed, at any depth."""
    for field in fields(record):
        value = getattr(record, field.name)
        if is_dataclass(value):
            for name, part in _spoilt(value):
                yield f"{field.name}.{name}", replace(record, **{field.name: part})
        elif isinstance(value, np.ndarray) and len(value):
            for number in HOSTILE_RECORDS:
                changed = value.copy()
                changed[-1] = number
                yield f"{field.name}[-1]={number}", replace(record, **{field.name: changed})
        elif type(value) is int:
            for number in HOSTILE_RECORDS:
                yield f"{field.name}={number}", replace(record, **{field.name: number})


def _tried(
    cluster_metadata: ClusterMetadata, offset: int, records: tuple[rec.Record, ...], where: str
) -> bool:
    """Replay an entry, read, and undo; return whether it was refused."""
    before = cluster_metadata.state_hash()
    try:
        read = decode_records(encode_records(records))
    except (ValueError, RecordCodecError):
        return True  # no log can hold it
    try:
        cluster_metadata.apply(offset, read)
    except (errors.InvariantError, errors.NewerLogError):
        assert cluster_metadata.state_hash() == before, where
        return True
    with suppress(errors.ApiError), told(f"{where}, read", errors.ApiError):
        read_everything(cluster_metadata)
    cluster_metadata.undo_to(offset)
    assert cluster_metadata.state_hash() == before, where
    return False


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_spoilt_record_is_refused_or_harms_no_read(times: int) -> None:
    seen: dict[type, int] = {}
    refused: set[type] = set()
    cluster_metadata = ClusterMetadata()
    for made in histories():
        cluster_metadata = ClusterMetadata()
        for offset, payload in made.pair.log:
            records = decode_records(payload)
            for index, record in enumerate(records):
                kind = type(record)
                seen[kind] = seen.get(kind, 0) + 1
                if seen[kind] > times:
                    continue
                for what, spoilt in _spoilt(record):
                    entry = (*records[:index], spoilt, *records[index + 1 :])
                    where = f"{kind.__name__} at {offset}: {what}"
                    if _tried(cluster_metadata, offset, entry, where):
                        refused.add(kind)
            cluster_metadata.apply(offset, decode_records(encode_records(records)))
            cluster_metadata.forget_undo(offset + 1)
    assert len(refused) > 15, refused
    assert len(seen) > len(get_args(rec.Record)) - 6
