"""Data is its owner's alone: modes of new files and directories, and the advice for older ones."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from streammeta.controller.rpc.services.snapshot_spool import SnapshotSpool
from streammeta.storage.durable_files import PosixFileSystem, advise_private, replace_file
from streammeta.storage.object_store.opening import open_object_store


@pytest.fixture(autouse=True)
def no_mask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(directory: Path) -> set[tuple[bool, int]]:
    """Return the modes of all that lies at a path, each with whether it is a directory."""
    found = {directory, *directory.rglob("*")}
    return {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in found}


PRIVATE = {(True, 0o700), (False, 0o600)}


def test_files_directories_and_locks_are_their_owners_alone(tmp_path: Path) -> None:
    files, folder = PosixFileSystem(), tmp_path / "a" / "b"
    files.make_directory(folder)
    files.open(folder / "segment", create=True).close()
    replace_file(files, folder / "state", [b"x"])
    files.lock(folder / "lock").release()
    assert modes(tmp_path / "a") == PRIVATE


def test_objects_of_a_directory_are_their_owners_alone(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir(0o700)
    store = open_object_store(f"file://{root}")
    store.put("backup/1/segment", b"x")
    store.close()
    assert modes(root) == PRIVATE


def test_a_spooled_snapshot_is_its_owners_alone(tmp_path: Path) -> None:
    with SnapshotSpool(tmp_path).file() as file:
        assert stat.S_IMODE(os.fstat(file._file.fileno()).st_mode) == 0o600


def test_advice_is_given_for_data_that_others_can_read(tmp_path: Path) -> None:
    data = tmp_path / "my data"
    data.mkdir(0o755)
    assert advise_private(data) is None, "nothing is in it"
    (data / "log").touch(0o644)
    assert advise_private(data) == f"chmod -R go= '{data}'"
    assert advise_private(data / "log") == f"chmod -R go= '{data / 'log'}'"
    (data / "log").chmod(0o600)
    assert advise_private(data) is None
    (data / "log").chmod(0o640)
    assert advise_private(data) is not None
    data.chmod(0o700)
    assert advise_private(data) is None
    assert advise_private(tmp_path / "absent") is None
