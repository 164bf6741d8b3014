"""A checkpoint comes back as written, damage is refused, and docs/format.md lists its columns."""

import io
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from streammeta.controller.features import SUPPORTED
from streammeta.controller.ids import ClusterId, EndOffset, Epoch, NodeId, SnapshotId
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from streammeta.controller.runtime.interfaces import SnapshotPoint
from streammeta.controller.runtime.persistence.metadata_checkpoint import FrozenCheckpoint
from streammeta.controller.snapshot.checkpoint_file import (
    BATCH_ROWS,
    CheckpointError,
    CheckpointReader,
    write_checkpoint,
)
from streammeta.controller.snapshot.section_reading import ColumnBuffers

ID = SnapshotId(EndOffset(1234), Epoch(5))
SECTIONS: dict[str, dict[str, Any]] = {
    "streams": {
        "stream_id": np.arange(5_000, dtype=np.int64),
        "state": np.ones(5_000, dtype=np.int8),
    },
    "kvs": {"key": ["a", "ü"], "value": [b"", b"\xff"], "version": np.array([1, 2])},
    "nodes": {"failover": np.array([True, False]), "wal_config": ["", "w"]},
    "empty": {"node_id": np.zeros(0, dtype=np.int64), "text": []},
}


def _written(sections: Any = None) -> bytes:
    sink = io.BytesIO()
    size = write_checkpoint(sink, ID, "cluster", sections or SECTIONS)
    assert size == len(sink.getvalue())
    return sink.getvalue()


def test_what_is_written_is_read() -> None:
    reader = CheckpointReader(io.BytesIO(_written()))
    assert (reader.id, reader.cluster_id) == (ID, "cluster")
    reader.verify()
    sections = reader.sections()
    assert list(sections) == list(SECTIONS)
    for name, columns in SECTIONS.items():
        read = sections[name]
        assert list(read) == list(columns)
        for column, values in columns.items():
            if isinstance(values, np.ndarray):
                np.testing.assert_array_equal(read[column], values)
                assert read[column].dtype == values.dtype
            else:
                assert read[column] == values


class _Given(ColumnBuffers):
    """Buffers with nine rows to spare, one column narrower, and columns that are known."""

    def __init__(self, narrow: str = "", **known: Any) -> None:
        self.made: dict[str, Any] = {}
        self._narrow = narrow
        self._known = known

    def zeros(self, section: str, column: str, rows: int, dtype: np.dtype[Any]) -> Any:
        kind = np.int16 if column == self._narrow else dtype
        self.made[column] = np.zeros(rows + 9, kind)
        return self.made[column][:rows]

    def known(self, section: str, column: str) -> Any:
        return self._known.get(column)


ROWS = 2 * BATCH_ROWS + 17


def _read(columns: dict[str, Any], rooms: ColumnBuffers) -> dict[str, Any]:
    read = CheckpointReader(io.BytesIO(_written({"s": columns}))).sections(rooms)["s"]
    for name, values in columns.items():
        np.testing.assert_array_equal(read[name], values)
    return read


def test_batches_are_read_into_the_room_they_are_given() -> None:
    columns = {"a": np.arange(ROWS), "b": np.arange(ROWS)[::-1] % 100 < 50}
    rooms = _Given()
    read = _read(columns, rooms)
    assert all(np.shares_memory(read[name], rooms.made[name]) for name in columns)
    assert not any(array[ROWS:].any() for array in rooms.made.values())


@pytest.mark.parametrize("row", [-1, 0, 5, BATCH_ROWS, 2 * BATCH_ROWS - 1, ROWS - 1])
def test_a_column_of_zeros_but_one_is_read(row: int) -> None:
    values = np.zeros(ROWS, np.int64)
    values[row] = 7
    _read({"a": values}, _Given())


@pytest.mark.parametrize("row", [0, BATCH_ROWS - 1, BATCH_ROWS, ROWS - 1])
def test_a_known_column_takes_the_place_of_its_equal_only(row: int) -> None:
    known = np.arange(ROWS)
    other = known.copy()
    other[row] = 0 if row else 1
    assert _read({"a": known.copy()}, _Given(a=known))["a"] is known
    assert not np.shares_memory(_read({"a": other}, _Given(a=known))["a"], known)
    np.testing.assert_array_equal(known, np.arange(ROWS))
    for alike in (known[:-1], np.append(known, 0), known.astype(np.int32)):
        assert not np.shares_memory(_read({"a": known}, _Given(a=alike))["a"], alike)


@pytest.mark.parametrize("row", [0, BATCH_ROWS, ROWS - 1])
@pytest.mark.parametrize("value", [2**15 - 1, -(2**15), 2**15, -(2**15) - 1, 2**48])
def test_a_narrower_room_is_left_for_numbers_that_do_not_fit(row: int, value: int) -> None:
    values = np.arange(ROWS) % 100
    values[row] = value
    narrow = _read({"a": values}, _Given("a"))["a"].dtype == np.int16
    assert narrow == (-(2**15) <= value < 2**15)


def test_a_section_with_other_rows_than_the_index_says_is_refused() -> None:
    reader = CheckpointReader(io.BytesIO(_written()))
    for rows in (4_999, 5_001):
        reader.entries["streams"] = replace(reader.entries["streams"], rows=rows)
        with pytest.raises(CheckpointError, match="'streams'"):
            reader.columns("streams")


def test_an_empty_column_keeps_its_type() -> None:
    sections: dict[str, Any] = {"kvs": {"key": [], "value": []}}
    schema = CheckpointReader(io.BytesIO(_written(sections))).table("kvs").schema
    assert (schema.field("key").type, schema.field("value").type) == (pa.string(), pa.binary())


def test_a_file_is_read_from_its_path_and_named_in_errors(tmp_path: Path) -> None:
    path = tmp_path / ID.file_name
    assert path.name == "00000000000000001234-0000000005.checkpoint"
    path.write_bytes(_written())
    with CheckpointReader.open(path) as reader:
        assert reader.id == ID
    path.write_bytes(_written()[:-1])
    with pytest.raises(CheckpointError, match=path.name):
        CheckpointReader.open(path)


def test_text_longer_than_a_record_batch_comes_back_whole() -> None:
    sections = {"kvs": {"key": [f"k{i}" for i in range(BATCH_ROWS + 5)]}}
    assert CheckpointReader(io.BytesIO(_written(sections))).columns("kvs") == sections["kvs"]


def test_equal_sections_make_equal_bytes() -> None:
    assert _written() == _written()


def test_every_cut_is_refused() -> None:
    whole = _written()
    for length in [*range(200), *range(200, len(whole), 997), len(whole) - 1]:
        with pytest.raises(CheckpointError):
            CheckpointReader(io.BytesIO(whole[:length]))


def test_every_flipped_byte_is_noticed() -> None:
    whole = _written()
    places = [*range(60), *range(60, len(whole), 401), *range(len(whole) - 60, len(whole))]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 0x40
        with pytest.raises(CheckpointError):
            CheckpointReader(io.BytesIO(bytes(damaged))).verify()


def test_a_damaged_section_is_refused_by_name_and_the_others_are_read() -> None:
    whole = bytearray(_written())
    entry = CheckpointReader(io.BytesIO(bytes(whole))).entries["streams"]
    whole[entry.position + entry.length // 2] ^= 1
    reader = CheckpointReader(io.BytesIO(bytes(whole)))
    with pytest.raises(CheckpointError, match="'streams'"):
        reader.table("streams")
    assert reader.table("kvs").num_rows == 2


def test_an_unknown_section_is_refused_with_the_known_ones() -> None:
    reader = CheckpointReader(io.BytesIO(_written()))
    with pytest.raises(CheckpointError, match="streams, kvs, nodes, empty"):
        reader.table("objects")


def test_writing_and_reading_leave_pandas_alone(tmp_path: Path) -> None:
    """Importing it stops a controller for more than a second; Arrow does so unless kept from it."""
    program = """
import io, sys
import numpy as np
from streammeta.controller.ids import SnapshotId
from streammeta.controller.snapshot.checkpoint_file import CheckpointReader, write_checkpoint
file = io.BytesIO()
columns = {"a": np.arange(3), "b": np.array([True, False, True]), "c": ["x", "", "zürich"]}
sections = {"s": columns, "kvs": {"value": [b"1", b""]}}
write_checkpoint(file, SnapshotId(1, 1), "c", sections)
read = CheckpointReader(file)
assert read.columns("s")["c"] == ["x", "", "zürich"], read.columns("s")
assert read.columns("s")["b"].tolist() == [True, False, True]
assert read.columns("kvs")["value"] == [b"1", b""]
sys.exit("pandas" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    assert done.returncode == 0


PAGE = Path(__file__).resolve().parents[2] / "docs" / "format.md"
ARROW_NAMES = {"": "int64", "text": "string", "bytes": "binary"}


def documented() -> dict[str, list[tuple[str, str]]]:
    """Columns and Arrow types by section, as the table under "Sections" says."""
    table = PAGE.read_text().split("### Sections")[1].split("###")[0]
    return {
        name: [
            (column, ARROW_NAMES.get(kind, kind))
            for column, kind in re.findall(r"`(\w+)`(?: (text|bytes|int8|int32|bool))?", columns)
        ]
        for name, columns in re.findall(r"^\| `(\w+)` \|[^|]*\| (.*) \|$", table, re.M)
    }


def test_the_page_lists_every_section_and_column_in_order() -> None:
    voters = VoterSet((Voter(ReplicaKey(NodeId(1)), "h:2", "h:1"),))
    point = SnapshotPoint(SnapshotId(EndOffset(0), Epoch(0)), ClusterId("c"), voters)
    recovering = ClusterMetadata()
    recovering._feature_level.load(SUPPORTED.highest)
    recovering._recovery.load(0, 1)
    file = io.BytesIO()
    FrozenCheckpoint(point, recovering.freeze(), bytes(16)).write(file)
    reader = CheckpointReader(file)
    written = {
        section: [(field.name, str(field.type)) for field in reader.table(section).schema]
        for section in reader.entries
    }
    assert documented() == written
    assert list(documented()) == list(written)
