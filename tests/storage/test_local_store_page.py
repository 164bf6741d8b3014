"""A directory store is laid out as docs/format.md says, for programs that write beside it."""

from __future__ import annotations

import os
from pathlib import Path

from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.local import LocalObjectStore

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "format.md").read_text()
NAMESPACE = "_streammeta_demo"
PLACE = "objects/e4000000/_streammeta_demo/78"
"""Where the page puts object 78."""


def test_an_object_lies_where_the_page_says(tmp_path: Path) -> None:
    assert f"`{PLACE}`" in PAGE
    LocalObjectStore(tmp_path).put(key_for(78, NAMESPACE), b"bytes")
    assert (tmp_path / PLACE).read_bytes() == b"bytes"
    assert not any((tmp_path / ".tmp").iterdir())


def test_what_another_program_writes_as_the_page_says_is_an_object(tmp_path: Path) -> None:
    (tmp_path / ".tmp").mkdir()
    with (tmp_path / ".tmp" / "any-name").open("wb") as file:
        file.write(b"of a Go program")
        file.flush()
        os.fsync(file.fileno())
    (tmp_path / PLACE).parent.mkdir(parents=True)
    (tmp_path / ".tmp" / "any-name").rename(tmp_path / PLACE)

    store = LocalObjectStore(tmp_path)
    assert store.get_range(key_for(78, NAMESPACE)) == b"of a Go program"
    assert [one.key for one in store.list_objects()] == [key_for(78, NAMESPACE)]


def test_links_are_no_objects(tmp_path: Path) -> None:
    (tmp_path / PLACE).parent.mkdir(parents=True)
    (tmp_path / "elsewhere").write_bytes(b"x")
    (tmp_path / PLACE).symlink_to(tmp_path / "elsewhere")
    assert list(LocalObjectStore(tmp_path).list_objects()) == []
