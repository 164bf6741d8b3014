"""The door between botocore's errors and ours: each one becomes exactly one of `storage.errors`.

What may be repeated is decided here and nowhere else: 408, 429, 5xx (but for 501, which means that
the server lacks the operation), throttling and broken connections become `StoreUnavailableError`;
every other answer is final.
"""

from __future__ import annotations

import email.utils
import math
import time
from typing import Any

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError

from streammeta.storage.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    ObjectExistsError,
    ObjectNotFoundError,
    RangeNotSatisfiableError,
    StorageError,
    StoreRejectedError,
    StoreUnavailableError,
    UploadNotFoundError,
)

_DENIED_CODES = frozenset(
    {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}
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
        # Another conditional put of the key is under way: only the next answer tells who won.
        "ConditionalRequestConflict",
    }
)
_DAMAGED_CODES = frozenset({"BadDigest", "IncompleteBody", "XAmzContentChecksumMismatch"})
_CREDENTIALS_ADVICE = (
    "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or accessKey and secretKey in the address)"
)


def translate(
    error: ClientError | BotoCoreError,
    *,
    bucket: str,
    endpoint: str,
    key: str = "",
    start: int = 0,
    upload_id: str = "",
) -> StorageError:
    """Give our error for one of botocore; the rest says what the request was about."""
    if isinstance(error, ClientError):
        return _translate_answer(error, bucket, key, start, upload_id)
    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return AccessDeniedError(f"no credentials for bucket {bucket!r}; {_CREDENTIALS_ADVICE}")
    if isinstance(error, (BotoConnectionError, HTTPClientError)):
        return StoreUnavailableError(
            f"no answer from {endpoint} for bucket {bucket!r}: {error}; check that the endpoint is"
            " right and the server runs, then retry"
        )
    if isinstance(error, (IncompleteReadError, FlexibleChecksumError)):
        return StoreUnavailableError(
            f"the bytes of {key!r} did not arrive whole from bucket {bucket!r}: {error}; retry"
        )
    return StoreRejectedError(f"request for {key!r} in bucket {bucket!r} is not valid: {error}")


def _translate_answer(
    error: ClientError, bucket: str, key: str, start: int, upload_id: str
) -> StorageError:
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code == "NoSuchBucket":
        return BucketNotFoundError(bucket)
    if code == "NoSuchUpload":
        return UploadNotFoundError(key, upload_id)
    if code == "InvalidRange" or status == 416:
        return RangeNotSatisfiableError(key, start)
    if code in _DENIED_CODES or status in (401, 403):
        return _denied(error, code, bucket, key)
    if code == "PreconditionFailed" or status == 412:
        return ObjectExistsError(key)
    if code in THROTTLED_CODES or status in (429, 503):
        return StoreUnavailableError(
            f"bucket {bucket!r} asks for fewer requests ({code}); retry later",
            throttled=True,
            retry_after_s=_retry_after_s(error),
        )
    if code in _UNAVAILABLE_CODES or status == 408 or (status >= 500 and status != 501):
        return StoreUnavailableError(
            f"bucket {bucket!r} can't serve now ({status} {code}); retry",
            retry_after_s=_retry_after_s(error),
        )
    if status == 404:
        return ObjectNotFoundError(key) if key else BucketNotFoundError(bucket)
    if code in _DAMAGED_CODES:
        return StoreRejectedError(
            f"the bytes of {key!r} did not arrive in bucket {bucket!r} as they were sent ({code});"
            " nothing was stored; check what stands between this machine and the server"
        )
    return StoreRejectedError(
        f"bucket {bucket!r} rejects the request for {key!r} ({status} {code}): {error}; check"
        " endpoint, region and pathStyle of the address"
    )


def _denied(error: ClientError, code: str, bucket: str, key: str) -> AccessDeniedError:
    if code == "RequestTimeTooSkewed":
        advice = "set the clock of this machine"
    elif code in ("AccessDenied", "403"):
        advice = f"{_CREDENTIALS_ADVICE} and that they may read, write, list and delete there"
    else:
        advice = _CREDENTIALS_ADVICE
    message = error.response.get("Error", {}).get("Message", "")
    about = f" for {key!r}" if key else ""
    return AccessDeniedError(
        f"bucket {bucket!r} refuses access{about} ({code}: {message}); {advice}"
    )


def _retry_after_s(error: ClientError) -> float | None:
    """Read the header Retry-After: seconds, or a moment; None if it is absent or senseless."""
    metadata: Any = error.response.get("ResponseMetadata", {})
    told = str(metadata.get("HTTPHeaders", {}).get("retry-after", ""))
    try:
        seconds = float(told)
    except ValueError:
        moment = email.utils.parsedate_tz(told)
        seconds = math.nan if moment is None else email.utils.mktime_tz(moment) - time.time()
    return max(0.0, seconds) if math.isfinite(seconds) else None
