"""Blobs as objects of a bucket under their own names, where the peer's offloader finds them.

For copies that a Pulsar broker is to read, or has written. The bucket is no cluster's: what lies in
it has no row in a map, so a list of ledgers is all that tells live from left over. Needs the extra
`s3`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from streammeta.brokers.pulsar.blobs.blobs import BlobError, NoSuchBlobError
from streammeta.client.resources.daemon_threads import run_blocking
from streammeta.storage.errors import (
    ObjectNotFoundError,
    RangeNotSatisfiableError,
    StorageError,
    UploadNotFoundError,
)
from streammeta.storage.object_store.protocol.address import S3Config
from streammeta.storage.object_store.protocol.retry import Retrier, RetryPolicy
from streammeta.storage.object_store.s3.s3 import S3ObjectStore
from streammeta.storage.object_store.s3.s3_client import open_client, translate

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef

T = TypeVar("T")


class BucketBlobs:
    """All objects of one bucket. `close` it when its uploads are done."""

    def __init__(self, config: S3Config, retry: RetryPolicy | None = None) -> None:
        policy = retry or RetryPolicy()
        self.bucket = config.bucket
        self.client = open_client(config, policy)
        self._store = S3ObjectStore(config, policy)
        self._endpoint = config.endpoint_url or "Amazon S3"
        self._retrier = Retrier(policy)

    @classmethod
    def of(cls, address: str) -> BucketBlobs:
        """Open the bucket of an address, `s3://bucket?options`; raise as `S3Config.from_uri`."""
        return cls(S3Config.from_uri(address))

    def close(self) -> None:
        """Close connections."""
        self.client.close()
        self._store.close()

    async def call(self, name: str, request: Callable[[], T]) -> T:
        """Make a request about an object in a thread, again while the bucket can't serve.

        Raises `NoSuchBlobError`, and `BlobError` for all other failures.
        """

        def translated() -> T:
            try:
                return request()
            except (ClientError, BotoCoreError) as error:
                raise translate(
                    error, bucket=self.bucket, endpoint=self._endpoint, key=name
                ) from error

        try:
            return await run_blocking(self._retrier.call, translated)
        except ObjectNotFoundError as error:
            raise NoSuchBlobError(name) from error
        except StorageError as error:
            raise BlobError(str(error)) from error

    async def begin(self, name: str, metadata: Mapping[str, str]) -> BucketUpload:
        """Begin an upload in parts; all but the last have 5 MiB or more."""
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
        except RangeNotSatisfiableError:
            return b""
        except ObjectNotFoundError as error:
            raise NoSuchBlobError(name) from error
        except StorageError as error:
            raise BlobError(str(error)) from error

    async def metadata(self, name: str) -> Mapping[str, str]:
        """Return the user metadata of an object; servers give its keys in lower case."""
        answer = await self.call(
            name, lambda: self.client.head_object(Bucket=self.bucket, Key=name)
        )
        return answer["Metadata"]

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects."""
        try:
            result = await run_blocking(self._store.delete_many, names)
        except StorageError as error:
            raise BlobError(str(error)) from error
        if result.failed:
            name, reason = next(iter(result.failed.items()))
            raise BlobError(f"object {name!r} is not deleted: {reason}")

    async def names(self) -> list[str]:
        """List all objects of the bucket."""
        try:
            return await run_blocking(lambda: [one.key for one in self._store.list_objects()])
        except StorageError as error:
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
        """Make the object of its parts."""
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
        """Drop the upload; one that is gone counts as dropped."""
        blobs = self._blobs
        try:
            await blobs.call(
                self._name,
                lambda: blobs.client.abort_multipart_upload(
                    Bucket=blobs.bucket, Key=self._name, UploadId=self._upload_id
                ),
            )
        except BlobError as error:
            if not _is_gone(error):
                raise


def _is_gone(error: BlobError) -> bool:
    return isinstance(error.__cause__, UploadNotFoundError)
