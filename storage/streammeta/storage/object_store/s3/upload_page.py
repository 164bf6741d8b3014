"""Pages of unfinished uploads, as ListMultipartUploads answers them.

Does no I/O.
"""

from __future__ import annotations

from xml.etree import ElementTree

from streammeta.storage.object_store.protocol.base import MultipartUpload
from streammeta.storage.object_store.s3.listing_page import (
    ListingPage,
    PageDocument,
    refusal,
    time_ms,
)

UPLOAD_PAGE = "ListMultipartUploadsResult"
"""Name of the document."""

_NEXT = {"NextKeyMarker": "KeyMarker", "NextUploadIdMarker": "UploadIdMarker"}


def read_upload_page(body: bytes) -> ListingPage[MultipartUpload]:
    """Read the body of an answer.

    Raises:
        StoreUnavailableError: the bytes are no whole document.
        StoreRejectedError: they are, but not such a page; names the part that is wrong.
    """
    page = PageDocument(body, UPLOAD_PAGE)
    uploads = tuple(_upload_of(entry, page) for entry in page.entries("Upload"))
    return ListingPage(uploads, page.next_options(_NEXT))


def _upload_of(entry: ElementTree.Element, page: PageDocument) -> MultipartUpload:
    key, upload_id, started = page.fields(entry, ("Key", "UploadId", "Initiated"))
    if not key or not upload_id or started is None:
        raise refusal(f"the key {key!r} has the upload {upload_id!r} of the time {started!r}")
    return MultipartUpload(page.key_of(key), upload_id, time_ms(started))
