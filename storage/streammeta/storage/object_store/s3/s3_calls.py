"""Calls of an S3 server: retries, deadlines, measurement, and translation of errors.

Botocore's own retries are off, because it neither retries an interrupted body nor treats every 429
as throttling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from streammeta.storage import errors
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
