"""A checkpoint of a newer version stops a controller; nothing of it is dropped or put aside."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest

from streammeta.controller.ids import ClusterId, EndOffset, Epoch, SnapshotId
from streammeta.controller.journal.errors import BadSnapshotError, NewerVersionError
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.runtime.persistence.metadata_checkpoint import snapshot_check
from streammeta.controller.snapshot import checkpoint_file
from streammeta.controller.snapshot.checkpoint_file import FOOTER, HEADER, write_checkpoint
from tests.journal.journal_tools import make, open_journal

ID = SnapshotId(EndOffset(7), Epoch(3))
CHECK = snapshot_check(ClusterId("c"))


def written(change: Callable[[dict[str, Any]], None]) -> bytes:
    """Return a checkpoint of the empty map whose sections were changed."""
    sections: dict[str, Any] = dict(ClusterMetadata().freeze().sections())
    change(sections)
    sink = io.BytesIO()
    write_checkpoint(sink, ID, "c", sections)
    return sink.getvalue()


def with_section() -> bytes:
    column = np.zeros(0, np.int64)
    return written(lambda sections: sections.update(links={"stream_id": column}))


def with_column() -> bytes:
    def add(sections: dict[str, Any]) -> None:
        sections["streams"] = {**sections["streams"], "colour": np.zeros(0, np.int64)}

    return written(add)


def with_version(monkeypatch: pytest.MonkeyPatch) -> bytes:
    with monkeypatch.context() as newer:
        newer.setattr(checkpoint_file, "VERSION", checkpoint_file.VERSION + 1)
        return written(lambda _: None)


def with_index_member(place: str) -> bytes:
    """Return a checkpoint whose index says more than this version knows, with its checksum."""
    whole = written(lambda _: None)
    digest, _, length, magic = FOOTER.unpack(whole[-FOOTER.size :])
    body = whole[: -FOOTER.size - length]
    index = json.loads(whole[-FOOTER.size - length : -FOOTER.size])
    (index if place == "index" else index["sections"][0])["colour"] = 1
    text = json.dumps(index).encode()
    return body + text + FOOTER.pack(digest, google_crc32c.value(text), len(text), magic)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("section", "its section 'links'"),
        ("column", "column 'colour' of its section 'streams'"),
        ("version", "format version 3, only up to 2"),
        ("index", "member 'colour' of its index"),
        ("entry", "member 'colour' of its index"),
    ],
)
def test_what_only_a_newer_version_knows_stops_a_start_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, told: str
) -> None:
    made: dict[str, Callable[[], bytes]] = {
        "section": with_section,
        "column": with_column,
        "version": lambda: with_version(monkeypatch),
        "index": lambda: with_index_member("index"),
        "entry": lambda: with_index_member("entry"),
    }
    data = tmp_path / "data"
    make(data)
    (data / ID.file_name).write_bytes(made[kind]())
    before = {path.name: path.read_bytes() for path in data.iterdir()}
    with pytest.raises(NewerVersionError) as raised:
        open_journal(data, read_snapshot_voters=CHECK)
    assert told in str(raised.value)
    after = {path.name: path.read_bytes() for path in data.iterdir()}
    assert {name: after[name] for name in before if name != ".lock"} == {
        name: data for name, data in before.items() if name != ".lock"
    }
    assert not list(data.glob("*.damaged"))


def test_a_damaged_version_is_damage() -> None:
    whole = bytearray(written(lambda _: None))
    whole[HEADER.size - 22] ^= 0x10  # within the version
    with pytest.raises(BadSnapshotError, match="checksum"):
        CHECK(ID, io.BytesIO(bytes(whole)))
