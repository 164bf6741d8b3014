"""Calls of an S3 server: retries, deadlines, measurement, translation of errors, and copies.

Botocore's own retries are off, because it neither retries an interrupted body nor treats every 429
as throttling.

A single request copies at most 5 GiB and sends no response until it is done. A copy by parts has no
such limit, and each request ends in time, but the caller has to pass all fields of the new object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from streammeta.storage import errors
from streammeta.storage.errors import ObjectChangedError, StorageError, StoreRejectedError
from streammeta.storage.object_store.protocol import base as protocol
from streammeta.storage.object_store.protocol.address import S3Config
from streammeta.storage.object_store.protocol.calls import Meter, received_bytes
from streammeta.storage.object_store.protocol.retry import Retrier, RetryPolicy
from streammeta.storage.object_store.s3.s3_client import S3Connection, translate

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


T = TypeVar("T")


class S3Calls:
    """A connection to a bucket, and the way of every request to it."""

    def __init__(self, config: S3Config, retry: RetryPolicy | None = None) -> None:
        policy = retry or RetryPolicy()
        self._bucket = config.bucket
        self._endpoint = config.endpoint_url or "Amazon S3"
        self._checksum = config.checksum
        self._retrier = Retrier(policy)
        self._meter = Meter()
        self._deadline: float | None = None
        self._connection = S3Connection(config, policy)

    @property
    def _client(self) -> S3Client:
        return self._connection.client

    def _call(
        self,
        operation: str,
        request: Callable[[], T],
        *,
        key: str = "",
        start: int = 0,
        upload_id: str = "",
        sent: int = 0,
        is_copy: bool = False,
    ) -> T:
        def translated() -> T:
            try:
                return self._translated(request, key=key, start=start, upload_id=upload_id)
            except errors.ObjectExistsError:
                if is_copy:  # a copy's only condition is the etag of its source
                    raise errors.ObjectChangedError(key) from None
                raise

        with self._meter.call(operation, self._deadline) as tally:
            result = self._retrier.call(translated, deadline=self._deadline, tally=tally)
            tally.bytes_sent = sent
            tally.bytes_received = received_bytes(result)
        return result

    def _translated(
        self, request: Callable[[], T], *, key: str, start: int = 0, upload_id: str = ""
    ) -> T:
        try:
            return request()
        except (ClientError, BotoCoreError) as error:
            failure = translate(
                error,
                bucket=self._bucket,
                endpoint=self._endpoint,
                key=key,
                start=start,
                upload_id=upload_id,
            )
            if isinstance(failure, errors.AccessDeniedError):
                self._connection.renew()
            raise failure from error

    def _digested(self, request: Callable[[], T], key: str = "") -> T:
        """Send a request with a digest of its body, with Content-MD5 if the server rejects CRC32.

        Older servers know only MD5. Once a server accepted it, later requests start with it.
        """
        digests = self._connection.digests
        was_md5 = digests.are_md5  # other threads may switch it during this request
        try:
            return self._translated(request, key=key)
        except errors.StoreRejectedError:
            if was_md5:
                raise
            digests.are_md5 = True
        try:
            return self._translated(request, key=key)
        except errors.StoreRejectedError:
            digests.are_md5 = False
            raise


# Even at 20 MB/s a copy of this size ends within the default silence of a call.
COPIED_AT_ONCE = 512 << 20
"""Maximum bytes of an object, or of a part of a larger one, that one request copies."""

_KEPT_FIELDS = (
    "CacheControl",
    "ContentDisposition",
    "ContentEncoding",
    "ContentLanguage",
    "ContentType",
    "Expires",
    "Metadata",
)


def part_ranges(size: int, part_size: int) -> Iterator[tuple[int, int]]:
    """Yield half-open ranges of an object's parts, larger than `part_size` if too many."""
    # S3 limits the number of parts, so parts of a very large object have to grow.
    step = max(part_size, -(-size // protocol.MAX_PARTS))
    for start in range(0, size, step):
        yield start, min(start + step, size)


def kept_fields(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an object that a copy in a single request would keep."""
    return {name: described[name] for name in _KEPT_FIELDS if described.get(name)}


_NO_TAGS = ("NoSuchTagSet", "NoSuchTagSetError")
"""Error codes of servers that return an error for an object without tags."""


class PartCopies(protocol.ObjectStore, Protocol):
    """A store that copies ranges of an object, such as `S3ObjectStore`."""

    def fields_to_keep(self, key: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the fields and tags of an object that a copy by parts has to set."""
        ...

    def start_upload(
        self, key: str, fields: Mapping[str, Any], tags: protocol.Tags
    ) -> protocol.MultipartUpload:
        """Start an upload of an object with these fields."""
        ...

    def copy_range(
        self,
        upload: protocol.MultipartUpload,
        number: int,
        source_key: str,
        start: int,
        end: int,
        *,
        etag: str,
    ) -> protocol.UploadedPart:
        """See `copy_part`. Raises `ObjectChangedError` unless the source has this etag."""
        ...


def copy_by_parts(
    store: PartCopies, source: protocol.ObjectInfo, source_key: str, target_key: str, part_size: int
) -> None:
    """Copy an object by ranges, all from the object with the source's etag.

    A failure leaves no target, and no upload unless its abort fails too. A success also aborts
    uploads that killed copies to the same target left.

    Raises:
        ObjectChangedError: the key names another object.
        StoreRejectedError: the server did not copy the requested ranges.
    """
    fields, tags = store.fields_to_keep(source_key)
    upload = store.start_upload(target_key, fields, tags)
    try:
        parts = [
            store.copy_range(upload, number, source_key, *range_, etag=source.etag)
            for number, range_ in enumerate(part_ranges(source.size, part_size), start=1)
        ]
        # Some servers ignore the condition of a copy: parts of two objects would make a third.
        if store.head(source_key).etag != source.etag:
            raise ObjectChangedError(source_key)
        store.complete_multipart(upload, parts)
    # Also on KeyboardInterrupt: parts of an unfinished upload would stay and cost money.
    except BaseException:
        with suppress(StorageError):
            store.abort_multipart(upload)
        raise

    # Some servers ignore the range of a part copy and copy the whole source each time.
    if store.head(target_key).size != source.size:
        raise StoreRejectedError(
            f"copy {target_key!r} and source {source_key!r} differ in size. Delete the copy and use"
            " another server, this one does not copy ranges correctly"
        )
    if tags:
        store.add_tags(target_key, tags)  # some servers drop the tags of an upload in parts
    with suppress(StorageError):
        for other in list(store.list_multipart_uploads(target_key)):
            # The listing is by prefix and may contain uploads to longer keys.
            if other.key == target_key:
                store.abort_multipart(other)


def read_tag_set(ask: Callable[[], Mapping[str, Any]], key: str) -> dict[str, str]:
    """Return the tags in the response to GetObjectTagging, which `ask` sends.

    Some servers return 404 for an object without tags, although the object exists.

    Raises:
        StoreRejectedError: the response has no tag set. A server that ignores `?tagging` returns
            the object, and would replace its content on PutObjectTagging.
        ClientError, BotoCoreError: raised by `ask`.
    """
    try:
        answer = ask()
    except ClientError as error:
        if error.response.get("Error", {}).get("Code") not in _NO_TAGS:
            raise
        return {}
    if "TagSet" not in answer:
        raise StoreRejectedError(
            f"server answers GetObjectTagging of {key!r} without a TagSet, so it does not support"
            " tags. Use a store with tags, or delete or quarantine objects instead"
        )
    return {tag["Key"]: tag["Value"] for tag in answer["TagSet"]}
