"""Decoder of ListMultipartUploads pages. Does no I/O."""

from __future__ import annotations

from xml.etree import ElementTree

from streammeta.storage.object_store.protocol.base import MultipartUpload
from streammeta.storage.object_store.s3 import listing_page

UPLOAD_PAGE = "ListMultipartUploadsResult"
"""Name of the document's root element."""

_NEXT = {"NextKeyMarker": "KeyMarker", "NextUploadIdMarker": "UploadIdMarker"}


def read_upload_page(body: bytes) -> listing_page.ListingPage[MultipartUpload]:
    """Decode the body of a response.

    Raises:
        StoreUnavailableError: the bytes are not a complete document.
        StoreRejectedError: the document is not such a page. Names the faulty part.
    """
    page = listing_page.PageDocument(body, UPLOAD_PAGE)
    uploads = tuple(_upload_of(entry, page) for entry in page.entries("Upload"))
    return listing_page.ListingPage(uploads, page.next_options(_NEXT))


def _upload_of(entry: ElementTree.Element, page: listing_page.PageDocument) -> MultipartUpload:
    key, upload_id, started = page.fields(entry, ("Key", "UploadId", "Initiated"))
    if not key or not upload_id or started is None:
        raise listing_page.invalid_page(
            f"key {key!r} has upload {upload_id!r} and time {started!r}"
        )
    return MultipartUpload(page.key_of(key), upload_id, listing_page.time_ms(started))
