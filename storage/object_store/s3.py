"""Objects in an S3 bucket, through boto3.

Owns the requests and their retries; botocore's own retries are off, because it neither repeats a
body that broke off nor treats every 429 as one. What an error means is said in `s3_errors`. Uploads
carry Content-MD5, the one integrity check that every S3-compatible store enforces.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from storage.errors import ObjectNotFoundError, UploadNotFoundError
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
from storage.object_store.retry import Retrier, RetryPolicy
from storage.object_store.s3_errors import THROTTLED_CODES, translate

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import ErrorTypeDef, ObjectTypeDef

T = TypeVar("T")

DEFAULT_REGION = "us-east-1"
DELETE_BATCH = 1000
_ADDRESS_KEYS = frozenset({"endpoint", "region", "pathStyle", "accessKey", "secretKey"})


@dataclass(frozen=True, slots=True)
class S3Config:
    """Where the bucket is and how to reach it.

    Without `endpoint_url` it is Amazon's; without keys they come from the environment (the AWS_*
    variables and boto3's other sources). `path_style` puts the bucket in the path, not the host.
    """

    bucket: str
    endpoint_url: str | None = None
    region: str = DEFAULT_REGION
    access_key: str | None = None
    secret_key: str | None = field(default=None, repr=False)
    path_style: bool = False

    @classmethod
    def from_uri(cls, uri: str) -> S3Config:
        """Read `s3://bucket?endpoint=..&region=..&pathStyle=true&accessKey=..&secretKey=..`.

        All of the query may be left out; `pathStyle` is then true with an endpoint and false
        without. Raises `ValueError` naming the part that is wrong, never showing a key.
        """
        parts = urlsplit(uri)
        if parts.scheme != "s3" or not parts.netloc or parts.path not in ("", "/"):
            raise ValueError(
                f"S3 address is {uri.partition('?')[0]!r}, wanted s3://bucket without a path"
            )
        query = parse_qs(parts.query, keep_blank_values=True)
        values = {name: found[-1] for name, found in query.items()}
        for name, found in query.items():
            if name not in _ADDRESS_KEYS or len(found) != 1 or not found[0]:
                raise ValueError(
                    f"S3 address has the option {name!r} {len(found)} times or empty; wanted each"
                    f" of {', '.join(sorted(_ADDRESS_KEYS))} at most once, with a value"
                )
        if ("accessKey" in values) != ("secretKey" in values):
            raise ValueError("S3 address has one of accessKey and secretKey, wanted both or none")
        endpoint = values.get("endpoint")
        if endpoint is not None and urlsplit(endpoint).scheme not in ("http", "https"):
            raise ValueError(f"S3 endpoint is {endpoint!r}, wanted http://host:port or https://")
        path_style = values.get("pathStyle", "true" if endpoint else "false")
        if path_style not in ("true", "false"):
            raise ValueError(f"S3 pathStyle is {path_style!r}, wanted true or false")
        return cls(
            bucket=parts.netloc,
            endpoint_url=endpoint,
            region=values.get("region", DEFAULT_REGION),
            access_key=values.get("accessKey"),
            secret_key=values.get("secretKey"),
            path_style=path_style == "true",
        )


class S3ObjectStore:
    """An `ObjectStore` in one bucket; opens no connection before the first call."""

    def __init__(self, config: S3Config, retry: RetryPolicy | None = None) -> None:
        policy = retry or RetryPolicy()
        self._bucket = config.bucket
        self._endpoint = config.endpoint_url or "Amazon S3"
        self._retrier = Retrier(policy)
        self._client = _open_client(config, policy.concurrency)

    def check(self) -> None:
        """See `ObjectStore.check`. A listing, unlike HEAD, says in words why it is refused."""
        self._call(lambda: self._client.list_objects_v2(Bucket=self._bucket, MaxKeys=1))

    def put(self, key: str, data: Body) -> None:
        """See `ObjectStore.put`."""
        check_key(key)
        body = bytes(data)
        digest = _content_md5(body)
        self._call(
            lambda: self._client.put_object(
                Bucket=self._bucket, Key=key, Body=body, ContentMD5=digest
            ),
            key=key,
        )

    def get_range(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """See `ObjectStore.get_range`."""
        check_key(key)
        check_range(start, end)
        whole = (start, end) == (0, None)
        last = "" if end is None else end - 1

        def read() -> bytes:
            # An empty object has no byte 0: a range of it is refused, the whole is not.
            options: Any = {} if whole else {"Range": f"bytes={start}-{last}"}
            answer = self._client.get_object(Bucket=self._bucket, Key=key, **options)
            with closing(answer["Body"]) as body:
                return body.read()

        return self._call(read, key=key, start=start)

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`. A missing bucket looks like a missing object here."""
        check_key(key)
        found = self._call(lambda: self._client.head_object(Bucket=self._bucket, Key=key), key=key)
        return ObjectInfo(
            key, found["ContentLength"], _ms(found["LastModified"]), found["ETag"].strip('"')
        )

    def list_objects(
        self, prefix: str = "", start_after: str | None = None
    ) -> Iterator[ObjectInfo]:
        """See `ObjectStore.list_objects`; 1000 keys a page."""
        options: Any = {} if start_after is None else {"StartAfter": start_after}
        while True:
            page = self._call(
                partial(self._client.list_objects_v2, Bucket=self._bucket, Prefix=prefix, **options)
            )
            yield from map(_info, page.get("Contents", []))
            if not page.get("IsTruncated"):
                return
            options = {"ContinuationToken": page["NextContinuationToken"]}

    def delete_many(self, keys: Iterable[str]) -> DeleteResult:
        """See `ObjectStore.delete_many`."""
        wanted = list(keys)
        for key in wanted:
            check_key(key)
        failed: dict[str, str] = {}
        throttled: set[str] = set()
        remaining = iter(wanted)
        while batch := list(islice(remaining, DELETE_BATCH)):
            for error in self._delete_batch(batch):
                key, code = error["Key"], error.get("Code", "")
                failed[key] = f"{code}: {error.get('Message', '')}"
                if code in THROTTLED_CODES:
                    throttled.add(key)
        deleted = tuple(key for key in wanted if key not in failed)
        return DeleteResult(deleted, failed, frozenset(throttled))

    def start_multipart(self, key: str) -> MultipartUpload:
        """See `ObjectStore.start_multipart`.

        The start time is not in the answer, so here it is that of this machine's clock.
        """
        check_key(key)
        answer = self._call(
            lambda: self._client.create_multipart_upload(Bucket=self._bucket, Key=key), key=key
        )
        return MultipartUpload(key, answer["UploadId"], time.time_ns() // 1_000_000)

    def upload_part(self, upload: MultipartUpload, number: int, data: Body) -> UploadedPart:
        """See `ObjectStore.upload_part`."""
        check_part_number(number)
        body = bytes(data)
        digest = _content_md5(body)
        answer = self._call(
            lambda: self._client.upload_part(
                Bucket=self._bucket,
                Key=upload.key,
                UploadId=upload.upload_id,
                PartNumber=number,
                Body=body,
                ContentMD5=digest,
            ),
            key=upload.key,
            upload_id=upload.upload_id,
        )
        return UploadedPart(number, answer["ETag"], len(body))

    def copy_part(
        self, upload: MultipartUpload, number: int, source_key: str, start: int, end: int
    ) -> UploadedPart:
        """See `ObjectStore.copy_part`."""
        check_part_number(number)
        check_key(source_key)
        check_range(start, end)
        answer = self._call(
            lambda: self._client.upload_part_copy(
                Bucket=self._bucket,
                Key=upload.key,
                UploadId=upload.upload_id,
                PartNumber=number,
                CopySource={"Bucket": self._bucket, "Key": source_key},
                CopySourceRange=f"bytes={start}-{end - 1}",
            ),
            key=source_key,
            start=start,
            upload_id=upload.upload_id,
        )
        return UploadedPart(number, answer["CopyPartResult"]["ETag"], end - start)

    def complete_multipart(self, upload: MultipartUpload, parts: Sequence[UploadedPart]) -> None:
        """See `ObjectStore.complete_multipart`.

        A repeated request may find the upload gone because the first one did complete it: an
        object of the right size under the key is then the proof.
        """
        check_parts(parts)
        try:
            self._call(
                lambda: self._client.complete_multipart_upload(
                    Bucket=self._bucket,
                    Key=upload.key,
                    UploadId=upload.upload_id,
                    MultipartUpload={
                        "Parts": [{"PartNumber": p.number, "ETag": p.etag} for p in parts]
                    },
                ),
                key=upload.key,
                upload_id=upload.upload_id,
            )
        except UploadNotFoundError:
            if not self._is_there(upload.key, sum(part.size for part in parts)):
                raise

    def abort_multipart(self, upload: MultipartUpload) -> None:
        """See `ObjectStore.abort_multipart`."""
        try:
            self._call(
                lambda: self._client.abort_multipart_upload(
                    Bucket=self._bucket, Key=upload.key, UploadId=upload.upload_id
                ),
                key=upload.key,
                upload_id=upload.upload_id,
            )
        except UploadNotFoundError:
            return

    def list_multipart_uploads(self, prefix: str = "") -> Iterator[MultipartUpload]:
        """See `ObjectStore.list_multipart_uploads`."""
        options: Any = {}
        while True:
            page = self._call(
                partial(
                    self._client.list_multipart_uploads,
                    Bucket=self._bucket,
                    Prefix=prefix,
                    **options,
                )
            )
            for upload in page.get("Uploads", []):
                yield MultipartUpload(upload["Key"], upload["UploadId"], _ms(upload["Initiated"]))
            if not page.get("IsTruncated"):
                return
            options = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

    def close(self) -> None:
        """See `ObjectStore.close`."""
        self._client.close()

    def _call(
        self, request: Callable[[], T], *, key: str = "", start: int = 0, upload_id: str = ""
    ) -> T:
        def translated() -> T:
            try:
                return request()
            except (ClientError, BotoCoreError) as error:
                raise translate(
                    error,
                    bucket=self._bucket,
                    endpoint=self._endpoint,
                    key=key,
                    start=start,
                    upload_id=upload_id,
                ) from error

        return self._retrier.call(translated)

    def _delete_batch(self, batch: list[str]) -> list[ErrorTypeDef]:
        answer = self._call(
            lambda: self._client.delete_objects(
                Bucket=self._bucket,
                Delete={"Objects": [{"Key": key} for key in batch], "Quiet": True},
            )
        )
        return [error for error in answer.get("Errors", []) if error.get("Code") != "NoSuchKey"]

    def _is_there(self, key: str, size: int) -> bool:
        try:
            return self.head(key).size == size
        except ObjectNotFoundError:
            return False


def _open_client(config: S3Config, connections: int) -> S3Client:
    return boto3.session.Session().client(
        "s3",
        endpoint_url=config.endpoint_url,
        region_name=config.region,
        aws_access_key_id=config.access_key,
        aws_secret_access_key=config.secret_key,
        config=Config(
            signature_version="s3v4",
            s3={"addressing_style": "path" if config.path_style else "auto"},
            retries={"total_max_attempts": 1, "mode": "standard"},
            connect_timeout=5,
            read_timeout=30,
            max_pool_connections=connections,
            # Checksum trailers and checksums of ranges are beyond many S3-compatible stores.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


def _content_md5(body: bytes) -> str:
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()


def _ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def _info(found: ObjectTypeDef) -> ObjectInfo:
    return ObjectInfo(
        found["Key"], found["Size"], _ms(found["LastModified"]), found["ETag"].strip('"')
    )
