"""A data directory serves one node of one cluster in one process; other files are left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.ids import ClusterId, DirectoryId, NodeId
from controller.journal.directory import format_directory
from controller.journal.errors import (
    DirectoryLockedError,
    DirectoryNotFormattedError,
    WrongDirectoryError,
)
from controller.journal.journal import Journal

CLUSTER, NODE = ClusterId("c"), NodeId(1)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}


def test_an_unformatted_directory_is_refused_and_stays_empty(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(DirectoryNotFormattedError, match="format it"):
            Journal.open(path, cluster_id=CLUSTER, node_id=NODE)
    assert not list(tmp_path.iterdir())


def test_formatting_gives_an_identity_that_stays(tmp_path: Path) -> None:
    identity = format_directory(
        tmp_path / "data", cluster_id=CLUSTER, node_id=NODE, directory_id=DirectoryId("d")
    )
    journal = Journal.open(tmp_path / "data", cluster_id=CLUSTER, node_id=NODE)
    assert journal.identity == identity
    assert identity.directory_id == "d"
    journal.close()
    with pytest.raises(WrongDirectoryError, match="formatted already"):
        format_directory(tmp_path / "data", cluster_id=CLUSTER, node_id=NODE)


@pytest.mark.parametrize(
    ("cluster_id", "node_id", "named"),
    [(ClusterId("other"), NODE, "'other'"), (CLUSTER, NodeId(2), "node 2")],
)
def test_the_directory_of_another_is_refused_untouched(
    tmp_path: Path, cluster_id: ClusterId, node_id: NodeId, named: str
) -> None:
    format_directory(tmp_path, cluster_id=CLUSTER, node_id=NODE)
    before = contents(tmp_path)
    with pytest.raises(WrongDirectoryError, match=named):
        Journal.open(tmp_path, cluster_id=cluster_id, node_id=node_id, format_if_empty=True)
    assert contents(tmp_path) == before


def test_a_directory_of_something_else_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("ten years of work")
    for format_if_empty in (False, True):
        with pytest.raises(WrongDirectoryError, match=r"thesis\.tex"):
            Journal.open(
                tmp_path, cluster_id=CLUSTER, node_id=NODE, format_if_empty=format_if_empty
            )
    with pytest.raises(WrongDirectoryError, match="not empty"):
        format_directory(tmp_path, cluster_id=CLUSTER, node_id=NODE)
    assert contents(tmp_path) == {"thesis.tex": b"ten years of work"}


def test_unknown_files_beside_ours_are_left_alone(tmp_path: Path) -> None:
    format_directory(tmp_path, cluster_id=CLUSTER, node_id=NODE)
    strangers = {"notes.txt": b"n", "7.log": b"7", "x.tmp": b"x", "0.log.tmp": b"0"}
    for name, data in strangers.items():
        (tmp_path / name).write_bytes(data)
    Journal.open(tmp_path, cluster_id=CLUSTER, node_id=NODE).close()
    assert strangers.items() <= contents(tmp_path).items()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    format_directory(tmp_path, cluster_id=CLUSTER, node_id=NODE)
    journal = Journal.open(tmp_path, cluster_id=CLUSTER, node_id=NODE)
    with pytest.raises(DirectoryLockedError, match="pid"):
        Journal.open(tmp_path, cluster_id=CLUSTER, node_id=NODE)
    journal.close()
    Journal.open(tmp_path, cluster_id=CLUSTER, node_id=NODE).close()


def test_an_interrupted_format_can_be_repeated(tmp_path: Path) -> None:
    format_directory(tmp_path, cluster_id=CLUSTER, node_id=NODE)
    (tmp_path / "meta.json").rename(tmp_path / "meta.json.tmp")
    with pytest.raises(DirectoryNotFormattedError):
        Journal.open(tmp_path, cluster_id=CLUSTER, node_id=NODE)
    Journal.open(tmp_path, cluster_id=CLUSTER, node_id=NODE, format_if_empty=True).close()
