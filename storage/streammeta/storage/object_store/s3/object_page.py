"""Pages of objects, as ListObjectsV2 answers them.

Entries in the form that S3 and most servers write are matched as text, which costs a fifth of
reading them as XML; a page with any others is read as XML. Both give the same. Does no I/O.
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
    refusal,
    time_ms,
    to_ms,
)

OBJECT_PAGE = "ListBucketResult"
"""Name of the document."""

_NEXT = {"NextContinuationToken": "ContinuationToken"}
_FIELDS = ("Key", "Size", "LastModified", "ETag")
_END = b"</Contents>"
_PRINTABLE = bytes(range(0x20, 0x7F))
_TEXT = "[^<>&]*"
_USUAL_ENTRY = re.compile(
    "(<Contents>"
    "<Key>([^<>&]+)</Key>"
    r"<LastModified>([0-9-]{10}T[0-9:]{8}(?:\.[0-9]{3})?Z)</LastModified>"
    '<ETag>(?:&quot;|&#34;|")?([^<>&"]*)(?:&quot;|&#34;|")?</ETag>'
    f"(?:<ChecksumAlgorithm>{_TEXT}</ChecksumAlgorithm>|<ChecksumType>{_TEXT}</ChecksumType>)*"
    f"<Size>({SIZE})</Size>"
    f"(?:<StorageClass>{_TEXT}</StorageClass>"
    f"|<Owner>(?:<ID>{_TEXT}</ID>|<DisplayName>{_TEXT}</DisplayName>)*</Owner>)*"
    "</Contents>)"
)


def read_object_page(body: bytes) -> ListingPage[ObjectInfo]:
    """Read the body of an answer. Keys that the server encoded are decoded.

    Raises:
        StoreUnavailableError: the bytes are no whole document.
        StoreRejectedError: they are, but not such a page; names the part that is wrong.
    """
    page = _read_usual(body)
    return page if page is not None else _read_any(body)


def _read_usual(body: bytes) -> ListingPage[ObjectInfo] | None:
    """Read a page whose entries are all in the usual form and in ASCII; None: it is another."""
    start, end = body.find(b"<Contents>"), body.rfind(_END) + len(_END)
    entries = body[start:end]
    if start < 0 or b"<!" in body or entries.translate(None, _PRINTABLE):
        return None

    found = _USUAL_ENTRY.findall(entries.decode("ascii"))
    if sum(map(len, map(itemgetter(0), found))) != len(entries):
        return None

    # What is around the entries is read with an empty one in their place, which has to be found
    # where entries belong.
    page = PageDocument(body[:start] + b"<Contents/>" + body[end:], OBJECT_PAGE)
    if len(page.entries("Contents")) != 1:
        return None

    try:
        objects = tuple(
            ObjectInfo(page.key_of(key), int(size), to_ms(datetime.fromisoformat(at)), etag)
            for _, key, at, etag, size in found
        )
    except ValueError:  # not a time, though of its form
        return None

    return ListingPage(objects, page.next_options(_NEXT))


def _read_any(body: bytes) -> ListingPage[ObjectInfo]:
    page = PageDocument(body, OBJECT_PAGE)
    objects = tuple(_object_of(entry, page) for entry in page.entries("Contents"))
    return ListingPage(objects, page.next_options(_NEXT))


def _object_of(entry: ElementTree.Element, page: PageDocument) -> ObjectInfo:
    key, size, modified, etag = page.fields(entry, _FIELDS)
    if not key or size is None or modified is None:
        raise refusal(f"the key {key!r} has the size {size!r} and the time {modified!r}")
    if not re.fullmatch(SIZE, size):
        raise refusal(f"the size of {key!r} is {size!r}, wanted a number of bytes")
    return ObjectInfo(page.key_of(key), int(size), time_ms(modified), (etag or "").strip('"'))
