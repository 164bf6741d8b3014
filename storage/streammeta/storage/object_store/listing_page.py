"""Pages of a bucket's listing, read straight from the bytes of an answer to ListObjectsV2.

Botocore's own reading of a page costs some 0.1 ms a key; this costs a few microseconds: entries in
the form that S3 and most servers write are matched as text, and any others read as XML. Strict:
what is no complete page of this operation is refused, since a key that was dropped would look like
an object that is missing. Does no I/O.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from streammeta.storage.errors import StoreRejectedError, StoreUnavailableError
from streammeta.storage.object_store.base import ObjectInfo

_ROOT = "ListBucketResult"
_END = b"</Contents>"
_ERROR = re.compile(rb"\s*(<\?xml[^>]*>)?\s*<Error[\s>]")
_SIZE = "[0-9]{1,18}"  # in 64 bits
_TEXT = "[^<>&]*"
_USUAL_ENTRY = re.compile(
    "(<Contents>"
    "<Key>([^<>&]+)</Key>"
    r"<LastModified>([0-9-]{10}T[0-9:]{8}(?:\.[0-9]{3})?Z)</LastModified>"
    '<ETag>(?:&quot;|&#34;|")?([^<>&"]*)(?:&quot;|&#34;|")?</ETag>'
    f"(?:<ChecksumAlgorithm>{_TEXT}</ChecksumAlgorithm>|<ChecksumType>{_TEXT}</ChecksumType>)*"
    f"<Size>({_SIZE})</Size>"
    f"(?:<StorageClass>{_TEXT}</StorageClass>"
    f"|<Owner>(?:<ID>{_TEXT}</ID>|<DisplayName>{_TEXT}</DisplayName>)*</Owner>)*"
    "</Contents>)"
)


@dataclass(frozen=True, slots=True)
class ListingPage:
    """Objects of a page in the server's order, and the token of the next page; None: the last."""

    objects: tuple[ObjectInfo, ...]
    next_token: str | None


def is_error(body: bytes) -> bool:
    """True if an answer is an error, which S3 may send with the status of success."""
    return _ERROR.match(body) is not None


def read_page(body: bytes) -> ListingPage:
    """Read the body of an answer to ListObjectsV2.

    Keys that the server encoded, as it says by `EncodingType`, are decoded.

    Raises:
        StoreUnavailableError: the bytes are no whole document.
        StoreRejectedError: they are, but not such a page; names the part that is wrong.
    """
    page = _read_usual(body)
    return page if page is not None else _read_any(body)


def _read_usual(body: bytes) -> ListingPage | None:
    """Read a page whose entries are all in the usual form and in ASCII; None: it is another."""
    start, end = body.find(b"<Contents>"), body.rfind(_END) + len(_END)
    entries = body[start:end].decode("ascii", "replace")
    if start < 0 or b"<!" in body or not (entries.isascii() and entries.isprintable()):
        return None
    found = _USUAL_ENTRY.findall(entries)
    if sum(len(entry) for entry, *_ in found) != len(entries):
        return None
    # What is around the entries is read with an empty one in their place, which has to be found
    # where entries belong.
    frame = _Frame.read(body[:start] + b"<Contents/>" + body[end:])
    if len(frame.entries) != 1:
        return None
    try:
        objects = tuple(
            ObjectInfo(_decoded(key, frame), int(size), _ms_of(datetime.fromisoformat(at)), etag)
            for _, key, at, etag, size in found
        )
    except ValueError:  # not a time, though of its form
        return None
    return ListingPage(objects, frame.next_token)


def _read_any(body: bytes) -> ListingPage:
    frame = _Frame.read(body)
    names = tuple(f"{frame.namespace}{name}" for name in ("Key", "Size", "LastModified", "ETag"))
    return ListingPage(
        tuple(_object_of(entry, names, frame) for entry in frame.entries), frame.next_token
    )


@dataclass(frozen=True, slots=True)
class _Frame:
    """A page without what its entries hold."""

    namespace: str
    entries: list[ElementTree.Element]
    is_encoded: bool
    next_token: str | None

    @classmethod
    def read(cls, body: bytes) -> _Frame:
        """Read a document. Raises as `read_page`, except for its entries."""
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
        return cls(
            namespace,
            root.findall(f"{namespace}Contents"),
            root.findtext(f"{namespace}EncodingType") == "url",
            _next_token(root, namespace),
        )


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


def _object_of(entry: ElementTree.Element, names: tuple[str, ...], frame: _Frame) -> ObjectInfo:
    key, size, modified, etag = map(entry.findtext, names)
    if not key or size is None or modified is None:
        raise _refusal(f"the key {key!r} has the size {size!r} and the time {modified!r}")
    if not re.fullmatch(_SIZE, size):
        raise _refusal(f"the size of {key!r} is {size!r}, wanted a number of bytes")
    return ObjectInfo(_decoded(key, frame), int(size), _to_ms(modified), (etag or "").strip('"'))


def _decoded(key: str, frame: _Frame) -> str:
    return unquote_plus(key) if frame.is_encoded and ("%" in key or "+" in key) else key


def _to_ms(moment: str) -> int:
    try:
        parsed = datetime.fromisoformat(moment)
    except ValueError:
        parsed = _in_another_form(moment)
    if parsed.tzinfo is None:
        raise _refusal(f"LastModified is {moment!r}, wanted a time with its zone")
    return _ms_of(parsed)


def _ms_of(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


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
