"""Pages of versions, as ListObjectVersions answers them: what is current is left out.

Does no I/O.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

from streammeta.storage.errors import StoreRejectedError
from streammeta.storage.object_store.protocol.base import OldVersion
from streammeta.storage.object_store.s3.listing_page import (
    SIZE,
    ListingPage,
    PageDocument,
    refusal,
    time_ms,
)

VERSION_PAGE = "ListVersionsResult"
"""Name of the document."""

# A page may end behind all versions of a key: there is no marker of a version then.
_NEXT = {"NextKeyMarker": "KeyMarker", "NextVersionIdMarker": "VersionIdMarker"}
_FIELDS = ("Key", "VersionId", "LastModified", "IsLatest", "Size")


def read_version_page(body: bytes) -> ListingPage[OldVersion]:
    """Read the body of an answer: versions that are not current, and behind them delete markers.

    Raises:
        StoreUnavailableError: the bytes are no whole document.
        StoreRejectedError: they are, but not such a page; names the part that is wrong.
    """
    page = PageDocument(body, VERSION_PAGE)
    versions = [_version_of(entry, page) for entry in page.entries("Version")]
    markers = [_marker_of(entry, page) for entry in page.entries("DeleteMarker")]
    old = [version for version, is_latest in versions if not is_latest]
    return ListingPage((*old, *markers), page.next_options(_NEXT))


def _version_of(entry: ElementTree.Element, page: PageDocument) -> tuple[OldVersion, bool]:
    """A version, and whether it is the current one."""
    key, version_id, modified, is_latest, size = page.fields(entry, _FIELDS)
    if not key or version_id is None or modified is None:
        raise _incomplete(key, version_id, modified)
    if size is None or not re.fullmatch(SIZE, size):
        raise refusal(f"the size of a version of {key!r} is {size!r}, wanted a number of bytes")
    if is_latest not in ("true", "false"):
        raise refusal(f"IsLatest of {key!r} is {is_latest!r}, wanted true or false")
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
    return refusal(f"the key {key!r} has the version {version_id!r} of the time {modified!r}")
