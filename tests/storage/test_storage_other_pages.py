"""Pages of versions and of unfinished uploads: read as botocore reads them, and strictly."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote_plus, unquote_plus

import botocore.parsers
import botocore.session
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammeta.storage.errors import StoreRejectedError, StoreUnavailableError
from streammeta.storage.object_store.protocol.base import MultipartUpload, OldVersion
from streammeta.storage.object_store.s3.listing_page import ListingPage, to_ms
from streammeta.storage.object_store.s3.upload_page import read_upload_page
from streammeta.storage.object_store.s3.version_page import read_version_page

LAST = "<IsTruncated>false</IsTruncated>"
MORE = "<IsTruncated>true</IsTruncated>"
ENCODED = "<EncodingType>url</EncodingType>"
AT = "2026-11-23T16:21:57.250Z"
SERVICE = botocore.session.get_session().get_service_model("s3")


def page(kind: str, *inside: str) -> bytes:
    """A page of `ListVersionsResult` or `ListMultipartUploadsResult`."""
    root = f'<{kind} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{"".join(inside)}</{kind}>'
    return f'<?xml version="1.0"?>\n{root}'.encode()


def versions(*inside: str) -> bytes:
    """A page of versions."""
    return page("ListVersionsResult", *inside)


def uploads(*inside: str) -> bytes:
    """A page of uploads."""
    return page("ListMultipartUploadsResult", *inside)


def version(
    key: str = "k", latest: str = "false", size: object = 1, at: str = AT, name: str = "v"
) -> str:
    """A version, as it stands in the document."""
    return (
        f"<Version><Key>{key}</Key><VersionId>{name}</VersionId><IsLatest>{latest}</IsLatest>"
        f"<LastModified>{at}</LastModified><ETag>&quot;e&quot;</ETag><Size>{size}</Size>"
        "<StorageClass>STANDARD</StorageClass></Version>"
    )


def marker(key: str = "k", at: str = AT, name: str = "m") -> str:
    """A delete marker, as it stands in the document."""
    return (
        f"<DeleteMarker><Key>{key}</Key><VersionId>{name}</VersionId><IsLatest>true</IsLatest>"
        f"<LastModified>{at}</LastModified></DeleteMarker>"
    )


def upload(key: str = "k", name: str = "u", at: str = AT) -> str:
    """An upload, as it stands in the document."""
    return (
        f"<Upload><Key>{key}</Key><UploadId>{name}</UploadId><Owner><ID>o</ID></Owner>"
        f"<Initiated>{at}</Initiated></Upload>"
    )


def by_botocore(operation: str, body: bytes) -> Any:
    """The slow model."""
    shape = SERVICE.operation_model(operation).output_shape
    assert shape is not None
    answer = {"body": body, "headers": {}, "status_code": 200}
    return botocore.parsers.create_parser("rest-xml").parse(answer, shape)


keys = st.text(min_size=1, max_size=20).map(quote_plus)
times = st.integers(0, 2**32).map(lambda s: f"{datetime.fromtimestamp(s, UTC):%FT%T}.250Z")
version_entries = st.builds(
    version, keys, st.sampled_from(["true", "false"]), st.integers(0, 10**18 - 1), times
)


@settings(max_examples=100)
@given(st.lists(version_entries | st.builds(marker, keys, times), max_size=6))
def test_versions_are_read_as_botocore_reads_them(entries: list[str]) -> None:
    body = versions(LAST, ENCODED, *entries)
    parsed = by_botocore("ListObjectVersions", body)
    found = [one for one in parsed.get("Versions", []) if not one["IsLatest"]]
    found += parsed.get("DeleteMarkers", [])
    assert list(read_version_page(body).entries) == [
        OldVersion(
            unquote_plus(one["Key"]),
            one["VersionId"],
            one.get("Size", 0),
            to_ms(one["LastModified"]),
            "Size" not in one,
        )
        for one in found
    ]


@settings(max_examples=100)
@given(st.lists(st.builds(upload, keys, st.sampled_from(["u1", "u2"]), times), max_size=6))
def test_uploads_are_read_as_botocore_reads_them(entries: list[str]) -> None:
    body = uploads(LAST, ENCODED, *entries)
    assert list(read_upload_page(body).entries) == [
        MultipartUpload(unquote_plus(one["Key"]), one["UploadId"], to_ms(one["Initiated"]))
        for one in by_botocore("ListMultipartUploads", body).get("Uploads", [])
    ]


@pytest.mark.parametrize(
    ("read", "body", "options"),
    [
        (read_version_page, versions(LAST), None),
        (
            read_version_page,
            versions(
                MORE,
                ENCODED,
                "<NextKeyMarker>a%2Bb</NextKeyMarker><NextVersionIdMarker>v%2B</NextVersionIdMarker>",
            ),
            {"KeyMarker": "a+b", "VersionIdMarker": "v%2B"},
        ),
        (
            read_version_page,
            versions(MORE, "<NextKeyMarker>a</NextKeyMarker><NextVersionIdMarker/>"),
            {"KeyMarker": "a"},
        ),
        (
            read_upload_page,
            uploads(
                MORE,
                "<NextKeyMarker>a</NextKeyMarker><NextUploadIdMarker>u</NextUploadIdMarker>",
            ),
            {"KeyMarker": "a", "UploadIdMarker": "u"},
        ),
    ],
)
def test_a_page_names_the_next_one(
    read: Callable[[bytes], ListingPage[Any]], body: bytes, options: dict[str, str] | None
) -> None:
    assert read(body).next_options == options


@pytest.mark.parametrize(
    ("read", "body", "complaint"),
    [
        (read_version_page, versions(), "IsTruncated is '', expected true or false"),
        (read_version_page, versions(MORE), "NextKeyMarker is missing"),
        (read_version_page, versions(LAST, version(size="")), "size of a version of 'k' is ''"),
        (read_version_page, versions(LAST, version(size="-1")), "size of a version of 'k' is '-1'"),
        (read_version_page, versions(LAST, version(latest="")), "IsLatest of 'k' is ''"),
        (read_version_page, versions(LAST, version("")), "key '' has version 'v'"),
        (read_version_page, versions(LAST, version(at="soon")), "'soon' is not a time"),
        (read_version_page, versions(LAST, marker("")), "key '' has version 'm'"),
        (
            read_version_page,
            versions(LAST, "<DeleteMarker><Key>k</Key></DeleteMarker>"),
            "version None and time None",
        ),
        (read_version_page, uploads(LAST), "expected ListVersionsResult"),
        (read_upload_page, uploads(), "IsTruncated is '', expected true or false"),
        (read_upload_page, uploads(MORE), "NextKeyMarker is missing"),
        (read_upload_page, uploads(LAST, upload("")), "key '' has upload 'u'"),
        (read_upload_page, uploads(LAST, upload(name="")), "has upload ''"),
        (read_upload_page, uploads(LAST, upload(at="2026-11-23T16:21:57")), "has no zone"),
        (read_upload_page, versions(LAST), "expected ListMultipartUploadsResult"),
    ],
)
def test_what_is_no_page_is_refused(
    read: Callable[[bytes], ListingPage[Any]], body: bytes, complaint: str
) -> None:
    with pytest.raises(StoreRejectedError, match=complaint):
        read(body)


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (read_version_page, versions(LAST, version(), marker())),
        (read_upload_page, uploads(LAST, upload())),
    ],
)
def test_a_page_that_broke_off_is_asked_for_again(
    read: Callable[[bytes], ListingPage[Any]], body: bytes
) -> None:
    for length in range(len(body)):
        with pytest.raises(StoreUnavailableError, match="XML"):
            read(body[:length])
