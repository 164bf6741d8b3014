"""What goes into botocore and what comes out of it: the client, and single parts of its answers.

Knows neither retries nor the protocol of stores.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote, urlencode

import botocore.session
from botocore.config import Config
from botocore.loaders import create_loader

from streammeta.storage.errors import StoreRejectedError, StoreUnavailableError
from streammeta.storage.object_store.base import ObjectInfo, Tags, check_tags
from streammeta.storage.object_store.retry import RetryPolicy
from streammeta.storage.object_store.s3_address import S3Config
from streammeta.storage.object_store.s3_checksum import Checksum

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import GetObjectOutputTypeDef, ObjectTypeDef

_CONNECT_S = 5.0
_DESCRIPTIONS = create_loader()
"""What botocore knows of S3, parsed once for all clients: it is most of the cost of a client."""
_CONTENT_RANGE = re.compile(r"bytes (?P<first>\d+)-(?P<last>\d+)/(?P<total>\d+)")


def open_client(config: S3Config, policy: RetryPolicy) -> S3Client:
    """Open a client that never repeats a request by itself; it connects when it is used."""
    session = botocore.session.get_session()  # of its own: it reads the environment anew
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
            retries={"total_max_attempts": 1, "mode": "standard"},
            connect_timeout=min(_CONNECT_S, policy.silence_s),
            read_timeout=policy.silence_s,
            max_pool_connections=policy.concurrency,
            # Checksum trailers and checksums of ranges are beyond many S3-compatible stores.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )
    return cast("S3Client", client)


def check_whole(key: str, answer: GetObjectOutputTypeDef, body: bytes, checksum: Checksum) -> None:
    """Refuse a whole object that is not what was stored, as far as the server tells."""
    if checksum.contradicts(answer, body):
        raise StoreUnavailableError(
            f"the bytes of {key!r} arrived with another {checksum} than they were stored"
            " with; retry"
        )


def check_part(
    key: str, answer: GetObjectOutputTypeDef, received: int, start: int, end: int | None
) -> None:
    """Refuse bytes that are not those asked for, as from a server that ignores ranges."""
    told = answer.get("ContentRange", "")
    match = _CONTENT_RANGE.fullmatch(told)
    if match:
        total = int(match["total"])
        wanted = (start, total if end is None else min(end, total))
        served = (int(match["first"]), int(match["last"]) + 1)
        if served == wanted and received == wanted[1] - wanted[0]:
            return
    raise StoreRejectedError(
        f"bytes [{start}, {'end' if end is None else end}) of {key!r} were answered with"
        f" {received} bytes and the content range {told!r}; this server does not serve ranges as"
        " it should, use another one"
    )


def tagging(tags: Tags | None) -> dict[str, Any]:
    """Give the field of a request that stores `tags`. Raises `ValueError`, see `check_tags`."""
    check_tags(tags or {})
    return {"Tagging": urlencode(dict(tags), quote_via=quote)} if tags else {}


def to_ms(moment: datetime) -> int:
    """Give ms since 1970."""
    return round(moment.timestamp() * 1000)


def info_of(found: ObjectTypeDef) -> ObjectInfo:
    """Read one entry of a listing."""
    return ObjectInfo(
        found["Key"], found["Size"], to_ms(found["LastModified"]), found["ETag"].strip('"')
    )
