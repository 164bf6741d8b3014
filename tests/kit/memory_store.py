"""A store in memory, for tests of what sits on top of a store.

It keeps the rules of the protocol, and fails on demand: `fail_next` makes the next calls of one
method raise. Nothing outlives the process.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from streammeta.storage import errors
from streammeta.storage.object_store.protocol import base, calls
from streammeta.storage.object_store.protocol.reads import Scatter


@dataclass(frozen=True, slots=True)
class _Stored:
    data: bytes
    info: base.ObjectInfo
    tags: dict[str, str]


@dataclass(slots=True)
class _Unfinished:
    tags: dict[str, str]
    parts: dict[int, bytes] = field(default_factory=dict)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class MemoryObjectStore:
    """An `ObjectStore` in a dict; `now_ms` gives the time that objects are stamped with."""

    def __init__(self, now_ms: Callable[[], int] = _now_ms) -> None:
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._stored: dict[str, _Stored] = {}
        self._uploads: dict[base.MultipartUpload, _Unfinished] = {}
        self._upload_numbers = itertools.count(1)
        self._failures: dict[str, deque[errors.StorageError]] = {}
        self._meter = calls.Meter()
        self._deadline: float | None = None

    def fail_next(self, operation: str, error: errors.StorageError, times: int = 1) -> None:
        """Make the next `times` calls of the method named `operation` raise `error`.

        They fail before they change anything. Raises `ValueError` on an unknown name.
        """
        if not callable(getattr(self, operation, None)):
            raise ValueError(f"operation is {operation!r}, expected the name of a store method")
        with self._lock:
            self._failures.setdefault(operation, deque()).extend([error] * times)

    def objects(self) -> dict[str, bytes]:
        """Copy out what is stored, by key."""
        with self._lock:
            return {key: stored.data for key, stored in self._stored.items()}

    def check(self) -> None:
        with self._call("check"):
            pass

    def until(self, deadline: float) -> MemoryObjectStore:
        """See `ObjectStore.until`; a call that has begun is not interrupted, as none waits."""
        view = copy.copy(self)
        view._deadline = calls.earlier(self._deadline, deadline)
        return view

    def metrics(self) -> calls.StoreMetrics:
        return self._meter.snapshot()

    def put(
        self, key: str, data: base.Body, *, if_absent: bool = False, tags: base.Tags | None = None
    ) -> None:
        base.check_key(key)
        base.check_tags(tags or {})
        with self._call("put") as tally:
            tally.bytes_sent = self._store(key, bytes(data), tags, if_absent=if_absent)

    def get_range(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        base.check_key(key)
        base.check_range(start, end)
        with self._call("get_range") as tally:
            data = self._read(key, start, end)
            tally.bytes_received = len(data)
        return data

    def read_into(self, key: str, start: int, into: Sequence[memoryview]) -> int:
        """See `ObjectStore.read_into`; it is a `get_range` and counts as one."""
        scatter = Scatter(into)
        data = self.get_range(key, start, start + scatter.room)
        scatter.write(data)
        return len(data)

    def get_tags(self, key: str) -> dict[str, str]:
        """Read the tags that the object was stored with."""
        return dict(self._find(key).tags)

    def head(self, key: str) -> base.ObjectInfo:
        base.check_key(key)
        with self._call("head"):
            return self._find(key).info

    def list_objects(
        self, prefix: str = "", start_after: str | None = None
    ) -> Iterator[base.ObjectInfo]:
        """See `ObjectStore.list_objects`; here one page holds everything."""
        with self._call("list_objects"), self._lock:
            infos = [stored.info for stored in self._stored.values()]
        after = b"" if start_after is None else start_after.encode()
        for info in sorted(infos, key=lambda info: info.key.encode()):
            if info.key.startswith(prefix) and info.key.encode() > after:
                yield info

    def copy(self, source_key: str, target_key: str, source: base.ObjectInfo | None = None) -> None:
        base.check_key(source_key)
        base.check_key(target_key)
        with self._call("copy"):
            found = self._find(source_key)
            if source is not None and found.info.etag != source.etag:
                raise errors.ObjectChangedError(source_key)
            self._store(target_key, found.data, found.tags)

    def add_tags(self, key: str, tags: base.Tags) -> None:
        base.check_key(key)
        with self._call("add_tags"):
            wanted = dict(self._find(key).tags) | dict(tags)
            base.check_tags(wanted)
            with self._lock:
                self._stored[key] = replace(self._stored[key], tags=wanted)

    def delete_many(self, keys: Iterable[str]) -> base.DeleteResult:
        wanted = tuple(keys)
        for key in wanted:
            base.check_key(key)
        with self._call("delete_many"), self._lock:
            for key in wanted:
                self._stored.pop(key, None)
        return base.DeleteResult(wanted, {})

    def start_multipart(self, key: str, *, tags: base.Tags | None = None) -> base.MultipartUpload:
        base.check_key(key)
        base.check_tags(tags or {})
        with self._call("start_multipart"):
            number = next(self._upload_numbers)
            upload = base.MultipartUpload(key, f"upload-{number}", self._now_ms())
            with self._lock:
                self._uploads[upload] = _Unfinished(dict(tags or {}))
        return upload

    def upload_part(
        self, upload: base.MultipartUpload, number: int, data: base.Body
    ) -> base.UploadedPart:
        base.check_part_number(number)
        with self._call("upload_part") as tally:
            part = self._add_part(upload, number, bytes(data))
            tally.bytes_sent = part.size
        return part

    def copy_part(
        self, upload: base.MultipartUpload, number: int, source_key: str, start: int, end: int
    ) -> base.UploadedPart:
        base.check_part_number(number)
        base.check_range(start, end)
        with self._call("copy_part"):
            if end > self._find(source_key).info.size:
                raise errors.RangeNotSatisfiableError(source_key, start)
            return self._add_part(upload, number, self._read(source_key, start, end))

    def complete_multipart(
        self, upload: base.MultipartUpload, parts: Sequence[base.UploadedPart]
    ) -> None:
        base.check_parts(parts)
        with self._call("complete_multipart"):
            with self._lock:
                unfinished = self._unfinished(upload)
                have = unfinished.parts
                for part in parts:
                    if part.etag != _etag(have.get(part.number, b"")):
                        raise ValueError(f"part {part.number} was not uploaded; upload it first")
                del self._uploads[upload]
            data = b"".join(have[part.number] for part in parts)
            self._store(upload.key, data, unfinished.tags)

    def abort_multipart(self, upload: base.MultipartUpload) -> None:
        with self._call("abort_multipart", calls.with_clean_up(self._deadline)), self._lock:
            self._uploads.pop(upload, None)

    def list_multipart_uploads(self, prefix: str = "") -> Iterator[base.MultipartUpload]:
        with self._call("list_multipart_uploads"), self._lock:
            uploads = list(self._uploads)
        for upload in sorted(uploads, key=lambda upload: upload.key.encode()):
            if upload.key.startswith(prefix):
                yield upload

    def list_old_versions(self) -> Iterator[base.OldVersion]:
        """See `ObjectStore.list_old_versions`; there are none here."""
        return iter(())

    def close(self) -> None:
        """See `ObjectStore.close`; the objects stay for the test to look at."""

    @contextmanager
    def _call(self, operation: str, deadline: float | None = None) -> Iterator[calls.Tally]:
        with self._meter.call(operation, deadline or self._deadline) as tally:
            with self._lock:
                failures = self._failures.get(operation)
                if failures:
                    raise failures.popleft()
            yield tally

    def _store(
        self, key: str, data: bytes, tags: base.Tags | None, *, if_absent: bool = False
    ) -> int:
        info = base.ObjectInfo(key, len(data), self._now_ms(), _etag(data))
        with self._lock:
            if if_absent and key in self._stored:
                raise errors.ObjectExistsError(key)
            self._stored[key] = _Stored(data, info, dict(tags or {}))
        return len(data)

    def _find(self, key: str) -> _Stored:
        with self._lock:
            stored = self._stored.get(key)
        if stored is None:
            raise errors.ObjectNotFoundError(key)
        return stored

    def _read(self, key: str, start: int, end: int | None) -> bytes:
        data = self._find(key).data
        if start >= len(data) and (start, end) != (0, None):
            raise errors.RangeNotSatisfiableError(key, start)
        return data[start:end]

    def _unfinished(self, upload: base.MultipartUpload) -> _Unfinished:
        unfinished = self._uploads.get(upload)
        if unfinished is None:
            raise errors.UploadNotFoundError(upload.key, upload.upload_id)
        return unfinished

    def _add_part(
        self, upload: base.MultipartUpload, number: int, data: bytes
    ) -> base.UploadedPart:
        with self._lock:
            self._unfinished(upload).parts[number] = data
        return base.UploadedPart(number, _etag(data), len(data))


def _etag(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()
