"""A record that names what there is not, or in the wrong state, is refused and changes nothing.

Every record that a history decided is spoilt in one cell at a time. A spoilt record is refused, or
makes a map that answers everything that can be asked, and undo takes it back.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args

import numpy as np
import pytest

from streammeta.controller.errors import ApiError, InvariantError
from streammeta.controller.metadata.cluster_map import ClusterMap
from streammeta.controller.metadata.values import column
from streammeta.controller.records import record as rec
from streammeta.controller.records.codec import RecordCodecError, decode_records, encode_records
from tests.metadata.rich_history import histories
from tests.metadata.test_metadata_section_rules import read_everything
from tests.metadata.test_metadata_uploads import World, stream_objects, upload

HOSTILE = (-(2**63), -2, -1, 0, 5, 77, 2**31 - 1, 2**40, 2**63 - 1)
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
    (rec.NodeLocked(node_id=9, locked=True), "node 9"),
    (rec.NodeUnregistered(node_id=9), "node 9"),
    (rec.NodeSupervised(node_id=9), "node 9"),
    (rec.RecoveryAssigned(node_id=9, target_id=0), "node 9"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "said"), DANGLING, ids=lambda given: type(given).__name__)
def test_a_record_that_names_what_there_is_not_is_refused(record: rec.Record, said: str) -> None:
    world = World()
    world.write(upload(0, (0, 0, 5), stream_objects=stream_objects((1, 1, 0, 5))))
    before, offset = world.map.state_hash(), world.map.applied_end_offset
    with pytest.raises(InvariantError, match=f"{type(record).__name__}: .*{said}"):
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
            for number in HOSTILE:
                changed = value.copy()
                changed[-1] = number
                yield f"{field.name}[-1]={number}", replace(record, **{field.name: changed})
        elif type(value) is int:
            for number in HOSTILE:
                yield f"{field.name}={number}", replace(record, **{field.name: number})


def _tried(
    cluster_map: ClusterMap, offset: int, records: tuple[rec.Record, ...], where: str
) -> bool:
    """Replay an entry, read, and undo; return whether it was refused."""
    before = cluster_map.state_hash()
    try:
        read = decode_records(encode_records(records))
    except (ValueError, RecordCodecError):
        return True  # no log can hold it
    try:
        cluster_map.apply(offset, read)
    except InvariantError:
        assert cluster_map.state_hash() == before, where
        return True
    try:
        read_everything(cluster_map)
    except ApiError:
        pass
    except Exception as error:
        raise AssertionError(f"{where}, read") from error
    cluster_map.undo_to(offset)
    assert cluster_map.state_hash() == before, where
    return False


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_spoilt_record_is_refused_or_harms_no_read(times: int) -> None:
    seen: dict[type, int] = {}
    refused: set[type] = set()
    cluster_map = ClusterMap()
    for made in histories():
        cluster_map = ClusterMap()
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
                    if _tried(cluster_map, offset, entry, where):
                        refused.add(kind)
            cluster_map.apply(offset, decode_records(encode_records(records)))
            cluster_map.forget_undo(offset + 1)
    assert len(refused) > 15, refused
    assert len(seen) > len(get_args(rec.Record)) - 6
