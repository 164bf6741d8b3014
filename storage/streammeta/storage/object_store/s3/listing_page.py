"""Decoders of listing pages: objects, noncurrent versions, and uploads.

Pages are decoded from the bytes of a response, because botocore's parser takes about 0.1 ms per
entry. Decoding is strict and rejects any incomplete page, because a dropped key would look like a
missing object.

Objects in the form of S3 and most servers are matched as text, which takes a fifth of the time of
an XML parser. A page with other entries is parsed as XML. The results are equal. Does no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from operator import itemgetter
from typing import Generic, TypeVar
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from streammeta.storage.errors import StoreRejectedError, StoreUnavailableError
from streammeta.storage.object_store.protocol.base import MultipartUpload, ObjectInfo, OldVersion

T = TypeVar("T")

SIZE = "[0-9]{1,18}"
"""Pattern of a size in bytes that fits 64 bits."""

# S3 starts a slow response with 200 and may find out later that it has to send an error.
_ERROR = re.compile(rb"\s*(<\?xml[^>]*>)?\s*<Error[\s>]")


@dataclass(frozen=True, slots=True)
class ListingPage(Generic[T]):
    """Entries of a page in the server's order.

    `next_options` are the request parameters of the next page, or None for the last page.
    """

    entries: tuple[T, ...]
    next_options: Mapping[str, str] | None


def is_error(body: bytes) -> bool:
    """Return whether a response is an error, which S3 may send with a success status."""
    return _ERROR.match(body) is not None


class PageDocument:
    """XML document of a page."""

    def __init__(self, body: bytes, root_name: str) -> None:
        """Parse the document.

        Raises:
            StoreUnavailableError: the bytes are not a complete document.
            StoreRejectedError: the document has another root element.
        """
        # Entities of a document type can expand to any size.
        if b"<!DOCTYPE" in body:
            raise invalid_page("it declares a document type")
        try:
            self._root = ElementTree.fromstring(body)
        except ElementTree.ParseError as error:
            raise StoreUnavailableError(
                f"page of the listing is not a complete XML document ({error}). Retry"
            ) from error
        tag = self._root.tag
        if tag.rpartition("}")[2] != root_name:
            raise invalid_page(f"it is a {tag!r}, expected {root_name}")
        self._namespace = tag.removesuffix(root_name)
        self._is_encoded = self._text("EncodingType") == "url"

    def entries(self, name: str) -> list[ElementTree.Element]:
        """Return the elements with a name, in their order."""
        return self._root.findall(self._namespace + name)

    def fields(self, entry: ElementTree.Element, names: Iterable[str]) -> list[str | None]:
        """Return the texts of an entry's fields, None for missing ones."""
        return [entry.findtext(self._namespace + name) for name in names]

    def key_of(self, text: str) -> str:
        """Return the key for `text`, which is URL-encoded if the page says so."""
        # Most keys need no decoding, and the check is cheaper than the call.
        return unquote_plus(text) if self._is_encoded and ("%" in text or "+" in text) else text

    def next_options(self, options: Mapping[str, str]) -> Mapping[str, str] | None:
        """Return the options of the next page, see `ListingPage`.

        `options` maps fields to parameter names. The first field is required. Raises
        `StoreRejectedError` if it is missing, or if the page does not say whether it is the last.
        """
        truncated = self._text("IsTruncated").strip()
        # A page that ends early without saying so would hide keys, and reconciliation would report
        # their objects as missing. So the flag is required instead of assumed.
        if truncated not in ("true", "false"):
            raise invalid_page(f"IsTruncated is {truncated!r}, expected true or false")
        if truncated == "false":
            return None
        found = {field: self._text(field) for field in options}
        first = next(iter(options))
        if not found[first]:
            raise invalid_page(f"it is not the last page, but {first} is missing")
        return {
            # Only key markers are URL-encoded. Tokens and upload ids are opaque and go back
            # unchanged.
            options[field]: self.key_of(text) if field == "NextKeyMarker" else text
            for field, text in found.items()
            if text
        }

    def _text(self, field: str) -> str:
        return self._root.findtext(self._namespace + field, "")


def time_ms(moment: str) -> int:
    """Parse a time into ms since 1970. Raises `StoreRejectedError`."""
    try:
        parsed = datetime.fromisoformat(moment)
    except ValueError:
        parsed = _parse_rfc5322(moment)
    # The machine's zone would be a guess, off by hours, and grace periods depend on these times.
    if parsed.tzinfo is None:
        raise invalid_page(f"the time {moment!r} has no zone")
    return to_ms(parsed)


def to_ms(moment: datetime) -> int:
    """Convert a time to ms since 1970."""
    return round(moment.timestamp() * 1000)


def _parse_rfc5322(moment: str) -> datetime:
    """Parse a time of RFC 5322, which some servers write. An unknown zone gives no zone."""
    try:
        return parsedate_to_datetime(moment)
    except (IndexError, OverflowError, TypeError, ValueError) as error:
        raise invalid_page(f"{moment!r} is not a time") from error


def invalid_page(problem: str) -> StoreRejectedError:
    """Return the error for an invalid page."""
    return StoreRejectedError(
        f"page of the listing differs from S3's format: {problem}. Use another server: this one"
        " does not list correctly"
    )


OBJECT_PAGE = "ListBucketResult"
"""Name of the document's root element."""

_NEXT_OBJECTS = {"NextContinuationToken": "ContinuationToken"}
_OBJECT_FIELDS = ("Key", "Size", "LastModified", "ETag")
_END = b"</Contents>"
_PRINTABLE = bytes(range(0x20, 0x7F))
_TEXT = "[^<>&]*"
_USUAL_ENTRY = re.compile(
    "(<Contents>"
    "<Key>([^<>&]+)</Key>"
    r"<LastModified>([0-9-]{10}T[0-9:]{8}(?:\.[0-9]{3})?Z)</LastModified>"
    # Servers write the quotes of an etag as either entity, as plain text, or not at all.
    '<ETag>(?:&quot;|&#34;|")?([^<>&"]*)(?:&quot;|&#34;|")?</ETag>'
    f"(?:<ChecksumAlgorithm>{_TEXT}</ChecksumAlgorithm>|<ChecksumType>{_TEXT}</ChecksumType>)*"
    f"<Size>({SIZE})</Size>"
    f"(?:<StorageClass>{_TEXT}</StorageClass>"
    f"|<Owner>(?:<ID>{_TEXT}</ID>|<DisplayName>{_TEXT}</DisplayName>)*</Owner>)*"
    "</Contents>)"
)


def read_object_page(body: bytes) -> ListingPage[ObjectInfo]:
    """Decode the body of a response, including URL-encoded keys.

    Raises:
        StoreUnavailableError: the bytes are not a complete document.
        StoreRejectedError: the document is not such a page. Names the faulty part.
    """
    page = _read_usual(body)
    return page if page is not None else _read_any(body)


def _read_usual(body: bytes) -> ListingPage[ObjectInfo] | None:
    """Decode a page with only ASCII entries in the usual form. Returns None for other pages."""
    start, end = body.find(b"<Contents>"), body.rfind(_END) + len(_END)
    entries = body[start:end]
    # Comments, CDATA sections and document types could hide entries from a pattern, and byte
    # positions equal text positions only in ASCII.
    if start < 0 or b"<!" in body or entries.translate(None, _PRINTABLE):
        return None

    found = _USUAL_ENTRY.findall(entries.decode("ascii"))
    # `findall` skips text that does not match. The matches must cover every byte, or an entry in
    # another form would be dropped silently.
    if sum(map(len, map(itemgetter(0), found))) != len(entries):
        return None

    # The rest of the page is parsed with one empty entry in place of all entries. The parser has to
    # find that entry, which proves that the entries stand where they belong.
    page = PageDocument(body[:start] + b"<Contents/>" + body[end:], OBJECT_PAGE)
    if len(page.entries("Contents")) != 1:
        return None

    try:
        objects = tuple(
            ObjectInfo(page.key_of(key), int(size), to_ms(datetime.fromisoformat(at)), etag)
            for _, key, at, etag, size in found
        )
    except ValueError:  # has the form of a time, such as month 13
        return None

    return ListingPage(objects, page.next_options(_NEXT_OBJECTS))


def _read_any(body: bytes) -> ListingPage[ObjectInfo]:
    page = PageDocument(body, OBJECT_PAGE)
    objects = tuple(_object_of(entry, page) for entry in page.entries("Contents"))
    return ListingPage(objects, page.next_options(_NEXT_OBJECTS))


def _object_of(entry: ElementTree.Element, page: PageDocument) -> ObjectInfo:
    key, size, modified, etag = page.fields(entry, _OBJECT_FIELDS)
    if not key or size is None or modified is None:
        raise invalid_page(f"the key {key!r} has the size {size!r} and the time {modified!r}")
    # `int` accepts signs, spaces and underscores, which no server means.
    if not re.fullmatch(SIZE, size):
        raise invalid_page(f"the size of {key!r} is {size!r}, expected a number of bytes")
    return ObjectInfo(page.key_of(key), int(size), time_ms(modified), (etag or "").strip('"'))


VERSION_PAGE = "ListVersionsResult"
"""Name of the document's root element."""

# A page may end after all versions of a key, and then has no version marker.
_NEXT_VERSIONS = {"NextKeyMarker": "KeyMarker", "NextVersionIdMarker": "VersionIdMarker"}
_VERSION_FIELDS = ("Key", "VersionId", "LastModified", "IsLatest", "Size")


def read_version_page(body: bytes) -> ListingPage[OldVersion]:
    """Decode the body of a response: noncurrent versions, then delete markers.

    Raises:
        StoreUnavailableError: the bytes are not a complete document.
        StoreRejectedError: the document is not such a page. Names the faulty part.
    """
    page = PageDocument(body, VERSION_PAGE)
    versions = [_version_of(entry, page) for entry in page.entries("Version")]
    # S3 mixes versions and markers by key. Consumers count them and need no order.
    markers = [_marker_of(entry, page) for entry in page.entries("DeleteMarker")]
    old = [version for version, is_latest in versions if not is_latest]
    return ListingPage((*old, *markers), page.next_options(_NEXT_VERSIONS))


def _version_of(entry: ElementTree.Element, page: PageDocument) -> tuple[OldVersion, bool]:
    """Return a version, and whether it is the current one."""
    key, version_id, modified, is_latest, size = page.fields(entry, _VERSION_FIELDS)
    if not key or version_id is None or modified is None:
        raise _incomplete(key, version_id, modified)
    if size is None or not re.fullmatch(SIZE, size):
        raise invalid_page(
            f"the size of a version of {key!r} is {size!r}, expected a number of bytes"
        )
    if is_latest not in ("true", "false"):
        raise invalid_page(f"IsLatest of {key!r} is {is_latest!r}, expected true or false")
    version = OldVersion(page.key_of(key), version_id, int(size), time_ms(modified), False)
    return version, is_latest == "true"


def _marker_of(entry: ElementTree.Element, page: PageDocument) -> OldVersion:
    key, version_id, modified = page.fields(entry, _VERSION_FIELDS[:3])
    if not key or version_id is None or modified is None:
        raise _incomplete(key, version_id, modified)
    return OldVersion(page.key_of(key), version_id, 0, time_ms(modified), True)


def _incomplete(
    key: str | None, version_id: str | None, modified: str | None
) -> StoreRejectedError:
    return invalid_page(f"key {key!r} has version {version_id!r} and time {modified!r}")


UPLOAD_PAGE = "ListMultipartUploadsResult"
"""Name of the document's root element."""

_NEXT_UPLOADS = {"NextKeyMarker": "KeyMarker", "NextUploadIdMarker": "UploadIdMarker"}


def read_upload_page(body: bytes) -> ListingPage[MultipartUpload]:
    """Decode the body of a response.

    Raises:
        StoreUnavailableError: the bytes are not a complete document.
        StoreRejectedError: the document is not such a page. Names the faulty part.
    """
    page = PageDocument(body, UPLOAD_PAGE)
    uploads = tuple(_upload_of(entry, page) for entry in page.entries("Upload"))
    return ListingPage(uploads, page.next_options(_NEXT_UPLOADS))


def _upload_of(entry: ElementTree.Element, page: PageDocument) -> MultipartUpload:
    key, upload_id, started = page.fields(entry, ("Key", "UploadId", "Initiated"))
    if not key or not upload_id or started is None:
        raise invalid_page(f"key {key!r} has upload {upload_id!r} and time {started!r}")
    return MultipartUpload(page.key_of(key), upload_id, time_ms(started))
