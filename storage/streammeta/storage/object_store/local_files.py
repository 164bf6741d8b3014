"""File operations of a local store: read, write, copy, tags and descriptions.

Every function works on an open file or a path and raises `OSError`. `local` translates the errors.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path

from streammeta.storage.errors import StoreRejectedError
from streammeta.storage.object_store.protocol.base import ObjectInfo, Tags
from streammeta.storage.object_store.protocol.reads import Scatter
from streammeta.storage.parsing import parse_json

# Bounds the memory of a copy of any size.
_COPY_CHUNK = 1024 * 1024
# preadv fails on more buffers than the system's limit.
_VIEWS_PER_READ = min(1024, os.sysconf("SC_IOV_MAX"))
_TAGS_ATTRIBUTE = "user.streammeta.tags"


def write_all(fd: int, view: memoryview) -> None:
    """Write all of `view` at the position of `fd`."""
    view = view.cast("B")
    while len(view):
        # A write may be short, as after a signal or on a nearly full disk.
        view = view[os.write(fd, view) :]


def read_all(fd: int, start: int, end: int) -> bytes:
    """Read bytes `[start, end)`. Raises `FileNotFoundError` if the file ends first."""
    chunks: list[bytes] = []
    while start < end:
        chunk = os.pread(fd, end - start, start)
        # Objects are replaced by rename and never truncated, so a shorter file is a damaged one.
        if not chunk:
            raise FileNotFoundError(errno.ENOENT, "file became shorter")
        chunks.append(chunk)
        start += len(chunk)
    return b"".join(chunks)


def read_scattered(fd: int, start: int, scatter: Scatter) -> int:
    """Fill `scatter` from byte `start`, and return the number of bytes before the file's end."""
    at = start
    while scatter.room:
        got = os.preadv(fd, scatter.next_views(_VIEWS_PER_READ), at)
        if not got:
            break
        scatter.skip(got)
        at += got
    return at - start


def copy_bytes(source: int, fd: int, start: int, end: int) -> None:
    """Write bytes `[start, end)` of `source` at the position of `fd`."""
    while start < end:
        chunk = read_all(source, start, min(end, start + _COPY_CHUNK))
        write_all(fd, memoryview(chunk))
        start += len(chunk)


def join_files(files: Sequence[Path], fd: int) -> None:
    """Write the whole of each file, in order, at the position of `fd`."""
    for file in files:
        with file.open("rb", buffering=0) as source:
            copy_bytes(source.fileno(), fd, 0, os.fstat(source.fileno()).st_size)


def write_tags(fd: int, tags: Tags) -> None:
    """Store `tags` with the file. Raises `StoreRejectedError` if its file system cannot."""
    try:
        os.setxattr(fd, _TAGS_ATTRIBUTE, json.dumps(dict(tags)).encode())
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        raise StoreRejectedError(
            "the object store's file system does not support extended attributes, which tags need."
            " Move the directory to ext4, XFS or Btrfs, or store without tags"
        ) from error


def read_tags(file: int | Path) -> dict[str, str]:
    """Return the file's tags."""
    try:
        tags: dict[str, str] = parse_json(os.getxattr(file, _TAGS_ATTRIBUTE))
    except OSError as error:
        # No tags, or a file system that can't have any.
        if error.errno not in (errno.ENODATA, errno.ENOTSUP):
            raise
        return {}
    return tags


def modified_ms(found: os.stat_result) -> int:
    """Return the time of the last change of the bytes, in ms since 1970."""
    return found.st_mtime_ns // 1_000_000


def etag_of(found: os.stat_result) -> str:
    """Return an etag, which differs between files with the same name."""
    # A rename brings a new inode, and the time and size cover a reused inode number.
    return f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"


def info_of(key: str, found: os.stat_result) -> ObjectInfo:
    """Describe the object `key` from its file's status."""
    return ObjectInfo(key, found.st_size, modified_ms(found), etag_of(found))
