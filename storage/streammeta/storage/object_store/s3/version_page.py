"""Decoder of ListObjectVersions pages, without current versions. Does no I/O."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from streammeta.storage.errors import StoreRejectedError
from streammeta.storage.object_store.protocol.base import OldVersion
from streammeta.storage.object_store.s3.listing_page import (
    SIZE,
    ListingPage,
    PageDocument,
    invalid_page,
    time_ms,
)

VERSION_PAGE = "ListVersionsResult"
"""Name of the document's root element."""

# A page may end after all versions of a key, and then has no version marker.
_NEXT = {"NextKeyMarker": "KeyMarker", "NextVersionIdMarker": "VersionIdMarker"}
_FIELDS = ("Key", "VersionId", "LastModified", "IsLatest", "Size")


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
    return ListingPage((*old, *markers), page.next_options(_NEXT))


def _version_of(entry: ElementTree.Element, page: PageDocument) -> tuple[OldVersion, bool]:
    """Return a version, and whether it is the current one."""
    key, version_id, modified, is_latest, size = page.fields(entry, _FIELDS)
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
    key, version_id, modified = page.fields(entry, _FIELDS[:3])
    if not key or version_id is None or modified is None:
        raise _incomplete(key, version_id, modified)
    return OldVersion(page.key_of(key), version_id, 0, time_ms(modified), True)


def _incomplete(
    key: str | None, version_id: str | None, modified: str | None
) -> StoreRejectedError:
    return invalid_page(f"key {key!r} has version {version_id!r} and time {modified!r}")
