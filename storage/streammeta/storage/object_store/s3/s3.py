"""S3 object store, through botocore.

Owns the requests. `s3_calls` retries them, and `s3_client` translates errors.
"""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from streammeta.storage import errors
from streammeta.storage.object_store.protocol import calls as store_calls
from streammeta.storage.object_store.protocol.address import Checksum
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
from streammeta.storage.object_store.s3 import s3_calls, s3_client
from streammeta.storage.object_store.s3.listing_page import ListingPage, invalid_page, to_ms
from streammeta.storage.object_store.s3.s3_calls import S3Calls

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import (
        CompletedPartTypeDef,
        DeleteObjectsOutputTypeDef,
        ErrorTypeDef,
        HeadObjectOutputTypeDef,
    )

T = TypeVar("T")

DELETE_BATCH = 1000
_PUT_ID = "put-id"


class S3ObjectStore(S3Calls):
    """An `ObjectStore` in a bucket. It opens no connection before the first call."""

    def check(self) -> None:
        """See `ObjectStore.check`. Unlike HEAD, a listing returns the reason of a rejection."""
        self._call("check", lambda: self._client.list_objects_v2(Bucket=self._bucket, MaxKeys=1))

    def until(self, deadline: float) -> S3ObjectStore:
        """See `ObjectStore.until`.

        A request that is still unanswered then keeps its connection and its body for up to
        `RetryPolicy.silence_s`. Do not change the body before.
        """
        view = copy.copy(self)
        view._deadline = store_calls.earlier(self._deadline, deadline)
        return view

    def metrics(self) -> store_calls.StoreMetrics:
        """See `ObjectStore.metrics`."""
        return self._meter.snapshot(self._retrier.concurrency_limit)

    def put(
        self, key: str, data: Body, *, if_absent: bool = False, tags: Tags | None = None
    ) -> None:
        """See `ObjectStore.put`.

        A conditional put whose response was lost is retried, and may then find the object that it
        created itself. An id in the object's user metadata identifies it.
        """
        check_key(key)
        body = s3_client.as_view(data)
        options = {**self._checksum.of(body), **s3_client.tagging(tags)}
        put_id = uuid.uuid4().hex
        if if_absent:
            options |= {"IfNoneMatch": "*", "Metadata": {_PUT_ID: put_id}}

        def put() -> None:
            self._client.put_object(
                Bucket=self._bucket, Key=key, Body=s3_client.sendable(body), **options
            )

        request = self._once(put, key, put_id) if if_absent else put
        self._call("put", request, key=key, sent=len(body))

    def get_range(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """See `ObjectStore.get_range`."""
        check_key(key)
        check_range(start, end)
        whole = (start, end) == (0, None)
        last = "" if end is None else end - 1
        # A range of an empty object is an error, reading the whole object is not.
        options: Any = {} if whole else {"Range": f"bytes={start}-{last}"}
        if whole and self._checksum.is_stored:
            options["ChecksumMode"] = "ENABLED"

        def read() -> bytes:
            answer = self._client.get_object(Bucket=self._bucket, Key=key, **options)
            with closing(answer["Body"]) as stream:
                body = stream.read()
            if whole:
                s3_client.check_whole(key, answer, body, self._checksum)
            else:
                s3_client.check_part(key, answer, len(body), start, end)
            return body

        return self._call("get_range", read, key=key, start=start)

    def read_into(self, key: str, start: int, into: Sequence[memoryview]) -> int:
        """See `ObjectStore.read_into`."""
        check_key(key)
        end = start + Scatter(into).room
        check_range(start, end)

        def read() -> int:
            answer = self._client.get_object(
                Bucket=self._bucket, Key=key, Range=f"bytes={start}-{end - 1}"
            )
            with closing(answer["Body"]) as stream:
                received = Scatter(into).fill_from(stream)
            s3_client.check_part(key, answer, received, start, end)
            return received

        return self._call("get_range", read, key=key, start=start)

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`. A missing bucket looks like a missing object here."""
        check_key(key)
        found = self._call(
            "head", lambda: self._client.head_object(Bucket=self._bucket, Key=key), key=key
        )
        return ObjectInfo(
            key, found["ContentLength"], to_ms(found["LastModified"]), found["ETag"].strip('"')
        )

    def list_objects(
        self, prefix: str = "", start_after: str | None = None
    ) -> Iterator[ObjectInfo]:
        """See `ObjectStore.list_objects`. A page has 1000 keys."""
        first = {} if start_after is None else {"StartAfter": start_after}
        return self._list_pages(
            "list_objects",
            lambda page: self._client.list_objects_v2(Bucket=self._bucket, Prefix=prefix, **page),
            first,
        )

    def _list_pages(
        self, operation: str, request: Callable[[Any], Any], options: Mapping[str, str]
    ) -> Iterator[Any]:
        """Yield the entries of all pages. `options` are the parameters of the first page."""
        while True:
            page: ListingPage[Any] = self._call(operation, partial(request, options))[
                s3_client.LISTING_PAGE
            ]
            yield from page.entries
            if page.next_options is None:
                return
            if page.next_options == options:
                raise invalid_page("it names itself as the next page")
            options = page.next_options

    def copy(self, source_key: str, target_key: str, source: ObjectInfo | None = None) -> None:
        """See `ObjectStore.copy`. The bucket copies user metadata and headers too.

        An object that is too large for one request, or that this server rejects, is copied by
        parts.
        """
        check_key(source_key)
        check_key(target_key)
        found = source or self.head(source_key)
        if found.size <= s3_calls.COPIED_AT_ONCE:
            try:
                self._copy_whole(found, source_key, target_key)
            except errors.StoreRejectedError:
                if not found.size:
                    raise
            else:
                return
        s3_calls.copy_by_parts(self, found, source_key, target_key, s3_calls.COPIED_AT_ONCE)

    def _copy_whole(self, found: ObjectInfo, source_key: str, target_key: str) -> None:
        source = self._copied_from(source_key, found.etag)
        self._call(
            "copy",
            lambda: self._client.copy_object(Bucket=self._bucket, Key=target_key, **source),
            key=source_key,
            is_copy=True,
        )

    def fields_to_keep(self, key: str) -> tuple[dict[str, Any], dict[str, str]]:
        """See `PartCopies.fields_to_keep`. A server that rejects the request for tags has none."""
        described: Any = self._call(
            "head", lambda: self._client.head_object(Bucket=self._bucket, Key=key), key=key
        )
        try:
            tags = self._call("get_tags", lambda: self._tags_of(key), key=key)
        except errors.StoreRejectedError:
            tags = {}
        return s3_calls.kept_fields(described), tags

    def _copied_from(self, key: str, etag: str = "") -> Any:
        """Return the request fields that name the source of a copy and its etag."""
        source: Any = {"CopySource": {"Bucket": self._bucket, "Key": key}}
        return source | ({"CopySourceIfMatch": f'"{etag}"'} if etag else {})

    def add_tags(self, key: str, tags: Tags) -> None:
        """See `ObjectStore.add_tags`. S3 only replaces all tags at once, so they are read first.

        Existing tags are not written again: Ceph would update the time of the object, which the
        bucket's rules depend on.
        """
        check_key(key)

        def add() -> None:
            found = self._tags_of(key)
            wanted = found | dict(tags)
            if wanted == found:
                return

            check_tags(wanted)
            tag_set: Any = [{"Key": name, "Value": value} for name, value in wanted.items()]
            self._digested(
                lambda: self._client.put_object_tagging(
                    Bucket=self._bucket, Key=key, Tagging={"TagSet": tag_set}
                ),
                key,
            )

        self._call("add_tags", add, key=key)

    def _tags_of(self, key: str) -> dict[str, str]:
        ask = partial(self._client.get_object_tagging, Bucket=self._bucket, Key=key)
        return s3_calls.read_tag_set(ask, key)

    def delete_many(self, keys: Iterable[str]) -> DeleteResult:
        """See `ObjectStore.delete_many`."""
        wanted = list(keys)
        for key in wanted:
            check_key(key)

        failed: dict[str, str] = {}
        throttled: set[str] = set()
        denied: set[str] = set()
        remaining = iter(wanted)

        while batch := list(islice(remaining, DELETE_BATCH)):
            for error in self._delete_batch(batch):
                key, code = error["Key"], error.get("Code", "")
                failed[key] = f"{code}: {error.get('Message', '')}"
                if code == "AccessDenied":
                    failed[key] += f"; {s3_client.required_right('DeleteObjects')}"
                    denied.add(key)
                if code in s3_client.THROTTLED_CODES:
                    throttled.add(key)

        deleted = tuple(key for key in wanted if key not in failed)
        return DeleteResult(deleted, failed, frozenset(throttled), frozenset(denied))

    def start_multipart(self, key: str, *, tags: Tags | None = None) -> MultipartUpload:
        """See `ObjectStore.start_multipart`.

        The response has no start time, so it comes from this machine's clock.
        """
        check_key(key)
        return self.start_upload(key, {}, tags or {})

    def start_upload(self, key: str, fields: Mapping[str, Any], tags: Tags) -> MultipartUpload:
        """See `PartCopies.start_upload`."""
        options = {**fields, **s3_client.tagging(tags)}
        if self._checksum.is_stored:
            options["ChecksumAlgorithm"] = self._checksum.algorithm
        answer = self._call(
            "start_multipart",
            lambda: self._client.create_multipart_upload(Bucket=self._bucket, Key=key, **options),
            key=key,
        )
        return MultipartUpload(key, answer["UploadId"], time.time_ns() // 1_000_000)

    def upload_part(self, upload: MultipartUpload, number: int, data: Body) -> UploadedPart:
        """See `ObjectStore.upload_part`."""
        check_part_number(number)
        body = s3_client.as_view(data)
        digest = self._checksum.of(body)
        target = self._target(upload)
        answer = self._call(
            "upload_part",
            lambda: self._client.upload_part(
                **target, PartNumber=number, Body=s3_client.sendable(body), **digest
            ),
            key=upload.key,
            upload_id=upload.upload_id,
            sent=len(body),
        )
        checksum = digest[self._checksum.member] if self._checksum.is_stored else ""
        return UploadedPart(number, answer["ETag"], len(body), checksum)

    def copy_part(
        self, upload: MultipartUpload, number: int, source_key: str, start: int, end: int
    ) -> UploadedPart:
        """See `ObjectStore.copy_part`."""
        check_part_number(number)
        check_key(source_key)
        check_range(start, end)
        return self.copy_range(upload, number, source_key, start, end, etag="")

    def copy_range(
        self,
        upload: MultipartUpload,
        number: int,
        source_key: str,
        start: int,
        end: int,
        *,
        etag: str,
    ) -> UploadedPart:
        """See `PartCopies.copy_range`."""
        request = self._target(upload) | self._copied_from(source_key, etag)
        answer = self._call(
            "copy_part",
            lambda: self._client.upload_part_copy(
                **request, PartNumber=number, CopySourceRange=f"bytes={start}-{end - 1}"
            ),
            key=source_key,
            start=start,
            upload_id=upload.upload_id,
            is_copy=True,
        )
        copied = answer["CopyPartResult"]
        return UploadedPart(number, copied["ETag"], end - start, self._checksum.stored_in(copied))

    def complete_multipart(self, upload: MultipartUpload, parts: Sequence[UploadedPart]) -> None:
        """See `ObjectStore.complete_multipart`.

        A retry may find no upload because the first request completed it. An object of the right
        size and number of parts under the key proves that.
        """
        check_parts(parts)
        named = [self._named(part) for part in parts]
        target = self._target(upload)

        def complete() -> None:
            try:
                self._translated(
                    lambda: self._client.complete_multipart_upload(
                        **target, MultipartUpload={"Parts": named}
                    ),
                    key=upload.key,
                    upload_id=upload.upload_id,
                )
            except errors.UploadNotFoundError:
                if not self._is_made_of(upload.key, parts):
                    raise

        self._call("complete_multipart", complete, key=upload.key)

    def abort_multipart(self, upload: MultipartUpload) -> None:
        """See `ObjectStore.abort_multipart`."""
        view = copy.copy(self)
        # Parts of an unfinished upload cost money until someone aborts it.
        view._deadline = store_calls.with_clean_up(self._deadline)
        target = self._target(upload)

        def abort() -> None:
            with suppress(errors.UploadNotFoundError):
                self._translated(
                    lambda: self._client.abort_multipart_upload(**target),
                    key=upload.key,
                    upload_id=upload.upload_id,
                )

        view._call("abort_multipart", abort, key=upload.key)

    def list_multipart_uploads(self, prefix: str = "") -> Iterator[MultipartUpload]:
        """See `ObjectStore.list_multipart_uploads`."""
        return self._list_pages(
            "list_multipart_uploads",
            lambda page: self._client.list_multipart_uploads(
                Bucket=self._bucket,
                Prefix=prefix,
                EncodingType="url",  # botocore sets it only in other listings
                **page,
            ),
            {},
        )

    def list_old_versions(self) -> Iterator[OldVersion]:
        """See `ObjectStore.list_old_versions`. Current versions are listed too, and dropped."""
        return self._list_pages(
            "list_old_versions",
            lambda page: self._client.list_object_versions(Bucket=self._bucket, **page),
            {},
        )

    def enforces_checksum(self, key: str, checksum: Checksum) -> bool:
        """Return whether the server accepts bytes with their `checksum`, and rejects other bytes.

        Puts a few bytes under `key`. The caller has to delete it.
        """
        check_key(key)
        # A server that accepts the second put, other bytes of the same digest, verifies nothing.
        body = b"checked by the server, or not"
        return self._accepts(key, body, checksum.of(body)) and not self._accepts(
            key, body[1:], checksum.of(body)
        )

    def _accepts(self, key: str, body: bytes, digest: dict[str, Any]) -> bool:
        try:
            self._call(
                "put",
                lambda: self._client.put_object(Bucket=self._bucket, Key=key, Body=body, **digest),
                key=key,
            )
        except errors.StoreRejectedError:
            return False
        return True

    def close(self) -> None:
        """See `ObjectStore.close`."""
        self._connection.client.close()

    def _once(self, put: Callable[[], None], key: str, put_id: str) -> Callable[[], None]:
        """Return a conditional put that recognizes its own object after a lost response."""
        # Without an attempt that lost its response, an existing object is somebody else's.
        may_be_ours = False

        def attempt() -> None:
            nonlocal may_be_ours
            try:
                self._translated(put, key=key)
            except errors.StoreUnavailableError:
                may_be_ours = True
                raise
            except errors.ObjectExistsError:
                if not (may_be_ours and self._was_put_as(key, put_id)):
                    raise

        return attempt

    def _was_put_as(self, key: str, put_id: str) -> bool:
        try:
            found = self._head_once(key)
        except errors.ObjectNotFoundError as error:
            raise errors.StoreUnavailableError(
                f"object {key!r} was deleted after the put found it. Retry"
            ) from error
        return found["Metadata"].get(_PUT_ID) == put_id

    def _is_made_of(self, key: str, parts: Sequence[UploadedPart]) -> bool:
        try:
            found = self._head_once(key)
        except errors.ObjectNotFoundError:
            return False
        _, dash, count = found["ETag"].strip('"').rpartition("-")
        of_as_many = not (dash and count.isdecimal()) or int(count) == len(parts)
        return of_as_many and found["ContentLength"] == sum(part.size for part in parts)

    def _head_once(self, key: str) -> HeadObjectOutputTypeDef:
        """Describe an object inside another call, which retries both."""
        return self._translated(
            lambda: self._client.head_object(Bucket=self._bucket, Key=key), key=key
        )

    def _target(self, upload: MultipartUpload) -> Any:
        """Return the request fields that name an upload."""
        return {"Bucket": self._bucket, "Key": upload.key, "UploadId": upload.upload_id}

    def _named(self, part: UploadedPart) -> CompletedPartTypeDef:
        named: Any = {"PartNumber": part.number, "ETag": part.etag}
        if part.checksum:
            named[self._checksum.member] = part.checksum
        completed: CompletedPartTypeDef = named
        return completed

    def _delete_batch(self, batch: list[str]) -> list[ErrorTypeDef]:
        def delete() -> DeleteObjectsOutputTypeDef:
            return self._client.delete_objects(
                Bucket=self._bucket,
                Delete={"Objects": [{"Key": key} for key in batch], "Quiet": True},
            )

        answer = self._call("delete_many", lambda: self._digested(delete))
        return [error for error in answer.get("Errors", []) if error.get("Code") != "NoSuchKey"]
