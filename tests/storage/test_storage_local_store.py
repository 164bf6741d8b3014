"""Stores in directories: escapes, foreign files, disk errors, private modes; and merged ranges."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammeta.controller.rpc.services.snapshot_spool import SnapshotSpool
from streammeta.storage import errors
from streammeta.storage.durable_files import PosixFileSystem, advise_private, replace_file
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.local import LocalObjectStore
from streammeta.storage.object_store.local_files import read_tags
from streammeta.storage.object_store.opening import open_object_store
from streammeta.storage.object_store.protocol.base import MultipartUpload
from streammeta.storage.object_store.protocol.reads import MAX_SPAN, MergedRange, merge_ranges


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "outside").write_text("secret")
    root = tmp_path / "root"
    root.mkdir()
    return root


@pytest.fixture
def store(root: Path) -> LocalObjectStore:
    return LocalObjectStore(root)


def files_below(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize(
    "key",
    ["../outside", "a/../../outside", "/etc/passwd", "a//b", "a/", "/", ".", "..", "./a", "a/.",
     "a\0b", "s" * 256],
)  # fmt: skip
def test_a_key_never_leaves_the_directory(store: LocalObjectStore, root: Path, key: str) -> None:
    for use in (
        lambda: store.put(key, b"x"),
        lambda: store.get_range(key),
        lambda: store.head(key),
        lambda: store.delete_many([key]),
        lambda: store.start_multipart(key),
    ):
        with pytest.raises(errors.InvalidKeyError):
            use()
    assert files_below(root.parent) == ["outside"]


def test_links_are_neither_followed_nor_listed(store: LocalObjectStore, root: Path) -> None:
    store.put("a/real", b"x")
    (root / "objects/a/link").symlink_to(root.parent / "outside")
    (root / "objects/up").symlink_to(root.parent)
    assert [info.key for info in store.list_objects()] == ["a/real"]
    for key in ("a/link", "up/outside"):
        for use in (
            lambda key=key: store.get_range(key),
            lambda key=key: store.put(key, b"y"),
            lambda key=key: store.delete_many([key]),
        ):
            with pytest.raises(errors.InvalidKeyError, match="link"):
                use()
    assert (root.parent / "outside").read_text() == "secret"


def test_unknown_files_are_left_alone(store: LocalObjectStore, root: Path) -> None:
    (root / "notes.txt").write_text("mine")
    (root / ".tmp").mkdir()
    (root / ".tmp/theirs").write_text("theirs")
    store.put("a/b", b"x")
    (root / "objects/a/stray").write_text("stray")
    store.delete_many(["a/b"])
    assert files_below(root) == [".tmp/theirs", "notes.txt", "objects/a/stray"]


def test_deleting_removes_directories_that_are_empty(store: LocalObjectStore, root: Path) -> None:
    store.put("a/b/c/d", b"x")
    store.put("a/e", b"x")
    store.delete_many(["a/b/c/d"])
    assert (root / "objects/a").is_dir()
    assert not (root / "objects/a/b").exists()
    store.delete_many(["a/e"])
    assert list((root / "objects").iterdir()) == []


def test_a_key_below_an_object_or_above_one_is_refused(store: LocalObjectStore, root: Path) -> None:
    store.put("a", b"x")
    store.put("d/e", b"x")
    for key in ("a/b", "a/b/c", "d"):
        with pytest.raises(errors.InvalidKeyError):
            store.put(key, b"y")
        with pytest.raises(errors.ObjectNotFoundError):
            store.get_range(key)
    assert {info.key for info in store.list_objects()} == {"a", "d/e"}
    assert files_below(root / ".tmp") == []


def test_a_missing_directory_is_named_and_not_created(tmp_path: Path) -> None:
    store = LocalObjectStore(tmp_path / "absent")
    upload = MultipartUpload("key", "0a", 0)
    for use in (
        store.check,
        lambda: store.put("key", b"x"),
        lambda: store.get_range("key"),
        lambda: store.head("key"),
        lambda: list(store.list_objects()),
        lambda: store.delete_many(["key"]),
        lambda: store.start_multipart("key"),
        lambda: store.upload_part(upload, 1, b"x"),
        lambda: store.abort_multipart(upload),
        lambda: list(store.list_multipart_uploads()),
    ):
        with pytest.raises(errors.BucketNotFoundError, match="absent"):
            use()
    assert list(tmp_path.iterdir()) == []


def test_an_upload_id_never_leaves_the_directory(store: LocalObjectStore, root: Path) -> None:
    (root / "uploads").mkdir()
    for upload_id in ("..", "../..", "", "/"):
        with pytest.raises(errors.UploadNotFoundError):
            store.abort_multipart(MultipartUpload("key", upload_id, 0))
    assert (root.parent / "outside").exists()


def test_a_full_disk_is_told_and_leaves_the_old_object(
    store: LocalObjectStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("key", b"old")

    def no_room(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(errors.StoreUnavailableError, match="No space left"):
        store.put("key", b"new")
    monkeypatch.undo()
    assert store.get_range("key") == b"old"
    assert files_below(root) == ["objects/key"]


def test_creating_replaces_neither_file_nor_directory(store: LocalObjectStore, root: Path) -> None:
    store.put("d/e", b"x")
    (root / "objects/stray").write_text("stray")
    with pytest.raises(errors.InvalidKeyError):
        store.put("d", b"y", if_absent=True)
    with pytest.raises(errors.ObjectExistsError, match="'stray'"):
        store.put("stray", b"y", if_absent=True)
    store.put("new", b"z", if_absent=True)
    assert files_below(root) == ["objects/d/e", "objects/new", "objects/stray"]
    assert (root / "objects/stray").read_text() == "stray"
    assert (root / "objects/new").stat().st_nlink == 1


def test_a_file_system_without_attributes_refuses_tags_and_stores_nothing(
    store: LocalObjectStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_attributes(*_: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(os, "setxattr", no_attributes)
    with pytest.raises(errors.StoreRejectedError, match="extended attributes"):
        store.put("key", b"x", tags={"a": "b"})
    assert files_below(root) == []
    store.put("key", b"x")
    assert read_tags(root / "objects/key") == {}


def test_bytes_are_synced_before_the_rename_and_the_directory_after(
    store: LocalObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a/first", b"makes the directories")
    calls: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def note_fsync(fd: int) -> None:
        calls.append(f"sync {Path(f'/proc/self/fd/{fd}').readlink().parent.name}")
        fsync(fd)

    def note_replace(source: Path, target: Path) -> Path:
        calls.append("rename")
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "replace", note_replace)
    store.put("a/second", b"x")
    assert calls == ["sync .tmp", "rename", "sync objects"]


def test_a_directory_that_is_made_and_removed_by_others_is_made_again(
    store: LocalObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there for the moment in which this put wanted to make it."""
    make = os.mkdir
    refused: list[Path] = []

    def refuse_once(path: Path, mode: int = 0o777) -> None:
        if path.name == "x" and not refused:
            refused.append(path)
            raise FileExistsError(errno.EEXIST, "made by another thread", str(path))
        make(path, mode)

    monkeypatch.setattr(os, "mkdir", refuse_once)
    store.put("x/a", b"data")
    assert refused
    assert store.get_range("x/a") == b"data"


def test_puts_and_deletes_of_neighbours_do_not_disturb_each_other(store: LocalObjectStore) -> None:
    """A delete takes empty directories away under the feet of a put that just made them."""
    rounds, start = 150, threading.Barrier(2)

    def churn(name: str) -> None:
        start.wait()
        for _ in range(rounds):
            store.put(f"x/y/{name}", b"data")
            assert store.get_range(f"x/y/{name}") == b"data"
            store.delete_many([f"x/y/{name}"])

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(churn, name) for name in ("a", "b")]:
            done.result(timeout=60)
    assert list(store.list_objects()) == []


PLACE = "objects/e4000000/_streammeta_demo/78"
"""Where docs/format.md puts object 78, for programs that write beside the store."""
KEY_78 = key_for(78, "_streammeta_demo")


def test_an_object_lies_where_the_page_of_formats_says(store: LocalObjectStore, root: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "format.md").read_text()
    assert f"`{PLACE}`" in page
    store.put(KEY_78, b"bytes")
    assert (root / PLACE).read_bytes() == b"bytes"
    assert not any((root / ".tmp").iterdir())


def test_what_others_write_by_the_page_is_an_object(store: LocalObjectStore, root: Path) -> None:
    (root / ".tmp").mkdir()
    (root / ".tmp" / "any-name").write_bytes(b"of a Go program")
    (root / PLACE).parent.mkdir(parents=True)
    (root / ".tmp" / "any-name").rename(root / PLACE)

    assert store.get_range(KEY_78) == b"of a Go program"
    assert [object_.key for object_ in store.list_objects()] == [KEY_78]


RANGES = st.lists(
    st.tuples(st.integers(0, 500), st.integers(1, 80)).map(lambda one: (one[0], one[0] + one[1])),
    max_size=30,
)


@settings(max_examples=200, derandomize=True)
@given(RANGES, st.integers(1, 200), st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_every_range_is_read_once_and_groups_keep_their_limits(
    ranges: list[tuple[int, int]], max_span: int, max_unused: float
) -> None:
    groups = merge_ranges(ranges, max_span=max_span, max_unused=max_unused)
    assert sorted(index for group in groups for index in group.members) == list(range(len(ranges)))
    assert [group.start for group in groups] == sorted(group.start for group in groups)
    for group in groups:
        members = [ranges[index] for index in group.members]
        assert (group.start, group.end) == (
            min(start for start, _ in members),
            max(end for _, end in members),
        )
        span = group.end - group.start
        wanted = {byte for start, end in members for byte in range(start, end)}
        assert len(members) == 1 or span <= max_span
        assert span - len(wanted) <= max_unused * span


def test_neighbours_are_read_together_up_to_four_mebibytes() -> None:
    mebibyte = 1024 * 1024
    blocks = [(i * mebibyte, (i + 1) * mebibyte) for i in range(6)]
    assert merge_ranges(blocks) == [
        MergedRange(0, 4 * mebibyte, (0, 1, 2, 3)),
        MergedRange(4 * mebibyte, 6 * mebibyte, (4, 5)),
    ]
    assert merge_ranges([(0, MAX_SPAN + 1)]) == [MergedRange(0, MAX_SPAN + 1, (0,))]


def test_half_may_be_unused_but_not_more() -> None:
    assert len(merge_ranges([(0, 50), (150, 200)])) == 1
    assert len(merge_ranges([(0, 50), (151, 201)])) == 2


def test_an_empty_range_is_refused() -> None:
    with pytest.raises(ValueError, match="byte range"):
        merge_ranges([(0, 1), (5, 5)])


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
