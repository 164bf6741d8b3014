"""Blobs as objects of a bucket under their own names, where the peer's offloader finds them.

For copies that a Pulsar broker reads or has written. The bucket belongs to no cluster, and no
metadata describes its objects: only a list of ledgers identifies live objects. Needs the
extra `s3`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from streammeta.brokers.pulsar.blobs.blobs import BlobError, NoSuchBlobError
from streammeta.client.parts import run_blocking
from streammeta.storage import errors as storage_errors
from streammeta.storage.object_store.protocol.address import S3Config
from streammeta.storage.object_store.protocol.retry import Retrier, RetryPolicy
from streammeta.storage.object_store.s3.s3 import S3ObjectStore
from streammeta.storage.object_store.s3.s3_client import open_client, translate

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef

T = TypeVar("T")


class BucketBlobs:
    """All objects of one bucket. `close` it after the last upload."""

    def __init__(self, config: S3Config, retry: RetryPolicy | None = None) -> None:
        policy = retry or RetryPolicy()
        self.bucket = config.bucket
        self.client = open_client(config, policy)
        # Reads, deletions and listings share the product's own S3 code.
        self._store = S3ObjectStore(config, policy)
        self._endpoint = config.endpoint_url or "Amazon S3"
        self._retrier = Retrier(policy)

    @classmethod
    def of(cls, address: str) -> BucketBlobs:
        """Open the bucket of an address, `s3://bucket?options`. Raise as `S3Config.from_uri`."""
        return cls(S3Config.from_uri(address))

    def close(self) -> None:
        """Close connections."""
        self.client.close()
        self._store.close()

    async def call(self, name: str, request: Callable[[], T]) -> T:
        """Send a request about an object in a thread, retrying while the bucket is unavailable.

        Raises `NoSuchBlobError`, and `BlobError` for all other failures.
        """

        # botocore's errors become storage errors, which the retrier knows.
        def send() -> T:
            try:
                return request()
            except (ClientError, BotoCoreError) as error:
                raise translate(
                    error, bucket=self.bucket, endpoint=self._endpoint, key=name
                ) from error

        try:
            return await run_blocking(self._retrier.call, send)
        except storage_errors.ObjectNotFoundError as error:
            raise NoSuchBlobError(name) from error
        except storage_errors.StorageError as error:
            raise BlobError(str(error)) from error

    async def begin(self, name: str, metadata: Mapping[str, str]) -> BucketUpload:
        """Begin an upload in parts of at least 5 MiB, except the last one."""
        answer = await self.call(
            name,
            lambda: self.client.create_multipart_upload(
                Bucket=self.bucket, Key=name, Metadata=dict(metadata)
            ),
        )
        return BucketUpload(self, name, answer["UploadId"])

    async def put(self, name: str, data: bytes, metadata: Mapping[str, str]) -> None:
        """Store an object."""
        await self.call(
            name,
            lambda: self.client.put_object(
                Bucket=self.bucket, Key=name, Body=data, Metadata=dict(metadata)
            ),
        )

    async def read(self, name: str, start: int, length: int) -> bytes:
        """Return bytes of an object, fewer at its end."""
        try:
            return await run_blocking(self._store.get_range, name, start, start + length)
        # A read from the end on. The interface promises fewer bytes, not an error.
        except storage_errors.RangeNotSatisfiableError:
            return b""
        except storage_errors.ObjectNotFoundError as error:
            raise NoSuchBlobError(name) from error
        except storage_errors.StorageError as error:
            raise BlobError(str(error)) from error

    async def metadata(self, name: str) -> Mapping[str, str]:
        """Return the user metadata of an object. Servers return its keys in lower case."""
        answer = await self.call(
            name, lambda: self.client.head_object(Bucket=self.bucket, Key=name)
        )
        return answer["Metadata"]

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects."""
        try:
            result = await run_blocking(self._store.delete_many, names)
        except storage_errors.StorageError as error:
            raise BlobError(str(error)) from error

        if result.failed:
            name, reason = next(iter(result.failed.items()))
            raise BlobError(f"object {name!r} was not deleted, delete it again: {reason}")

    async def names(self) -> list[str]:
        """List all objects of the bucket."""
        try:
            return await run_blocking(
                lambda: [object_.key for object_ in self._store.list_objects()]
            )
        except storage_errors.StorageError as error:
            raise BlobError(str(error)) from error


class BucketUpload:
    """An upload in parts."""

    def __init__(self, blobs: BucketBlobs, name: str, upload_id: str) -> None:
        self._blobs = blobs
        self._name = name
        self._upload_id = upload_id
        self._etags: dict[int, str] = {}

    async def part(self, number: int, data: bytes) -> None:
        """Upload a part."""
        blobs = self._blobs
        answer = await blobs.call(
            self._name,
            lambda: blobs.client.upload_part(
                Bucket=blobs.bucket,
                Key=self._name,
                UploadId=self._upload_id,
                PartNumber=number,
                Body=data,
            ),
        )
        self._etags[number] = answer["ETag"]

    async def complete(self) -> None:
        """Create the object from its parts."""
        blobs = self._blobs
        parts: list[CompletedPartTypeDef] = [
            {"PartNumber": number, "ETag": etag} for number, etag in sorted(self._etags.items())
        ]
        await blobs.call(
            self._name,
            lambda: blobs.client.complete_multipart_upload(
                Bucket=blobs.bucket,
                Key=self._name,
                UploadId=self._upload_id,
                MultipartUpload={"Parts": parts},
            ),
        )

    async def abort(self) -> None:
        """Drop the upload. A missing one counts as dropped."""
        blobs = self._blobs
        try:
            await blobs.call(
                self._name,
                lambda: blobs.client.abort_multipart_upload(
                    Bucket=blobs.bucket, Key=self._name, UploadId=self._upload_id
                ),
            )
        except BlobError as error:
            # An earlier attempt may have dropped it.
            if not _is_gone(error):
                raise


def _is_gone(error: BlobError) -> bool:
    # `call` chains the storage error.
    return isinstance(error.__cause__, storage_errors.UploadNotFoundError)
