"""Decoder of ListObjectsV2 pages.

Entries in the form of S3 and most servers are matched as text, which takes a fifth of the time of
an XML parser. A page with other entries is parsed as XML. The results are equal. Does no I/O.
"""

from __future__ import annotations

import re
from datetime import datetime
from operator import itemgetter
from xml.etree import ElementTree

from streammeta.storage.object_store.protocol.base import ObjectInfo
from streammeta.storage.object_store.s3.listing_page import (
    SIZE,
    ListingPage,
    PageDocument,
    invalid_page,
    time_ms,
    to_ms,
)

OBJECT_PAGE = "ListBucketResult"
"""Name of the document's root element."""

_NEXT = {"NextContinuationToken": "ContinuationToken"}
_FIELDS = ("Key", "Size", "LastModified", "ETag")
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

    return ListingPage(objects, page.next_options(_NEXT))


def _read_any(body: bytes) -> ListingPage[ObjectInfo]:
    page = PageDocument(body, OBJECT_PAGE)
    objects = tuple(_object_of(entry, page) for entry in page.entries("Contents"))
    return ListingPage(objects, page.next_options(_NEXT))


def _object_of(entry: ElementTree.Element, page: PageDocument) -> ObjectInfo:
    key, size, modified, etag = page.fields(entry, _FIELDS)
    if not key or size is None or modified is None:
        raise invalid_page(f"the key {key!r} has the size {size!r} and the time {modified!r}")
    # `int` accepts signs, spaces and underscores, which no server means.
    if not re.fullmatch(SIZE, size):
        raise invalid_page(f"the size of {key!r} is {size!r}, expected a number of bytes")
    return ObjectInfo(page.key_of(key), int(size), time_ms(modified), (etag or "").strip('"'))
