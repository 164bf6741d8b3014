"""Pages of a bucket's listing, read straight from the bytes of an answer to ListObjectsV2.

Botocore's own reading of a page costs some 0.1 ms a key; this costs a few microseconds. Strict:
what is no complete page of this operation is refused, since a key that was dropped would look like
an object that is missing. Does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from streammeta.storage.errors import StoreRejectedError, StoreUnavailableError
from streammeta.storage.object_store.base import ObjectInfo

_ROOT = "ListBucketResult"


@dataclass(frozen=True, slots=True)
class ListingPage:
    """Objects of a page in the server's order, and the token of the next page; None: the last."""

    objects: tuple[ObjectInfo, ...]
    next_token: str | None


def read_page(body: bytes) -> ListingPage:
    """Read the body of an answer to ListObjectsV2.

    Keys that the server encoded, as it says by `EncodingType`, are decoded.

    Raises:
        StoreUnavailableError: the bytes are no whole document.
        StoreRejectedError: they are, but not such a page; names the part that is wrong.
    """
    if b"<!DOCTYPE" in body:
        raise _refusal("it declares a document type")
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError as error:
        raise StoreUnavailableError(
            f"a page of the listing is no whole XML document ({error}); retry"
        ) from error
    if root.tag.rpartition("}")[2] != _ROOT:
        raise _refusal(f"it is a {root.tag!r}, wanted {_ROOT}")
    namespace = root.tag.removesuffix(_ROOT)
    token = _next_token(root, namespace)
    is_encoded = root.findtext(f"{namespace}EncodingType") == "url"
    names = tuple(f"{namespace}{name}" for name in ("Key", "Size", "LastModified", "ETag"))
    entries = root.iterfind(f"{namespace}Contents")
    return ListingPage(tuple(_object_of(one, names, is_encoded) for one in entries), token)


def _next_token(root: ElementTree.Element, namespace: str) -> str | None:
    truncated = root.findtext(f"{namespace}IsTruncated", "").strip()
    if truncated not in ("true", "false"):
        raise _refusal(f"IsTruncated is {truncated!r}, wanted true or false")
    if truncated == "false":
        return None
    token = root.findtext(f"{namespace}NextContinuationToken")
    if not token:
        raise _refusal("it is not the last, but has no NextContinuationToken")
    return token


def _object_of(entry: ElementTree.Element, names: tuple[str, ...], is_encoded: bool) -> ObjectInfo:
    key, size, modified, etag = map(entry.findtext, names)
    if not key or size is None or modified is None:
        raise _refusal(f"the key {key!r} has the size {size!r} and the time {modified!r}")
    if not (size.isascii() and size.isdigit()):
        raise _refusal(f"the size of {key!r} is {size!r}, wanted a number of bytes")
    if is_encoded and ("%" in key or "+" in key):
        key = unquote_plus(key)
    return ObjectInfo(key, int(size), _to_ms(modified), (etag or "").strip('"'))


def _to_ms(moment: str) -> int:
    try:
        parsed = datetime.fromisoformat(moment)
    except ValueError:
        parsed = _in_another_form(moment)
    if parsed.tzinfo is None:
        raise _refusal(f"LastModified is {moment!r}, wanted a time with its zone")
    return round(parsed.timestamp() * 1000)


def _in_another_form(moment: str) -> datetime:
    """Read a time of RFC 5322, which some servers write; of an unknown zone, it has none."""
    try:
        return parsedate_to_datetime(moment)
    except (IndexError, OverflowError, TypeError, ValueError) as error:
        raise _refusal(f"LastModified is {moment!r}, wanted a time") from error


def _refusal(problem: str) -> StoreRejectedError:
    return StoreRejectedError(
        f"a page of the listing is not as ListObjectsV2 has it: {problem}; this server does not"
        " list correctly, use another one"
    )
