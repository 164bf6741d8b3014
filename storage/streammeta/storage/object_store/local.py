"""Local object store: objects as files under one directory, for one machine and for tests.

Layout below the root: `objects/<key>`, `uploads/<upload id>/` with the parts of unfinished
uploads, and `.tmp/`. A file is written and synced in `.tmp/` and then renamed, so readers never see
half an object. Tags are an extended attribute of the file. The store replaces or deletes only files
of its keys. It neither lists nor follows links and special files.
"""

from __future__ import annotations

import copy
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from streammeta.storage import errors
from streammeta.storage.durable_files import DIRECTORY_MODE, FILE_MODE, sync_directory
from streammeta.storage.object_store.local_files import (
    copy_bytes,
    etag_of,
    info_of,
    join_files,
    modified_ms,
    read_all,
    read_scattered,
    read_tags,
    write_all,
    write_tags,
)
from streammeta.storage.object_store.protocol import calls as store_calls
from streammeta.storage.object_store.protocol.base import (
    Body,
    DeleteResult,
    MultipartUpload,
    ObjectInfo,
    OldVersion,
    Tags,
    UploadedPart,
    check_key,
    check_part_number,
    check_parts,
    check_range,
    check_tags,
)
from streammeta.storage.object_store.protocol.reads import Scatter

# Each try loses only to a concurrent delete of the same empty directory.
_RENAME_TRIES = 20


class LocalObjectStore:
    """An `ObjectStore` in the existing directory `root`, untouched before the first call.

    The key rules are narrower than S3's rules, because segments become file names: no empty, `.` or
    `..` segment, none over 255 bytes, and no key that is a prefix path of another.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        # Resolved once. `_path_of` compares real paths to detect links below the root.
        self._root = Path(os.path.realpath(root))
        self._objects = self._root / "objects"
        self._uploads = self._root / "uploads"
        self._tmp = self._root / ".tmp"
        self._meter = store_calls.Meter()
        self._deadline: float | None = None

    def check(self) -> None:
        """See `ObjectStore.check`."""
        with self._call("check"):
            self._check_root()

    def until(self, deadline: float) -> LocalObjectStore:
        """See `ObjectStore.until`. A call that has begun is not interrupted."""
        view = copy.copy(self)
        view._deadline = store_calls.earlier(self._deadline, deadline)
        return view

    def metrics(self) -> store_calls.StoreMetrics:
        """See `ObjectStore.metrics`."""
        return self._meter.snapshot()

    def put(
        self, key: str, data: Body, *, if_absent: bool = False, tags: Tags | None = None
    ) -> None:
        """See `ObjectStore.put`."""
        path = self._path_of(key)
        check_tags(tags or {})
        view = memoryview(data).cast("B")
        with self._call("put") as tally, self._translate_errors(key):
            self._write_file(path, lambda fd: write_all(fd, view), tags, if_absent=if_absent)
            tally.bytes_sent = len(view)

    def get_range(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """See `ObjectStore.get_range`."""
        check_range(start, end)
        path = self._path_of(key)
        with self._call("get_range") as tally, self._open_object(key, path) as fd:
            size = os.fstat(fd).st_size
            # As S3: a range of an empty object is an error, the whole empty object is not.
            if start >= size and (start, end) != (0, None):
                raise errors.RangeNotSatisfiableError(key, start)
            data = read_all(fd, start, size if end is None else min(end, size))
            tally.bytes_received = len(data)
        return data

    def read_into(self, key: str, start: int, into: Sequence[memoryview]) -> int:
        """See `ObjectStore.read_into`."""
        scatter = Scatter(into)
        check_range(start, start + scatter.room)
        path = self._path_of(key)
        with self._call("get_range") as tally, self._open_object(key, path) as fd:
            if start >= os.fstat(fd).st_size:
                raise errors.RangeNotSatisfiableError(key, start)
            tally.bytes_received = read_scattered(fd, start, scatter)
            return tally.bytes_received

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        path = self._path_of(key)
        with self._call("head"), self._open_object(key, path) as fd:
            return info_of(key, os.fstat(fd))

    def list_objects(
        self, prefix: str = "", start_after: str | None = None
    ) -> Iterator[ObjectInfo]:
        """See `ObjectStore.list_objects`. Reads one directory at a time."""
        with self._call("list_objects"):
            self._check_root()
        after = b"" if start_after is None else os.fsencode(start_after)
        return self._walk(self._objects, "", os.fsencode(prefix), after)

    def copy(self, source_key: str, target_key: str, source: ObjectInfo | None = None) -> None:
        """See `ObjectStore.copy`."""
        path, target = self._path_of(source_key), self._path_of(target_key)
        with self._call("copy"), self._open_object(source_key, path) as opened:
            found = info_of(source_key, os.fstat(opened))
            if source is not None and found.etag != source.etag:
                raise errors.ObjectChangedError(source_key)
            self._write_file(
                # From the open file, so a replacement of the source meanwhile can't mix two
                # objects.
                target,
                lambda fd: copy_bytes(opened, fd, 0, found.size),
                read_tags(opened),
            )

    def add_tags(self, key: str, tags: Tags) -> None:
        """See `ObjectStore.add_tags`."""
        path = self._path_of(key)
        with self._call("add_tags"), self._open_object(key, path) as fd:
            wanted = read_tags(fd) | dict(tags)
            check_tags(wanted)
            write_tags(fd, wanted)
            os.fsync(fd)

    def delete_many(self, keys: Iterable[str]) -> DeleteResult:
        """See `ObjectStore.delete_many`."""
        paths = {key: self._path_of(key) for key in keys}
        deleted: list[str] = []
        failed: dict[str, str] = {}

        with self._call("delete_many"):
            self._check_root()
            for key, path in paths.items():
                try:
                    path.unlink(missing_ok=True)
                except NotADirectoryError:
                    deleted.append(key)
                except OSError as error:
                    failed[key] = f"{error.strerror} ({path})"
                else:
                    deleted.append(key)
                    self._remove_empty_parents(path)

        return DeleteResult(tuple(deleted), failed)

    def start_multipart(self, key: str, *, tags: Tags | None = None) -> MultipartUpload:
        """See `ObjectStore.start_multipart`."""
        self._path_of(key)
        check_tags(tags or {})
        # Random, so an id of an aborted upload never names a later one.
        upload_id = uuid.uuid4().hex
        # This file makes the upload exist. It is written after its folder and read by listings.
        path = self._uploads / upload_id / "key"
        name = memoryview(key.encode())
        with self._call("start_multipart"), self._translate_errors(key):
            self._make_dirs(path.parent)
            self._write_file(path, lambda fd: write_all(fd, name), tags)
            return MultipartUpload(key, upload_id, modified_ms(path.stat()))

    def upload_part(self, upload: MultipartUpload, number: int, data: Body) -> UploadedPart:
        """See `ObjectStore.upload_part`."""
        check_part_number(number)
        view = memoryview(data).cast("B")
        with self._call("upload_part") as tally:
            part = self._add_part(upload, number, lambda fd: write_all(fd, view))
            tally.bytes_sent = part.size
        return part

    def copy_part(
        self, upload: MultipartUpload, number: int, source_key: str, start: int, end: int
    ) -> UploadedPart:
        """See `ObjectStore.copy_part`."""
        check_part_number(number)
        check_range(start, end)
        path = self._path_of(source_key)
        with self._call("copy_part"), self._open_object(source_key, path) as source:
            if end > os.fstat(source).st_size:
                raise errors.RangeNotSatisfiableError(source_key, start)
            return self._add_part(upload, number, lambda fd: copy_bytes(source, fd, start, end))

    def complete_multipart(self, upload: MultipartUpload, parts: Sequence[UploadedPart]) -> None:
        """See `ObjectStore.complete_multipart`."""
        check_parts(parts)
        path = self._path_of(upload.key)
        with self._call("complete_multipart"), self._translate_errors(upload.key):
            folder = self._existing_folder(upload)
            files = [folder / _part_name(part.number) for part in parts]
            for file, part in zip(files, parts, strict=True):
                # The caller's etag may belong to a part that a second upload of the number has
                # replaced.
                if not file.is_file() or etag_of(file.stat()) != part.etag:
                    raise ValueError(
                        f"part {part.number} is missing or was replaced. Upload it first"
                    )
            self._write_file(path, lambda fd: join_files(files, fd), read_tags(folder / "key"))
            self._drop(upload)

    def abort_multipart(self, upload: MultipartUpload) -> None:
        """See `ObjectStore.abort_multipart`."""
        with self._meter.call("abort_multipart", store_calls.with_clean_up(self._deadline)):
            self._drop(upload)

    def list_multipart_uploads(self, prefix: str = "") -> Iterator[MultipartUpload]:
        """See `ObjectStore.list_multipart_uploads`."""
        uploads = []
        with self._call("list_multipart_uploads"):
            self._check_root()
            for path in self._uploads.glob("*/key"):
                try:
                    key = path.read_text(encoding="utf-8")
                    uploads.append(MultipartUpload(key, path.parent.name, modified_ms(path.stat())))
                except FileNotFoundError:
                    continue  # completed or aborted meanwhile
        wanted = [upload for upload in uploads if upload.key.startswith(prefix)]
        return iter(sorted(wanted, key=lambda upload: (upload.key.encode(), upload.upload_id)))

    def list_old_versions(self) -> Iterator[OldVersion]:
        """See `ObjectStore.list_old_versions`. A directory has no versions."""
        return iter(())

    def close(self) -> None:
        """See `ObjectStore.close`. No file stays open between calls."""

    def _call(self, operation: str) -> AbstractContextManager[store_calls.Tally]:
        return self._meter.call(operation, self._deadline)

    def _check_root(self) -> None:
        if not self._root.is_dir():
            raise errors.BucketNotFoundError(
                str(self._root), "create the directory or fix the path in the file:// address"
            )
        if not os.access(self._root, os.R_OK | os.W_OK | os.X_OK):
            raise errors.AccessDeniedError(
                f"directory {self._root} can't be read and written. Fix its owner or mode"
            )

    def _path_of(self, key: str) -> Path:
        """Return the file of `key`, always inside the root. Raises `InvalidKeyError`."""
        check_key(key)
        for segment in key.split("/"):
            if segment in ("", ".", "..") or "\0" in segment:
                raise errors.InvalidKeyError(
                    key, f"segment {segment!r} leaves the directory or is not a file name"
                )
            if len(segment.encode()) > 255:
                raise errors.InvalidKeyError(
                    key, "a segment is over the file name limit of 255 bytes"
                )
        path = self._objects / key
        # A link could lead a put or a delete to files outside the store.
        if os.path.realpath(path) != str(path):
            raise errors.InvalidKeyError(key, f"{path} is a link or below one")
        return path

    @contextmanager
    def _open_object(self, key: str, path: Path) -> Iterator[int]:
        with self._translate_errors(key):
            try:
                # Without O_NONBLOCK, opening a pipe in place of an object would block.
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except NotADirectoryError:
                raise errors.ObjectNotFoundError(key) from None
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise errors.ObjectNotFoundError(key)
                yield fd
            finally:
                os.close(fd)

    def _write_file(
        self,
        path: Path,
        fill: Callable[[int], None],
        tags: Tags | None = None,
        *,
        if_absent: bool = False,
    ) -> None:
        """Write a temporary file, sync it, move it into place, and sync the directory."""
        self._make_dirs(self._tmp)
        # In the same file system as the objects, because a rename across file systems is a copy.
        temporary = self._tmp / uuid.uuid4().hex
        try:
            # O_EXCL: never write into a file of another process, or through a link.
            fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, FILE_MODE)
            try:
                fill(fd)
                if tags:
                    write_tags(fd, tags)
                os.fsync(fd)
            finally:
                os.close(fd)

            # After the sync, or a crash could leave the name with incomplete bytes.
            self._move(temporary, path, if_absent=if_absent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _move(self, temporary: Path, path: Path, *, if_absent: bool) -> None:
        for attempt in range(_RENAME_TRIES):
            try:
                self._make_dirs(path.parent)
                if if_absent:
                    self._link(temporary, path)
                else:
                    temporary.replace(path)
                break
            except FileNotFoundError:
                # A delete in another thread removed the parent, empty until now.
                if attempt == _RENAME_TRIES - 1:
                    raise
        # A rename is durable only once the directory is synced.
        sync_directory(path.parent)

    def _link(self, temporary: Path, path: Path) -> None:
        """Name the file unless the name exists. A link never replaces a file, a rename does."""
        try:
            os.link(temporary, path)
        except FileExistsError:
            if path.is_dir():
                raise
            raise errors.ObjectExistsError(path.relative_to(self._objects).as_posix()) from None
        temporary.unlink()

    def _make_dirs(self, folder: Path) -> None:
        """Create `folder` and its parents below the existing root, durably."""
        if folder.is_dir():
            return
        if folder.parent != self._root:
            # From the top down, each level synced before the next: after a crash no level is
            # missing above an existing one.
            self._make_dirs(folder.parent)
        else:
            self._check_root()
        try:
            folder.mkdir(DIRECTORY_MODE)
        except FileExistsError:
            # Another put may have created the directory. If a delete removed it again, stat raises
            # FileNotFoundError, which `_move` retries.
            if not stat.S_ISDIR(folder.stat().st_mode):
                raise
        sync_directory(folder.parent)

    def _remove_empty_parents(self, path: Path) -> None:
        for folder in path.parents:
            if folder == self._objects:
                return
            try:
                # Fails if another put added a file meanwhile, so it never removes an object.
                folder.rmdir()
            except OSError:
                return  # not empty, or deleted already

    def _walk(
        self, folder: str | Path, base: str, prefix: bytes, after: bytes
    ) -> Iterator[ObjectInfo]:
        """Walk in byte order of keys. A directory sorts as its name with a slash."""
        try:
            with os.scandir(folder) as scan:
                found = [
                    (os.fsencode(base + entry.name + ("/" if is_dir else "")), is_dir, entry)
                    for entry in scan
                    if (is_dir := entry.is_dir(follow_symlinks=False))
                    or entry.is_file(follow_symlinks=False)
                ]
        except FileNotFoundError:
            return  # the store is new, or the directory was deleted meanwhile

        # Bytes, not text: S3 lists in the order of UTF-8, and callers merge listings of both
        # stores.
        found.sort(key=lambda item: item[0])
        for key, is_dir, entry in found:
            if is_dir:
                # Skip directories whose keys are all outside the prefix or before `after`.
                inside = key.startswith(prefix) or prefix.startswith(key)
                if inside and (key > after or after.startswith(key)):
                    yield from self._walk(entry.path, os.fsdecode(key), prefix, after)
            elif key.startswith(prefix) and key > after:
                try:
                    yield info_of(os.fsdecode(key), entry.stat(follow_symlinks=False))
                except FileNotFoundError:
                    continue  # deleted meanwhile

    def _upload_folder(self, upload: MultipartUpload) -> Path:
        # The id becomes a path segment. Ids of this store are hex, so anything else is a
        # stranger's.
        if not (upload.upload_id.isascii() and upload.upload_id.isalnum()):
            raise errors.UploadNotFoundError(upload.key, upload.upload_id)
        return self._uploads / upload.upload_id

    def _existing_folder(self, upload: MultipartUpload) -> Path:
        folder = self._upload_folder(upload)
        if not (folder / "key").is_file():
            self._check_root()
            raise errors.UploadNotFoundError(upload.key, upload.upload_id)
        return folder

    def _add_part(
        self, upload: MultipartUpload, number: int, fill: Callable[[int], None]
    ) -> UploadedPart:
        path = self._existing_folder(upload) / _part_name(number)
        with self._translate_errors(upload.key):
            self._write_file(path, fill)
            found = path.stat()
        return UploadedPart(number, etag_of(found), found.st_size)

    def _drop(self, upload: MultipartUpload) -> None:
        with self._translate_errors(upload.key):
            try:
                shutil.rmtree(self._upload_folder(upload))
            except FileNotFoundError:
                self._check_root()

    @contextmanager
    def _translate_errors(self, key: str) -> Iterator[None]:
        """Translate errors of the system into `streammeta.storage.errors`."""
        try:
            yield
        except FileNotFoundError:
            self._check_root()
            raise errors.ObjectNotFoundError(key) from None
        except (NotADirectoryError, IsADirectoryError, FileExistsError):
            raise errors.InvalidKeyError(
                key, "its path is a directory of other keys, or contains an object"
            ) from None
        except PermissionError as error:
            raise errors.AccessDeniedError(
                f"{error.strerror} at {error.filename}. Fix the owner or mode below {self._root}"
            ) from error
        except OSError as error:
            problem = f"{error.strerror} on {key!r} below {self._root}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO):
                # Space and descriptors come back, so the caller may wait and retry.
                raise errors.StoreUnavailableError(
                    f"{problem}. Free space or repair, then retry"
                ) from error
            raise errors.StoreRejectedError(
                f"{problem}. Fix the path or the file system"
            ) from error


def _part_name(number: int) -> str:
    return f"{number:05d}"
