"""Objects as files under one directory: for one machine, for tests and for trying things out.

Layout below the root: `objects/<key>`, `uploads/<upload id>/` with the parts of unfinished
uploads, and `.tmp/`, where a file is written and synced before it is renamed into place, so that
nobody ever sees half an object. Only files that this module made by key are replaced or deleted;
links and special files are neither listed nor followed.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from storage.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    InvalidKeyError,
    ObjectNotFoundError,
    RangeNotSatisfiableError,
    StoreRejectedError,
    StoreUnavailableError,
    UploadNotFoundError,
)
from storage.object_store.base import (
    Body,
    DeleteResult,
    MultipartUpload,
    ObjectInfo,
    UploadedPart,
    check_key,
    check_part_number,
    check_parts,
    check_range,
)

_COPY_CHUNK = 1024 * 1024
_RENAME_TRIES = 20


class LocalObjectStore:
    """An `ObjectStore` in the existing directory `root`; nothing is touched before the first call.

    The key rules are narrower than those of S3, because segments become file names: no empty,
    `.` or `..` segment, none over 255 bytes, and no key that is a prefix path of another.
    """

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.realpath(root))
        self._objects = self._root / "objects"
        self._uploads = self._root / "uploads"
        self._tmp = self._root / ".tmp"

    def check(self) -> None:
        """See `ObjectStore.check`."""
        if not self._root.is_dir():
            raise BucketNotFoundError(
                str(self._root), "create the directory or fix the path in the file:// address"
            )
        if not os.access(self._root, os.R_OK | os.W_OK | os.X_OK):
            raise AccessDeniedError(
                f"directory {self._root} can't be read and written; fix its owner or mode"
            )

    def put(self, key: str, data: Body) -> None:
        """See `ObjectStore.put`."""
        self._write_object(key, lambda fd: _write_all(fd, memoryview(data)))

    def get_range(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """See `ObjectStore.get_range`."""
        check_range(start, end)
        path = self._existing(key)
        with self._errors(key), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if start >= size and (start, end) != (0, None):
                raise RangeNotSatisfiableError(key, start)
            file.seek(start)
            return file.read((size if end is None else min(end, size)) - start)

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        path = self._existing(key)
        with self._errors(key):
            return _info(key, path.stat())

    def list_objects(
        self, prefix: str = "", start_after: str | None = None
    ) -> Iterator[ObjectInfo]:
        """See `ObjectStore.list_objects`; one directory is read at a time."""
        self.check()
        after = b"" if start_after is None else os.fsencode(start_after)
        return self._walk(self._objects, "", os.fsencode(prefix), after)

    def delete_many(self, keys: Iterable[str]) -> DeleteResult:
        """See `ObjectStore.delete_many`."""
        self.check()
        paths = {key: self._path_of(key) for key in keys}
        deleted: list[str] = []
        failed: dict[str, str] = {}
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

    def start_multipart(self, key: str) -> MultipartUpload:
        """See `ObjectStore.start_multipart`."""
        self._path_of(key)
        upload_id = uuid.uuid4().hex
        folder = self._uploads / upload_id
        with self._errors(key):
            self._make_dirs(folder)
            self._write_file(folder / "key", lambda fd: _write_all(fd, memoryview(key.encode())))
            return MultipartUpload(key, upload_id, _ms((folder / "key").stat()))

    def upload_part(self, upload: MultipartUpload, number: int, data: Body) -> UploadedPart:
        """See `ObjectStore.upload_part`."""
        return self._add_part(upload, number, lambda fd: _write_all(fd, memoryview(data)))

    def copy_part(
        self, upload: MultipartUpload, number: int, source_key: str, start: int, end: int
    ) -> UploadedPart:
        """See `ObjectStore.copy_part`."""
        check_range(start, end)
        source = self._path_of(source_key)
        if end > self.head(source_key).size:
            raise RangeNotSatisfiableError(source_key, start)
        return self._add_part(upload, number, lambda fd: _copy(source, fd, start, end - start))

    def complete_multipart(self, upload: MultipartUpload, parts: Sequence[UploadedPart]) -> None:
        """See `ObjectStore.complete_multipart`."""
        check_parts(parts)
        folder = self._folder_of(upload)
        paths = [folder / _part_name(part.number) for part in parts]
        for path, part in zip(paths, parts, strict=True):
            if not path.is_file() or _etag(path.stat()) != part.etag:
                raise ValueError(f"part {part.number} was not uploaded; upload it first")

        def join(fd: int) -> None:
            for path, part in zip(paths, parts, strict=True):
                _copy(path, fd, 0, part.size)

        self._write_object(upload.key, join)
        self.abort_multipart(upload)

    def abort_multipart(self, upload: MultipartUpload) -> None:
        """See `ObjectStore.abort_multipart`."""
        with self._errors(upload.key):
            try:
                shutil.rmtree(self._upload_folder(upload))
            except FileNotFoundError:
                self.check()

    def list_multipart_uploads(self, prefix: str = "") -> Iterator[MultipartUpload]:
        """See `ObjectStore.list_multipart_uploads`."""
        self.check()
        uploads = []
        for path in self._uploads.glob("*/key"):
            try:
                key = path.read_text(encoding="utf-8")
                uploads.append(MultipartUpload(key, path.parent.name, _ms(path.stat())))
            except FileNotFoundError:
                continue  # completed or aborted meanwhile
        wanted = [upload for upload in uploads if upload.key.startswith(prefix)]
        return iter(sorted(wanted, key=lambda upload: (upload.key.encode(), upload.upload_id)))

    def close(self) -> None:
        """See `ObjectStore.close`; no file stays open between calls."""

    def _path_of(self, key: str) -> Path:
        """Give the file of `key`, which is inside the root whatever the key, or refuse the key."""
        check_key(key)
        for segment in key.split("/"):
            if segment in ("", ".", "..") or "\0" in segment:
                raise InvalidKeyError(
                    key, f"segment {segment!r} would leave the directory or is no file name"
                )
            if len(segment.encode()) > 255:
                raise InvalidKeyError(key, "a segment has more than 255 bytes, the file name limit")
        path = self._objects / key
        if os.path.realpath(path) != str(path):
            raise InvalidKeyError(key, f"a link stands in its way at {path}")
        return path

    def _existing(self, key: str) -> Path:
        path = self._path_of(key)
        if not path.is_file():
            self.check()
            raise ObjectNotFoundError(key)
        return path

    def _write_object(self, key: str, fill: Callable[[int], None]) -> None:
        path = self._path_of(key)
        with self._errors(key):
            self._write_file(path, fill)

    def _write_file(self, path: Path, fill: Callable[[int], None]) -> None:
        """Write beside, sync, rename into place, sync the directory."""
        self._make_dirs(self._tmp)
        temporary = self._tmp / uuid.uuid4().hex
        try:
            fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            try:
                fill(fd)
                os.fsync(fd)
            finally:
                os.close(fd)
            self._rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _rename(self, temporary: Path, path: Path) -> None:
        for attempt in range(_RENAME_TRIES):
            try:
                self._make_dirs(path.parent)
                temporary.replace(path)
                break
            except FileNotFoundError:
                # A delete in another thread removed the parent, empty until now.
                if attempt == _RENAME_TRIES - 1:
                    raise
        _sync_directory(path.parent)

    def _make_dirs(self, folder: Path) -> None:
        """Create `folder` and its parents below the root, durably; the root has to exist."""
        if folder.is_dir():
            return
        if folder.parent != self._root:
            self._make_dirs(folder.parent)
        else:
            self.check()
        folder.mkdir(exist_ok=True)
        _sync_directory(folder.parent)

    def _remove_empty_parents(self, path: Path) -> None:
        for folder in path.parents:
            if folder == self._objects:
                return
            try:
                folder.rmdir()
            except OSError:
                return  # not empty, or gone already

    def _walk(self, folder: Path, base: str, prefix: bytes, after: bytes) -> Iterator[ObjectInfo]:
        """Walk in byte order of keys: a directory sorts as its name and a slash."""
        try:
            with os.scandir(folder) as scan:
                found = [
                    (os.fsencode(base + entry.name + ("/" if is_dir else "")), is_dir, entry)
                    for entry in scan
                    if (is_dir := entry.is_dir(follow_symlinks=False))
                    or entry.is_file(follow_symlinks=False)
                ]
        except FileNotFoundError:
            return  # nothing was ever put, or all below was deleted meanwhile
        found.sort(key=lambda item: item[0])
        for key, is_dir, entry in found:
            if is_dir:
                inside = key.startswith(prefix) or prefix.startswith(key)
                if inside and (key > after or after.startswith(key)):
                    yield from self._walk(Path(entry.path), os.fsdecode(key), prefix, after)
            elif key.startswith(prefix) and key > after:
                try:
                    yield _info(os.fsdecode(key), entry.stat(follow_symlinks=False))
                except FileNotFoundError:
                    continue  # deleted meanwhile

    def _upload_folder(self, upload: MultipartUpload) -> Path:
        if not (upload.upload_id.isascii() and upload.upload_id.isalnum()):
            raise UploadNotFoundError(upload.key, upload.upload_id)
        return self._uploads / upload.upload_id

    def _folder_of(self, upload: MultipartUpload) -> Path:
        folder = self._upload_folder(upload)
        if not (folder / "key").is_file():
            self.check()
            raise UploadNotFoundError(upload.key, upload.upload_id)
        return folder

    def _add_part(
        self, upload: MultipartUpload, number: int, fill: Callable[[int], None]
    ) -> UploadedPart:
        check_part_number(number)
        path = self._folder_of(upload) / _part_name(number)
        with self._errors(upload.key):
            self._write_file(path, fill)
            stat = path.stat()
        return UploadedPart(number, _etag(stat), stat.st_size)

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Say what the system says in the words of `storage.errors`."""
        try:
            yield
        except FileNotFoundError:
            self.check()
            raise ObjectNotFoundError(key) from None
        except (NotADirectoryError, IsADirectoryError, FileExistsError):
            raise InvalidKeyError(
                key, "its path is a directory of other keys, or runs through an object"
            ) from None
        except PermissionError as error:
            raise AccessDeniedError(
                f"{error.strerror} at {error.filename}; fix the owner or mode below {self._root}"
            ) from error
        except OSError as error:
            advice = f"{error.strerror} on {key!r} below {self._root}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO):
                raise StoreUnavailableError(f"{advice}; make room or repair it, retry") from error
            raise StoreRejectedError(f"{advice}; fix the path or the file system") from error


def _write_all(fd: int, view: memoryview) -> None:
    view = view.cast("B")
    while len(view):
        view = view[os.write(fd, view) :]


def _copy(source: Path, fd: int, start: int, length: int) -> None:
    with source.open("rb") as file:
        file.seek(start)
        while length:
            chunk = file.read(min(length, _COPY_CHUNK))
            if not chunk:
                raise FileNotFoundError(errno.ENOENT, "file became shorter", str(source))
            _write_all(fd, memoryview(chunk))
            length -= len(chunk)


def _sync_directory(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _part_name(number: int) -> str:
    return f"{number:05d}"


def _ms(stat: os.stat_result) -> int:
    return stat.st_mtime_ns // 1_000_000


def _etag(stat: os.stat_result) -> str:
    return f"{stat.st_ino:x}-{stat.st_mtime_ns:x}-{stat.st_size:x}"


def _info(key: str, stat: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, stat.st_size, _ms(stat), _etag(stat))
