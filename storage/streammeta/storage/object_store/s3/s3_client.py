"""Boundary to botocore: client, request bodies, response checks, translated errors.

Classifies errors. 408, 429, 5xx (except 501, an unsupported operation), throttling and broken
connections become `StoreUnavailableError`. Rejected credentials become `AccessDeniedError`, which
may pass. Every other response is final. Does not retry.
"""

from __future__ import annotations

import base64
import email.utils
import hashlib
import io
import math
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import IO, TYPE_CHECKING, Any, cast
from urllib.parse import quote, urlencode

import botocore.session
from botocore import exceptions
from botocore.config import Config
from botocore.exceptions import ConnectionError as BotoConnectionError
from botocore.loaders import create_loader

from streammeta.storage import errors
from streammeta.storage.object_store.protocol.address import Checksum, S3Config
from streammeta.storage.object_store.protocol.base import Body, Tags, check_tags
from streammeta.storage.object_store.protocol.retry import RetryPolicy
from streammeta.storage.object_store.s3 import listing_page

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import GetObjectOutputTypeDef


# Large enough for one send of TLS records, small enough to be copied within the CPU cache.
_SENT_BYTES = 64 * 1024


def as_view(data: Body) -> bytes | memoryview:
    """Return `data` without a copy: bytes unchanged, otherwise a view of its bytes."""
    return data if isinstance(data, bytes) else memoryview(data).cast("B")


def sendable(body: bytes | memoryview) -> bytes | IO[bytes]:
    """Return `body` in a form that botocore can send, for a single attempt."""
    return body if isinstance(body, bytes) else cast("IO[bytes]", ViewBody(body))


class ViewBody(io.RawIOBase):
    """A file over a memoryview, read in pieces while it is sent."""

    def __init__(self, view: memoryview) -> None:
        super().__init__()
        self._view = view
        self._at = 0

    def readable(self) -> bool:
        """Always true."""
        return True

    def seekable(self) -> bool:
        """Always true."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes: all of them for a negative size, otherwise at most `size`.

        Large reads return one piece, so that little is copied at a time.
        """
        size = len(self._view) if size < 0 else min(size, _SENT_BYTES)
        piece = bytes(self._view[self._at : self._at + size])
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to `offset` from the start, the position or the end."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        """Return the position of the next read."""
        return self._at


_CONNECT_S = 5.0
# Many calls fail together when keys are rotated, and each reload parses files.
_LOOKED_AGAIN_S = 1.0
_DESCRIPTIONS = create_loader()
"""Botocore's description of S3. Parsing it is most of a client's cost, so clients share it."""
_CONTENT_RANGE = re.compile(r"bytes (?P<first>\d+)-(?P<last>\d+)/(?P<total>\d+)")


class BodyDigests:
    """Digests of requests that require one: CRC32, or MD5 once a server rejected CRC32."""

    OPERATIONS = ("DeleteObjects", "PutObjectTagging")

    def __init__(self) -> None:
        self.are_md5 = False

    def add(self, params: dict[str, Any], **_event: object) -> None:
        """Replace the digest of a request before it is sent, if the server needs MD5."""
        if self.are_md5:
            digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
            params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()
            # Otherwise botocore would add a CRC32 header too, which such servers reject.
            params["context"].get("checksum", {}).pop("request_algorithm", None)


def open_client(
    config: S3Config, policy: RetryPolicy, digests: BodyDigests | None = None
) -> S3Client:
    """Open a client that never retries by itself. It connects on first use."""
    session = botocore.session.get_session()  # a new session reads the environment again
    session.register_component("data_loader", _DESCRIPTIONS)
    client = session.create_client(
        "s3",
        endpoint_url=config.endpoint_url,
        region_name=config.region,
        aws_access_key_id=config.access_key,
        aws_secret_access_key=config.secret_key,
        config=Config(
            signature_version="s3v4",
            s3={"addressing_style": "path" if config.path_style else "auto"},
            # `Retrier` retries, under limits that span all calls of the store.
            retries={"total_max_attempts": 1, "mode": "standard"},
            connect_timeout=min(_CONNECT_S, policy.silence_s),
            read_timeout=policy.silence_s,
            # A smaller pool would close and reopen connections, with a TLS handshake for each.
            max_pool_connections=policy.concurrency,
            # Many S3-compatible stores support neither checksum trailers nor range checksums.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )

    for operation, (document, read) in _LISTINGS.items():
        reader = partial(_read_listing, document=document, read=read)
        # The pattern for any service runs before botocore's handler for S3, which reads the same
        # body.
        client.meta.events.register(f"before-parse.*.{operation}", reader)

    if digests is not None:
        for operation in BodyDigests.OPERATIONS:
            client.meta.events.register(f"before-call.s3.{operation}", digests.add)

    return cast("S3Client", client)


class S3Connection:
    """Client of a bucket, reopened when its credentials change.

    Botocore renews credentials from a service, but reads a credentials file only once. Keys in the
    bucket's address never change.
    """

    def __init__(self, config: S3Config, policy: RetryPolicy) -> None:
        self.digests = BodyDigests()
        self.client = open_client(config, policy, self.digests)
        self._config = config
        self._policy = policy
        self._keys: tuple[str, ...] | None = None
        self._looking = threading.Lock()
        self._looked_at = float("-inf")

    def renew(self) -> None:
        """Reload the credentials after a rejection, at most once a second."""
        with self._looking:
            now = time.monotonic()
            # Keys in the address can't change, so a reload would find the same ones.
            if self._config.access_key is not None or now - self._looked_at < _LOOKED_AGAIN_S:
                return
            # Read before the time is noted: a slow credentials service must not be asked again at
            # once.
            keys = _current_keys(self._config)
            self._looked_at = time.monotonic()
            if keys != self._keys:
                # Running calls keep the old client, which is released with them.
                self.client = open_client(self._config, self._policy, self.digests)
                self._keys = keys


def _current_keys(config: S3Config) -> tuple[str, ...]:
    """Return the credentials of a client opened now, empty without any."""
    if config.access_key is not None:
        return ()
    try:
        credentials = botocore.session.get_session().get_credentials()
        if credentials is None:
            return ()
        frozen = credentials.get_frozen_credentials()
        return tuple(part or "" for part in frozen)
    except exceptions.BotoCoreError:
        return ()


LISTING_PAGE = "ListingPage"
"""Member of a listing's response: the `listing_page.ListingPage` in place of its fields."""

_LISTINGS: dict[str, tuple[str, Callable[[bytes], listing_page.ListingPage[Any]]]] = {
    "ListObjectsV2": (listing_page.OBJECT_PAGE, listing_page.read_object_page),
    "ListObjectVersions": (listing_page.VERSION_PAGE, listing_page.read_version_page),
    "ListMultipartUploads": (listing_page.UPLOAD_PAGE, listing_page.read_upload_page),
}


def _read_listing(
    response_dict: dict[str, Any],
    customized_response_dict: dict[str, Any],
    *,
    document: str,
    read: Callable[[bytes], listing_page.ListingPage[Any]],
    **_event: object,
) -> None:
    """Decode the page and leave an empty one to botocore, whose parser takes ten times as long.

    Botocore handles an error with a success status, and raises it.
    """
    if response_dict["status_code"] == 200 and not listing_page.is_error(response_dict["body"]):
        customized_response_dict[LISTING_PAGE] = read(response_dict["body"])
        # Botocore parses this stub in microseconds and still fills in the response's metadata.
        response_dict["body"] = f"<{document}/>".encode()


def check_whole(key: str, answer: GetObjectOutputTypeDef, body: bytes, checksum: Checksum) -> None:
    """Raise if the bytes of a whole object contradict the server's checksum."""
    if checksum.contradicts(answer, body):
        raise errors.StoreUnavailableError(
            f"bytes of {key!r} were damaged on the way, their {checksum} differs from the stored"
            " one. Retry"
        )


def check_part(
    key: str, answer: GetObjectOutputTypeDef, received: int, start: int, end: int | None
) -> None:
    """Raise on another range than requested, as from a server that ignores ranges."""
    stated = answer.get("ContentRange", "")
    match = _CONTENT_RANGE.fullmatch(stated)
    if match:
        # A server may end the range at the object's end, but may not shift or shorten it otherwise.
        total = int(match["total"])
        wanted = (start, total if end is None else min(end, total))
        served = (int(match["first"]), int(match["last"]) + 1)
        if served == wanted and received == wanted[1] - wanted[0]:
            return
    raise errors.StoreRejectedError(
        f"request for bytes [{start}, {'end' if end is None else end}) of {key!r} returned"
        f" {received} bytes and the content range {stated!r}. Use another server: this one does"
        " not serve ranges correctly"
    )


def tagging(tags: Tags | None) -> dict[str, Any]:
    """Return the request field for `tags`. Raises `ValueError`, see `check_tags`."""
    check_tags(tags or {})
    # S3 decodes tags as a query. It wants %20 for a space, where `urlencode` alone writes a plus.
    return {"Tagging": urlencode(dict(tags), quote_via=quote)} if tags else {}


_COPYING = (
    "s3:GetObject and s3:GetObjectTagging on the source, s3:PutObject and s3:PutObjectTagging on"
    " the copy"
)
_RIGHTS = {
    "ListObjectsV2": "s3:ListBucket",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "ListObjectVersions": "s3:ListBucketVersions",
    "HeadObject": "s3:GetObject, and s3:ListBucket to learn of its absence",
    "GetObject": "s3:GetObject, and s3:ListBucket to learn of its absence",
    "CopyObject": _COPYING,
    "UploadPartCopy": _COPYING,
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "GetObjectTagging": "s3:GetObjectTagging",
    "PutObjectTagging": "s3:PutObjectTagging",
    "DeleteObjects": "s3:DeleteObject",
} | dict.fromkeys(
    ("PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"),
    "s3:PutObject",
)
"""Required permission by operation. S3's error responses do not name it."""


def required_right(operation: str) -> str:
    """Return the part of an error message that names the permission for an operation."""
    right = _RIGHTS.get(operation)
    return f"these credentials need the permission {right}" if right else ""


_DENIED_CODES = frozenset(
    {
        "AccessDenied",
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "RequestTimeTooSkewed",
        "RequestExpired",
        "ExpiredToken",
        "InvalidToken",
        "TokenRefreshRequired",
    }
)
THROTTLED_CODES = frozenset(
    {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"}
)
_UNAVAILABLE_CODES = frozenset(
    {
        "InternalError",
        "ServiceUnavailable",
        "RequestTimeout",
        "OperationAborted",
        # Another conditional put of the key is in flight. Only a retry finds out which one won.
        "ConditionalRequestConflict",
    }
)
_NO_CREDENTIALS = (
    exceptions.NoCredentialsError,
    exceptions.PartialCredentialsError,
    exceptions.CredentialRetrievalError,
    exceptions.TokenRetrievalError,
)
_DAMAGED_CODES = frozenset({"BadDigest", "IncompleteBody", "XAmzContentChecksumMismatch"})
_CREDENTIALS_ADVICE = (
    "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or accessKey and secretKey in the address)"
)


def translate(
    error: exceptions.ClientError | exceptions.BotoCoreError,
    *,
    bucket: str,
    endpoint: str,
    key: str = "",
    start: int = 0,
    upload_id: str = "",
) -> errors.StorageError:
    """Translate an error of botocore. The other arguments describe the request."""
    if isinstance(error, exceptions.ClientError):
        return _translate_answer(error, bucket, key, start, upload_id)
    if isinstance(error, _NO_CREDENTIALS):
        return errors.AccessDeniedError(
            f"no credentials for bucket {bucket!r} ({error}). {_CREDENTIALS_ADVICE}"
        )
    if isinstance(error, (BotoConnectionError, exceptions.HTTPClientError)):
        return errors.StoreUnavailableError(
            f"no answer from {endpoint} for bucket {bucket!r}: {error}. Check the endpoint and that"
            " the server runs, then retry"
        )
    if isinstance(error, (exceptions.IncompleteReadError, exceptions.FlexibleChecksumError)):
        return errors.StoreUnavailableError(
            f"bytes of {key!r} arrived incomplete from bucket {bucket!r}: {error}; retry"
        )

    return errors.StoreRejectedError(
        f"request for {key!r} in bucket {bucket!r} is invalid: {error}"
    )


def _translate_answer(
    error: exceptions.ClientError, bucket: str, key: str, start: int, upload_id: str
) -> errors.StorageError:
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code == "NoSuchBucket":
        return errors.BucketNotFoundError(bucket)
    if code == "NoSuchUpload":
        return errors.UploadNotFoundError(key, upload_id)
    if code == "InvalidRange" or status == 416:
        return errors.RangeNotSatisfiableError(key, start)
    # Before 404 and 412: servers hide the existence of objects from callers without rights.
    if code in _DENIED_CODES or status in (401, 403):
        return _denied(error, code, bucket, key)
    if code == "PreconditionFailed" or status == 412:
        return errors.ObjectExistsError(key)
    if code in THROTTLED_CODES or status in (429, 503):
        return errors.StoreUnavailableError(
            f"bucket {bucket!r} asks for fewer requests ({code}). Retry later",
            throttled=True,
            retry_after_s=_retry_after_s(error),
        )
    if code in _UNAVAILABLE_CODES or status == 408 or (status >= 500 and status != 501):
        return errors.StoreUnavailableError(
            f"bucket {bucket!r} is unavailable ({status} {code}). Retry",
            retry_after_s=_retry_after_s(error),
        )
    if status == 404:
        # A response to HEAD has no code, so a missing bucket and a missing object look the same.
        return errors.ObjectNotFoundError(key) if key else errors.BucketNotFoundError(bucket)
    if code in _DAMAGED_CODES:
        return errors.StoreRejectedError(
            f"bytes of {key!r} were damaged on the way to bucket {bucket!r} ({code}), nothing was"
            " stored. Check the network and proxies between this machine and the server"
        )

    about = f" for {key!r}" if key else ""
    message = error.response.get("Error", {}).get("Message", "")
    return errors.StoreRejectedError(
        f"bucket {bucket!r} rejects {error.operation_name}{about} ({status} {code}: {message});"
        f" {_advice(code, message)}"
    )


def _advice(code: str, message: str) -> str:
    """Return the next step for a request that the server will never accept."""
    # Servers name the digest in the code or in the text, in different spellings.
    if "md5" in f"{code} {message}".lower():
        return "update the server or use another one, this one requires another digest of the body"
    return (
        "check endpoint, region and pathStyle of the address, and that this server supports the"
        " request"
    )


def _denied(
    error: exceptions.ClientError, code: str, bucket: str, key: str
) -> errors.AccessDeniedError:
    # A signature is valid for minutes around its time, so wrong clocks look like wrong keys.
    if code == "RequestTimeTooSkewed":
        advice = "set the clock of this machine"
    elif code in ("AccessDenied", "403"):
        advice = "; ".join(
            filter(None, (required_right(error.operation_name), _CREDENTIALS_ADVICE))
        )
    else:
        advice = _CREDENTIALS_ADVICE
    message = error.response.get("Error", {}).get("Message", "")
    about = f" for {key!r}" if key else ""
    return errors.AccessDeniedError(
        f"bucket {bucket!r} denies access{about} ({code}: {message}); {advice}"
    )


def _retry_after_s(error: exceptions.ClientError) -> float | None:
    """Parse the header Retry-After: seconds or a date. Returns None if absent or invalid."""
    metadata: Any = error.response.get("ResponseMetadata", {})
    header = str(metadata.get("HTTPHeaders", {}).get("retry-after", ""))
    try:
        seconds = float(header)
    except ValueError:
        # HTTP allows a date too, and proxies send one.
        moment = email.utils.parsedate_tz(header)
        seconds = math.nan if moment is None else email.utils.mktime_tz(moment) - time.time()
    return max(0.0, seconds) if math.isfinite(seconds) else None
