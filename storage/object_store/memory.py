"""A store in memory, for tests of what sits on top of a store.

It keeps the rules of the protocol, and fails on demand: `fail_next` makes the next calls of one
method raise. Nothing outlives the process.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from storage.errors import (
    ObjectNotFoundError,
    RangeNotSatisfiableError,
    StorageError,
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


@dataclass(frozen=True, slots=True)
class _Stored:
    data: bytes
    info: ObjectInfo


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class MemoryObjectStore:
    """An `ObjectStore` in a dict; `now_ms` gives the time that objects are stamped with."""

    def __init__(self, now_ms: Callable[[], int] = _now_ms) -> None:
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._stored: dict[str, _Stored] = {}
        self._parts: dict[MultipartUpload, dict[int, bytes]] = {}
        self._uploads_started = 0
        self._failures: dict[str, deque[StorageError]] = {}

    def fail_next(self, operation: str, error: StorageError, times: int = 1) -> None:
        """Make the next `times` calls of the method named `operation` raise `error`.

        They fail before they change anything. Raises `ValueError` on an unknown name.
        """
        if not callable(getattr(self, operation, None)):
            raise ValueError(f"operation is {operation!r}, wanted the name of a store method")
        with self._lock:
            self._failures.setdefault(operation, deque()).extend([error] * times)

    def objects(self) -> dict[str, bytes]:
        """Copy out what is stored, by key."""
        with self._lock:
            return {key: stored.data for key, stored in self._stored.items()}

    def check(self) -> None:
        """See `ObjectStore.check`."""
        self._fail_if_told("check")

    def put(self, key: str, data: Body) -> None:
        """See `ObjectStore.put`."""
        check_key(key)
        self._fail_if_told("put")
        self._store(key, bytes(data))

    def get_range(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """See `ObjectStore.get_range`."""
        check_key(key)
        check_range(start, end)
        self._fail_if_told("get_range")
        return self._read(key, start, end)

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        check_key(key)
        self._fail_if_told("head")
        return self._find(key).info

    def list_objects(
        self, prefix: str = "", start_after: str | None = None
    ) -> Iterator[ObjectInfo]:
        """See `ObjectStore.list_objects`; here one page holds everything."""
        self._fail_if_told("list_objects")
        with self._lock:
            infos = [stored.info for stored in self._stored.values()]
        after = b"" if start_after is None else start_after.encode()
        for info in sorted(infos, key=lambda info: info.key.encode()):
            if info.key.startswith(prefix) and info.key.encode() > after:
                yield info

    def delete_many(self, keys: Iterable[str]) -> DeleteResult:
        """See `ObjectStore.delete_many`."""
        wanted = tuple(keys)
        for key in wanted:
            check_key(key)
        self._fail_if_told("delete_many")
        with self._lock:
            for key in wanted:
                self._stored.pop(key, None)
        return DeleteResult(wanted, {})

    def start_multipart(self, key: str) -> MultipartUpload:
        """See `ObjectStore.start_multipart`."""
        check_key(key)
        self._fail_if_told("start_multipart")
        with self._lock:
            self._uploads_started += 1
            upload = MultipartUpload(key, f"upload-{self._uploads_started}", self._now_ms())
            self._parts[upload] = {}
        return upload

    def upload_part(self, upload: MultipartUpload, number: int, data: Body) -> UploadedPart:
        """See `ObjectStore.upload_part`."""
        check_part_number(number)
        self._fail_if_told("upload_part")
        return self._add_part(upload, number, bytes(data))

    def copy_part(
        self, upload: MultipartUpload, number: int, source_key: str, start: int, end: int
    ) -> UploadedPart:
        """See `ObjectStore.copy_part`."""
        check_part_number(number)
        check_range(start, end)
        self._fail_if_told("copy_part")
        if end > self._find(source_key).info.size:
            raise RangeNotSatisfiableError(source_key, start)
        return self._add_part(upload, number, self._read(source_key, start, end))

    def complete_multipart(self, upload: MultipartUpload, parts: Sequence[UploadedPart]) -> None:
        """See `ObjectStore.complete_multipart`."""
        check_parts(parts)
        self._fail_if_told("complete_multipart")
        with self._lock:
            have = self._parts_of(upload)
            for part in parts:
                if part.etag != _etag(have.get(part.number, b"")):
                    raise ValueError(f"part {part.number} was not uploaded; upload it first")
            del self._parts[upload]
        self._store(upload.key, b"".join(have[part.number] for part in parts))

    def abort_multipart(self, upload: MultipartUpload) -> None:
        """See `ObjectStore.abort_multipart`."""
        self._fail_if_told("abort_multipart")
        with self._lock:
            self._parts.pop(upload, None)

    def list_multipart_uploads(self, prefix: str = "") -> Iterator[MultipartUpload]:
        """See `ObjectStore.list_multipart_uploads`."""
        self._fail_if_told("list_multipart_uploads")
        with self._lock:
            uploads = list(self._parts)
        for upload in sorted(uploads, key=lambda upload: upload.key.encode()):
            if upload.key.startswith(prefix):
                yield upload

    def close(self) -> None:
        """See `ObjectStore.close`; the objects stay for the test to look at."""

    def _fail_if_told(self, operation: str) -> None:
        with self._lock:
            failures = self._failures.get(operation)
            if failures:
                raise failures.popleft()

    def _store(self, key: str, data: bytes) -> None:
        info = ObjectInfo(key, len(data), self._now_ms(), _etag(data))
        with self._lock:
            self._stored[key] = _Stored(data, info)

    def _find(self, key: str) -> _Stored:
        with self._lock:
            stored = self._stored.get(key)
        if stored is None:
            raise ObjectNotFoundError(key)
        return stored

    def _read(self, key: str, start: int, end: int | None) -> bytes:
        data = self._find(key).data
        if start >= len(data) and (start, end) != (0, None):
            raise RangeNotSatisfiableError(key, start)
        return data[start:end]

    def _parts_of(self, upload: MultipartUpload) -> dict[int, bytes]:
        parts = self._parts.get(upload)
        if parts is None:
            raise UploadNotFoundError(upload.key, upload.upload_id)
        return parts

    def _add_part(self, upload: MultipartUpload, number: int, data: bytes) -> UploadedPart:
        with self._lock:
            self._parts_of(upload)[number] = data
        return UploadedPart(number, _etag(data), len(data))


def _etag(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()
