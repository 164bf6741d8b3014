"""A data directory serves one node of one cluster in one process; other files are left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streammeta.controller.ids import ClusterId, DirectoryId, Epoch, NodeId
from streammeta.controller.journal.directory import DirectoryIdentity, format_directory
from streammeta.controller.journal.errors import (
    DirectoryLockedError,
    DirectoryNotFormattedError,
    WrongDirectoryError,
)
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.voters import ReplicaKey
from tests.journal.journal_tools import CLUSTER, NODE, open_journal


def format_it(path: Path, **options: Any) -> DirectoryIdentity:
    return format_directory(path, **{"cluster_id": CLUSTER, "node_id": NODE, **options})


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}


def test_an_unformatted_directory_is_refused_and_stays_empty(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(DirectoryNotFormattedError):
            open_journal(path)
    assert not list(tmp_path.iterdir())


def test_formatting_gives_an_identity_that_stays(tmp_path: Path) -> None:
    identity = format_it(tmp_path / "data", directory_id=DirectoryId("d"))
    journal = open_journal(tmp_path / "data")
    assert journal.identity == identity
    assert identity.directory_id == "d"
    journal.close()
    with pytest.raises(WrongDirectoryError, match="formatted"):
        format_it(tmp_path / "data")


@pytest.mark.parametrize(
    ("cluster_id", "node_id", "named"),
    [(ClusterId("other"), NODE, "'other'"), (CLUSTER, NodeId(2), "node 2"), (CLUSTER, NODE, "x-9")],
)
def test_the_directory_of_another_is_refused_untouched(
    tmp_path: Path, cluster_id: ClusterId, node_id: NodeId, named: str
) -> None:
    format_it(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(WrongDirectoryError, match=named):
        open_journal(
            tmp_path, cluster_id=cluster_id, node_id=node_id, directory_id=DirectoryId("x-9")
        )
    assert contents(tmp_path) == before


def test_a_directory_of_something_else_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("ten years of work")
    with pytest.raises(WrongDirectoryError, match=r"thesis\.tex"):
        open_journal(tmp_path)
    with pytest.raises(WrongDirectoryError, match="empty"):
        format_it(tmp_path)
    assert contents(tmp_path) == {"thesis.tex": b"ten years of work"}


def test_unknown_files_beside_ours_are_left_alone(tmp_path: Path) -> None:
    format_it(tmp_path)
    strangers = {"notes.txt": b"n", "7.log": b"7", "x.tmp": b"x", "0.log.tmp": b"0"}
    for name, data in strangers.items():
        (tmp_path / name).write_bytes(data)
    open_journal(tmp_path).close()
    assert strangers.items() <= contents(tmp_path).items()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    format_it(tmp_path)
    journal = open_journal(tmp_path)
    with pytest.raises(DirectoryLockedError, match="pid"):
        open_journal(tmp_path)
    journal.close()
    open_journal(tmp_path).close()


def test_a_directory_with_votes_but_no_identity_is_never_formatted_again(tmp_path: Path) -> None:
    format_it(tmp_path)
    journal = open_journal(tmp_path)
    journal.write_quorum_state(QuorumState(Epoch(3), ReplicaKey(NodeId(2))))
    journal.close()
    (tmp_path / "meta.json").unlink()
    before = contents(tmp_path)
    with pytest.raises(WrongDirectoryError):
        format_it(tmp_path)
    assert contents(tmp_path) == before


def test_one_process_at_a_time_also_after_a_kill(tmp_path: Path) -> None:
    """The lock is the kernel's: it ends with the process, and a file left behind is no lock."""
    format_it(tmp_path)
    program = (
        "import sys, time; from pathlib import Path;"
        "from streammeta.storage.durable_files import PosixFileSystem;"
        "PosixFileSystem().lock(Path(sys.argv[1]) / '.lock'); print('locked', flush=True);"
        "time.sleep(600)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "locked\n"
        with pytest.raises(DirectoryLockedError, match=f"pid {child.pid}"):
            open_journal(tmp_path)
    finally:
        child.kill()
        child.communicate()
    open_journal(tmp_path).close()
