"""Protocol of object stores, and the rules that all stores follow.

All calls block, so an event loop calls them in a thread. Any number of threads may share a store.
Every failure is an error of `storage.errors`. Any call may raise `BucketNotFoundError`,
`AccessDeniedError` and `StoreUnavailableError`; the methods below do not repeat them. A key is a
non-empty string of at most 1024 bytes in UTF-8, otherwise `InvalidKeyError` is raised. Tags are
short labels for the bucket's expiry, cost and access rules. The product never reads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from streammeta.storage.errors import InvalidKeyError
from streammeta.storage.object_store.protocol.calls import StoreMetrics

# Limits of S3. All stores enforce them, so that tests with a directory find violations.
MIN_PART_SIZE = 5 * 1024 * 1024
MAX_PART_SIZE = 5 * 1024 * 1024 * 1024
MAX_PARTS = 10_000
MAX_KEY_BYTES = 1024
MAX_TAGS = 10

Body: TypeAlias = bytes | bytearray | memoryview
Tags: TypeAlias = Mapping[str, str]

# The characters that S3 allows in all regions.
_TAG_NAME = re.compile(r"[A-Za-z0-9 +\-=._:/@]{1,128}")
_TAG_VALUE = re.compile(r"[A-Za-z0-9 +\-=._:/@]{0,256}")
# S3 limits the header x-amz-tagging to 2 KB.
_MAX_TAG_CHARACTERS = 2048


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Description of an object: size in bytes, modification time in ms since 1970, opaque etag."""

    key: str
    size: int
    last_modified_ms: int
    etag: str


@dataclass(frozen=True, slots=True)
class DeleteResult:
    """Result of a deletion: the keys now absent, and the reason for each remaining key.

    `deleted` includes keys that never existed. `throttled` and `denied` are subsets of the keys of
    `failed`: the store asked for fewer requests, or the caller has no right to delete the object
    (or the object is locked).
    """

    deleted: tuple[str, ...]
    failed: dict[str, str]
    throttled: frozenset[str] = frozenset()
    denied: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class MultipartUpload:
    """An unfinished multipart upload. `started_ms` is in ms since 1970."""

    key: str
    upload_id: str
    started_ms: int


@dataclass(frozen=True, slots=True)
class OldVersion:
    """A noncurrent version of an object in a versioned bucket: replaced or deleted bytes.

    A delete marker (`is_delete_marker`), current or not, has no bytes.
    """

    key: str
    version_id: str
    size: int
    last_modified_ms: int
    is_delete_marker: bool


@dataclass(frozen=True, slots=True)
class UploadedPart:
    """A part of an upload: its number (1..10000), opaque etag and size in bytes.

    Completing the upload sends `checksum` again. It is empty if the store needs none.
    """

    number: int
    etag: str
    size: int
    checksum: str = ""


class ObjectStore(Protocol):
    """Immutable byte strings under keys. The module's docstring has the rules for all calls."""

    def check(self) -> None:
        """Check with one request that the bucket exists and the credentials work."""
        ...

    def until(self, deadline: float) -> ObjectStore:
        """Return a view of this store whose calls end by `deadline`, in `time.monotonic()` seconds.

        The deadline includes retries and waiting for a free slot. A call that misses it raises
        `DeadlineExceededError`, and its effect may still happen. A view of a view has the earlier
        of the two deadlines. Only `abort_multipart` always has at least `CLEAN_UP_S` seconds.
        """
        ...

    def metrics(self) -> StoreMetrics:
        """Return the call counters of this store and all its views."""
        ...

    def put(
        self, key: str, data: Body, *, if_absent: bool = False, tags: Tags | None = None
    ) -> None:
        """Store `data` under `key` durably and atomically, replacing an existing object.

        With `if_absent` the call never replaces an object: at most one of any number of callers
        succeeds, all others get `ObjectExistsError`. After `StoreUnavailableError` the object may
        exist. Raises `ValueError` on tags that break the rules of `check_tags`.
        """
        ...

    def get_range(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Read bytes `[start, end)`, to the end of the object when `end` is None.

        Returns fewer bytes if the object ends before `end`.

        Raises:
            ObjectNotFoundError: the object does not exist.
            RangeNotSatisfiableError: `start` is not inside the object. Reading all of an empty
                object (0 without an end) is allowed.
            ValueError: unless `0 <= start < end`.
        """
        ...

    def read_into(self, key: str, start: int, into: Sequence[memoryview]) -> int:
        """Read the object from byte `start` into the buffers `into`, in order, without a copy.

        Returns the number of bytes read. It is less than the size of the buffers only if the object
        ends first. Raises the errors of `get_range`. The content of the buffers is then undefined,
        and after `DeadlineExceededError` it may still change, so drop them.
        """
        ...

    def head(self, key: str) -> ObjectInfo:
        """Describe the object. Raises `ObjectNotFoundError`."""
        ...

    def list_objects(
        self, prefix: str = "", start_after: str | None = None
    ) -> Iterator[ObjectInfo]:
        """Describe all objects under `prefix` after `start_after`, in UTF-8 byte order of key.

        Iterating fetches pages, so it can raise the store's errors too.
        """
        ...

    def copy(self, source_key: str, target_key: str, source: ObjectInfo | None = None) -> None:
        """Copy an object with its bytes, tags and everything else that the store keeps.

        The target appears durably and atomically, replacing an existing object. It gets a new
        modification time and possibly a new etag. With `source`, raises `ObjectChangedError` if the
        key now names another object. Raises `ObjectNotFoundError` for the source.
        """
        ...

    def add_tags(self, key: str, tags: Tags) -> None:
        """Add tags to an object. A tag replaces an existing one of the same name.

        Bytes, time and etag stay. The call is not atomic: one of two concurrent updates may be
        lost. Raises `ObjectNotFoundError`, or `ValueError` if the resulting tags break the rules of
        `check_tags`.
        """
        ...

    def delete_many(self, keys: Iterable[str]) -> DeleteResult:
        """Delete objects, 1000 per request. An absent key counts as deleted.

        Raises the error of a failed request. Earlier batches stay deleted. Call again.
        """
        ...

    def start_multipart(self, key: str, *, tags: Tags | None = None) -> MultipartUpload:
        """Start a multipart upload. The object appears, with `tags`, on completion.

        Some S3-compatible servers drop these tags, although they keep the tags of `put`.
        """
        ...

    def upload_part(self, upload: MultipartUpload, number: int, data: Body) -> UploadedPart:
        """Upload part `number` (1..10000), replacing it. Raises `UploadNotFoundError`."""
        ...

    def copy_part(
        self, upload: MultipartUpload, number: int, source_key: str, start: int, end: int
    ) -> UploadedPart:
        """Copy bytes `[start, end)` of another object of this store into part `number`.

        Raises `ObjectNotFoundError` for the source. A range after its end raises
        `RangeNotSatisfiableError` or `StoreRejectedError`, depending on the server.
        """
        ...

    def complete_multipart(self, upload: MultipartUpload, parts: Sequence[UploadedPart]) -> None:
        """Create the object from `parts`, ascending by number, all but the last >= `MIN_PART_SIZE`.

        Pass every uploaded part: some servers drop the others, some reject the request. Raises
        `UploadNotFoundError`, or `ValueError` if the parts break these rules.
        """
        ...

    def abort_multipart(self, upload: MultipartUpload) -> None:
        """Abort the upload and drop its parts. An upload that no longer exists is not an error."""
        ...

    def list_multipart_uploads(self, prefix: str = "") -> Iterator[MultipartUpload]:
        """List unfinished uploads under `prefix`, by key."""
        ...

    def list_old_versions(self) -> Iterator[OldVersion]:
        """List noncurrent versions and delete markers. A store without versions has none.

        Entries are ordered by key, except that a page's markers follow its versions.
        """
        ...

    def close(self) -> None:
        """Close connections. The store must not be used afterwards."""
        ...


def check_key(key: str) -> None:
    """Raise `InvalidKeyError` on a key that no store accepts."""
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise InvalidKeyError(key, "it is not valid Unicode") from None
    if not 1 <= size <= MAX_KEY_BYTES:
        raise InvalidKeyError(key, f"it has {size} bytes, expected 1..{MAX_KEY_BYTES}")


def check_range(start: int, end: int | None) -> None:
    """Raise `ValueError` unless `0 <= start < end`."""
    if start < 0 or (end is not None and end <= start):
        raise ValueError(f"byte range is [{start}, {end}), expected 0 <= start < end")


def check_part_number(number: int) -> None:
    """Raise `ValueError` unless `number` is in 1..10000."""
    if not 1 <= number <= MAX_PARTS:
        raise ValueError(f"part number is {number}, expected 1..{MAX_PARTS}")


def check_parts(parts: Sequence[UploadedPart]) -> None:
    """Raise `ValueError` unless an upload of `parts` can be completed."""
    numbers = [part.number for part in parts]
    if not numbers or numbers != sorted(set(numbers)):
        raise ValueError(f"part numbers are {numbers}, expected at least one, ascending")

    # S3 checks this when it completes the upload, after all parts were sent.
    for part in parts[:-1]:
        if part.size < MIN_PART_SIZE:
            raise ValueError(
                f"part {part.number} has {part.size} bytes, expected {MIN_PART_SIZE} in all but the"
                " last"
            )


def check_tags(tags: Tags) -> None:
    """Raise `ValueError` unless every store accepts `tags` and keeps them unchanged.

    The limits are Amazon S3's for all of its services: at most 10 tags of 2048 characters in
    total, names of 1..128 and values of 0..256 ASCII letters, digits, spaces and `+-=._:/@`.
    """
    if len(tags) > MAX_TAGS:
        raise ValueError(f"there are {len(tags)} tags, expected at most {MAX_TAGS}")
    for name, value in tags.items():
        if not _TAG_NAME.fullmatch(name) or not _TAG_VALUE.fullmatch(value):
            raise ValueError(
                f"tag {name!r} is {value!r}, expected a name of 1..128 and a value of 0..256"
                " letters, digits, spaces and +-=._:/@"
            )
    characters = sum(len(name) + len(value) for name, value in tags.items())
    if characters > _MAX_TAG_CHARACTERS:
        raise ValueError(
            f"tags have {characters} characters, expected {_MAX_TAG_CHARACTERS} at most"
        )
