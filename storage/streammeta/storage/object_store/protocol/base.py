"""Protocol of object stores, and the rules that all of them follow.

Does no I/O. All calls block: an event loop calls them in a thread. A store may be used by many
threads at once. Every failure is one of `storage.errors`; any call may raise
`BucketNotFoundError`, `AccessDeniedError` and `StoreUnavailableError`, which are not repeated
below. Keys are non-empty strings of at most 1024 bytes in UTF-8 (`InvalidKeyError`). Tags are short
labels for the bucket's own rules of expiry, cost and access; the product decides nothing by them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from streammeta.storage.errors import InvalidKeyError
from streammeta.storage.object_store.protocol.calls import StoreMetrics

MIN_PART_SIZE = 5 * 1024 * 1024
MAX_PART_SIZE = 5 * 1024 * 1024 * 1024
MAX_PARTS = 10_000
MAX_KEY_BYTES = 1024
MAX_TAGS = 10

Body: TypeAlias = bytes | bytearray | memoryview
Tags: TypeAlias = Mapping[str, str]

_TAG_NAME = re.compile(r"[A-Za-z0-9 +\-=._:/@]{1,128}")
_TAG_VALUE = re.compile(r"[A-Za-z0-9 +\-=._:/@]{0,256}")
_MAX_TAG_CHARACTERS = 2048


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Description of an object: size in bytes, time in ms since 1970, an opaque etag."""

    key: str
    size: int
    last_modified_ms: int
    etag: str


@dataclass(frozen=True, slots=True)
class DeleteResult:
    """Result of a deletion: keys that are absent now, and reasons for those that are not.

    `deleted` includes keys that never existed. `throttled` are the keys of `failed` whose only
    reason is that the store asked for fewer requests, `denied` those whose reason is a right that
    the caller does not have, or a lock of the object.
    """

    deleted: tuple[str, ...]
    failed: dict[str, str]
    throttled: frozenset[str] = frozenset()
    denied: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class MultipartUpload:
    """An unfinished upload; `started_ms` is in ms since 1970."""

    key: str
    upload_id: str
    started_ms: int


@dataclass(frozen=True, slots=True)
class OldVersion:
    """What a bucket with versions keeps behind a key: bytes that were replaced or deleted.

    With `is_delete_marker` it is the mark of a deletion, in force or past, without bytes.
    """

    key: str
    version_id: str
    size: int
    last_modified_ms: int
    is_delete_marker: bool


@dataclass(frozen=True, slots=True)
class UploadedPart:
    """One part of an upload: its number (1..10000), opaque etag and size in bytes.

    `checksum` is sent again when the upload is completed; empty: the store needs none.
    """

    number: int
    etag: str
    size: int
    checksum: str = ""


class ObjectStore(Protocol):
    """Immutable byte strings under keys; the module docstring has the rules for all calls."""

    def check(self) -> None:
        """Check with one request that the bucket exists and the credentials work."""
        ...

    def until(self, deadline: float) -> ObjectStore:
        """Return a view of this store whose calls end by `deadline`, in `time.monotonic()` seconds.

        Retries and waiting for a free slot are included: a call that is not done by then raises
        `DeadlineExceededError`, and its effect may still happen. A view of a view has the earlier
        deadline of both. Only `abort_multipart` always has at least `CLEAN_UP_S` seconds.
        """
        ...

    def metrics(self) -> StoreMetrics:
        """Return the counters of the calls of this store and all its views so far."""
        ...

    def put(
        self, key: str, data: Body, *, if_absent: bool = False, tags: Tags | None = None
    ) -> None:
        """Store `data` under `key`, durably and all at once, replacing what was there.

        With `if_absent` nothing is replaced: of any number of callers at most one succeeds, all
        others get `ObjectExistsError`. After `StoreUnavailableError` the object may be there.
        Raises `ValueError` on tags that break the rules of `check_tags`.
        """
        ...

    def get_range(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Read bytes `[start, end)`, to the end of the object when `end` is None.

        An object that ends before `end` gives fewer bytes. Raises `ObjectNotFoundError`;
        `RangeNotSatisfiableError` when `start` is not inside the object, except for 0 with no
        `end`; `ValueError` unless `0 <= start < end`.
        """
        ...

    def read_into(self, key: str, start: int, into: Sequence[memoryview]) -> int:
        """Read the object from byte `start` on into the buffers `into`, in their order.

        Makes no other copy of the bytes. Returns their number, less than the room of the buffers
        only when the object ends before. Raises as `get_range`; the content of the buffers is then
        undefined, and after `DeadlineExceededError` may still change: drop them.
        """
        ...

    def head(self, key: str) -> ObjectInfo:
        """Describe the object. Raises `ObjectNotFoundError`."""
        ...

    def list_objects(
        self, prefix: str = "", start_after: str | None = None
    ) -> Iterator[ObjectInfo]:
        """Describe all objects under `prefix` behind `start_after`, in UTF-8 byte order of key.

        Pages are fetched while iterating, so the errors of a store come then too.
        """
        ...

    def copy(self, source_key: str, target_key: str, source: ObjectInfo | None = None) -> None:
        """Make `target_key` the equal of another object: bytes, tags and what else the store keeps.

        The target appears all at once and durably, replacing what was there; its time is new, and
        its etag may be. With `source` only that object is copied: another one under its key is
        refused with `ObjectChangedError`. Raises `ObjectNotFoundError` for the source.
        """
        ...

    def add_tags(self, key: str, tags: Tags) -> None:
        """Add tags to those that an object has; one of the same name is replaced.

        Bytes, time and etag stay. Not atomic: of two callers at once one may go unheard. Raises
        `ObjectNotFoundError`; `ValueError` when all tags together break the rules of `check_tags`.
        """
        ...

    def delete_many(self, keys: Iterable[str]) -> DeleteResult:
        """Delete objects, 1000 a request; an absent key counts as deleted.

        An error of a whole request is raised: batches before it stay deleted, call again.
        """
        ...

    def start_multipart(self, key: str, *, tags: Tags | None = None) -> MultipartUpload:
        """Begin an upload in parts; the object appears, with `tags`, when it is completed.

        Some S3-compatible servers drop these tags, though they keep those of `put`.
        """
        ...

    def upload_part(self, upload: MultipartUpload, number: int, data: Body) -> UploadedPart:
        """Upload part `number` (1..10000), replacing it. Raises `UploadNotFoundError`."""
        ...

    def copy_part(
        self, upload: MultipartUpload, number: int, source_key: str, start: int, end: int
    ) -> UploadedPart:
        """Make part `number` of bytes `[start, end)` of another object of this store.

        Raises `ObjectNotFoundError` for the source; a range behind its end is refused with
        `RangeNotSatisfiableError` or `StoreRejectedError`, servers differing in what they answer.
        """
        ...

    def complete_multipart(self, upload: MultipartUpload, parts: Sequence[UploadedPart]) -> None:
        """Make the object of `parts`, ascending by number; all but the last of `MIN_PART_SIZE`.

        Name every part that was uploaded: some servers drop others, some refuse the whole. Raises
        `UploadNotFoundError`; `ValueError` when the parts break these rules.
        """
        ...

    def abort_multipart(self, upload: MultipartUpload) -> None:
        """Drop the upload and its parts; one that does not exist any more counts as dropped."""
        ...

    def list_multipart_uploads(self, prefix: str = "") -> Iterator[MultipartUpload]:
        """List unfinished uploads under `prefix`, by key."""
        ...

    def list_old_versions(self) -> Iterator[OldVersion]:
        """List versions that are not current, and delete markers; none in a store without them.

        By key, but for the markers of a page, which come behind its versions.
        """
        ...

    def close(self) -> None:
        """Close connections; the store must not be used any more."""
        ...


def check_key(key: str) -> None:
    """Raise `InvalidKeyError` on a key that no store takes."""
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise InvalidKeyError(key, "it is not valid Unicode") from None
    if not 1 <= size <= MAX_KEY_BYTES:
        raise InvalidKeyError(key, f"it has {size} bytes, wanted 1..{MAX_KEY_BYTES}")


def check_range(start: int, end: int | None) -> None:
    """Raise `ValueError` unless `0 <= start < end`."""
    if start < 0 or (end is not None and end <= start):
        raise ValueError(f"byte range is [{start}, {end}), wanted 0 <= start < end")


def check_part_number(number: int) -> None:
    """Raise `ValueError` unless `number` is in 1..10000."""
    if not 1 <= number <= MAX_PARTS:
        raise ValueError(f"part number is {number}, wanted 1..{MAX_PARTS}")


def check_parts(parts: Sequence[UploadedPart]) -> None:
    """Raise `ValueError` unless `parts` may be completed to an object."""
    numbers = [part.number for part in parts]
    if not numbers or numbers != sorted(set(numbers)):
        raise ValueError(f"part numbers are {numbers}, wanted at least one, ascending")
    for part in parts[:-1]:
        if part.size < MIN_PART_SIZE:
            raise ValueError(
                f"part {part.number} has {part.size} bytes, wanted {MIN_PART_SIZE} in all but the"
                " last"
            )


def check_tags(tags: Tags) -> None:
    """Raise `ValueError` unless every store takes `tags`, and keeps them as they are.

    At most 10 tags of 2048 characters together; names of 1..128 and values of 0..256 ASCII letters,
    digits, spaces and `+-=._:/@`, as in the rules of Amazon S3 for all of its services.
    """
    if len(tags) > MAX_TAGS:
        raise ValueError(f"there are {len(tags)} tags, wanted at most {MAX_TAGS}")
    for name, value in tags.items():
        if not _TAG_NAME.fullmatch(name) or not _TAG_VALUE.fullmatch(value):
            raise ValueError(
                f"tag {name!r} is {value!r}; wanted a name of 1..128 and a value of 0..256 letters,"
                " digits, spaces and +-=._:/@"
            )
    characters = sum(len(name) + len(value) for name, value in tags.items())
    if characters > _MAX_TAG_CHARACTERS:
        raise ValueError(f"tags have {characters} characters, wanted {_MAX_TAG_CHARACTERS} at most")
