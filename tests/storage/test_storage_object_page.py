"""Pages of objects, versions and uploads: read as botocore reads them, refused unless whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote_plus, unquote_plus
from xml.sax.saxutils import escape

import botocore.parsers
import botocore.session
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammeta.storage.errors import StorageError, StoreRejectedError, StoreUnavailableError
from streammeta.storage.object_store.protocol.base import MultipartUpload, ObjectInfo, OldVersion
from streammeta.storage.object_store.s3 import listing_page
from streammeta.storage.object_store.s3.listing_page import (
    ListingPage,
    read_object_page,
    read_upload_page,
    read_version_page,
    to_ms,
)

SERVICE = botocore.session.get_session().get_service_model("s3")
NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


def entry(key: str = "k", size: object = 1, modified: str = "2026-11-23T16:21:57.250Z") -> str:
    """One key of a page, as it stands in the document."""
    return (
        f"<Contents><Key>{escape(key)}</Key><LastModified>{modified}</LastModified>"
        f"<ETag>&quot;e-{size}&quot;</ETag><Size>{size}</Size><Owner><ID>o</ID></Owner>"
        "<StorageClass>STANDARD</StorageClass></Contents>"
    )


def page(
    *entries: str, more: str = "<IsTruncated>false</IsTruncated>", attributes: str = NAMESPACE
) -> bytes:
    """A page with these keys."""
    head = f"<Name>b</Name><Prefix></Prefix>{more}"
    return document("ListBucketResult", head, *entries, attributes=attributes)


def document(kind: str, *inside: str, attributes: str = NAMESPACE) -> bytes:
    """A page of any kind."""
    return f'<?xml version="1.0"?>\n<{kind} {attributes}>{"".join(inside)}</{kind}>'.encode()


def parse_slowly(operation: str, body: bytes) -> Any:
    """The slow model."""
    shape = SERVICE.operation_model(operation).output_shape
    assert shape is not None
    answer = {"body": body, "headers": {}, "status_code": 200}
    return botocore.parsers.create_parser("rest-xml").parse(answer, shape)


def by_botocore(body: bytes) -> list[ObjectInfo]:
    return [
        ObjectInfo(one["Key"], one["Size"], to_ms(one["LastModified"]), one["ETag"].strip('"'))
        for one in parse_slowly("ListObjectsV2", body).get("Contents", [])
    ]


in_documents = st.characters(
    codec="utf-8", exclude_categories=["Cc"], exclude_characters="\ufffe\uffff"
)
keys = st.text(in_documents | st.sampled_from("<>&\"'%+/ \t]"), min_size=1, max_size=30)

plain_keys = st.text(st.sampled_from("abc019-_./ %+"), min_size=1, max_size=30)
moments = st.integers(0, 2**32).map(lambda s: datetime.fromtimestamp(s, UTC))


@settings(max_examples=200)
@given(st.lists(st.tuples(keys | plain_keys, st.integers(0, 10**18 - 1), moments), max_size=5))
def test_a_page_is_read_as_botocore_reads_it(rows: list[tuple[str, int, datetime]]) -> None:
    body = page(*(entry(k, size, f"{moment:%Y-%m-%dT%H:%M:%S}.250Z") for k, size, moment in rows))
    assert list(read_object_page(body).entries) == by_botocore(body)


@settings(max_examples=200)
@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)))
def test_keys_that_no_document_may_hold_come_encoded(names: list[str]) -> None:
    more = "<IsTruncated>false</IsTruncated><EncodingType>url</EncodingType>"
    body = page(*(entry(quote_plus(name)) for name in names), more=more)
    assert [listed.key for listed in read_object_page(body).entries] == names


def test_keys_that_are_not_said_to_be_encoded_are_taken_as_they_are() -> None:
    (found,) = read_object_page(page(entry("a%20b+c"))).entries
    assert found == ObjectInfo("a%20b+c", 1, 1_795_450_917_250, "e-1")


@pytest.mark.parametrize("attributes", ["", 'xmlns="urn:other"'])
def test_a_page_of_a_server_with_another_namespace_is_read(attributes: str) -> None:
    assert len(read_object_page(page(entry(), entry("l"), attributes=attributes)).entries) == 2


@pytest.mark.parametrize(
    ("moment", "ms"),
    [
        ("2026-11-23T16:21:57Z", 1_795_450_917_000),
        ("2026-11-23T16:21:57.1234567Z", 1_795_450_917_123),
        ("2026-11-23T17:21:57.5+01:00", 1_795_450_917_500),
        ("Mon, 23 Nov 2026 16:21:57 GMT", 1_795_450_917_000),
    ],
)
def test_times_of_all_servers_are_read(moment: str, ms: int) -> None:
    assert read_object_page(page(entry(modified=moment))).entries[0].last_modified_ms == ms


USUAL = (
    entry("50000000/_streammeta_c/5"),
    entry("a b", modified="2026-11-23T16:21:57Z").replace("&quot;", '"'),
    entry("c", 10**18 - 1).replace("&quot;", "&#34;").replace("<Owner><ID>o</ID></Owner>", ""),
    entry("d").replace("&quot;", ""),
    entry("e").replace("<Size>", "<ChecksumAlgorithm>CRC32C</ChecksumAlgorithm><Size>"),
    entry("f").replace("</Owner>", "<DisplayName>n</DisplayName></Owner>"),
)


def test_a_page_of_usual_entries_is_not_read_as_xml(monkeypatch: pytest.MonkeyPatch) -> None:
    body = page(*USUAL)
    wanted = by_botocore(body)
    monkeypatch.delattr(listing_page, "_read_any")
    assert list(read_object_page(body).entries) == wanted
    assert len(wanted) == len(USUAL)


@pytest.mark.parametrize(
    "inside",
    [
        f"{entry()}<!--{entry('l')}-->{entry('m')}",
        f"<!--{entry('l')}-->",
        f"<?skip {entry('l')}?>",
        f"<Name><![CDATA[{entry('l')}]]></Name>{entry()}",
        f"<CommonPrefixes>{entry('l')}</CommonPrefixes>",
        f"{entry()}<CommonPrefixes>{entry('l')}</CommonPrefixes>{entry('m')}",
        f"{entry()}<CommonPrefixes><Prefix>p</Prefix></CommonPrefixes>{entry('m')}",
        f"{entry()}\n  {entry('m')}",
        entry().replace("<Contents>", '<Contents xmlns="urn:other">') + entry("m"),
        entry().replace("<ETag>", "<ETag/><ETag>") + entry("m"),
        entry().replace("<Key>", "<Key>&#x6b;") + entry("m"),
        "",
    ],
)
def test_entries_in_another_form_or_place_are_read_as_xml(inside: str) -> None:
    body = page(inside)
    assert read_object_page(body) == listing_page._read_any(body)


MARKUP = (
    *(b"<!--", b"-->", b"<![CDATA[", b"]]>", b"<?x ", b"?>", b"<x>", b"</x>", b"&amp;", b'"'),
    *(b"<Contents>", b"</Contents>", b"<Key>", b"</Key>", b"99:99:99", b"9" * 19, b"\x01", b"\xff"),
)


@settings(max_examples=500)
@given(
    st.lists(
        st.tuples(
            st.integers(0), st.integers(0, 40), st.binary(max_size=3) | st.sampled_from(MARKUP)
        )
    )
)
def test_damage_is_judged_as_xml_however_usual_entries_are(
    cuts: list[tuple[int, int, bytes]],
) -> None:
    body = page(*USUAL[:3])
    for place, length, instead in cuts:
        at = place % (len(body) + 1)
        body = body[:at] + instead + body[at + length :]
    assert outcome(read_object_page, body) == outcome(listing_page._read_any, body)


def outcome(
    read: Callable[[bytes], ListingPage[ObjectInfo]], body: bytes
) -> ListingPage[ObjectInfo] | type[StorageError]:
    """The page, or the error in its place."""
    try:
        return read(body)
    except StorageError as error:
        return type(error)


MORE = "<IsTruncated>true</IsTruncated>"


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (page(more=""), "IsTruncated is '', expected true or false"),
        (page(more=MORE), "NextContinuationToken is missing"),
        (page(more=f"{MORE}<NextContinuationToken/>"), "NextContinuationToken is missing"),
        (page(entry(size="-1")), "size of 'k' is '-1'"),
        (page(entry(size="")), "size of 'k' is ''"),
        (page(entry(size=10**18)), "size of 'k' is '1000000000000000000'"),
        (page(entry(size="1_0")), "size of 'k' is '1_0'"),
        (page(entry(size="\u0663")), "expected a number of bytes"),
        (page(entry("")), "the key '' has"),
        (page(entry(modified="yesterday")), "'yesterday' is not a time"),
        (page(entry(modified="2026-11-23T16:21:57")), "has no zone"),
        (page(entry(modified="2026-13-23T16:21:57.250Z")), "is not a time"),
        (page(entry(modified="2026-11-23T16:21:57.25AZ")), "is not a time"),
        (page(entry(modified="Mon, 23 Nov 2026 16:21:57 AZ")), "has no zone"),
        (page("<Contents><Key>k</Key></Contents>"), "the size None and the time None"),
        (page("<Contents/>"), "the key None"),
        (b"<ListVersionsResult/>", "it is a 'ListVersionsResult', expected ListBucketResult"),
        (b'<!DOCTYPE a [<!ENTITY b "c">]><ListBucketResult/>', "document type"),
    ],
)
def test_what_is_no_page_is_refused(body: bytes, complaint: str) -> None:
    with pytest.raises(StoreRejectedError, match=complaint):
        read_object_page(body)


@pytest.mark.parametrize("key", ["a\x01b", "a]]>b", "a&b", "a\x00"])
def test_a_key_that_no_document_may_hold_is_refused(key: str) -> None:
    body = page(entry("there")).replace(b"there", key.encode())
    with pytest.raises(StoreUnavailableError, match="XML"):
        read_object_page(body)


@settings(max_examples=200)
@given(st.integers(0), st.binary(min_size=1, max_size=3))
def test_damage_never_escapes_as_another_error(at: int, damage: bytes) -> None:
    whole = page(entry(), entry("l"))
    at %= len(whole)
    with suppress(StorageError):
        read_object_page(whole[:at] + damage + whole[at + len(damage) :])


# ---- versions and uploads ----

LAST = "<IsTruncated>false</IsTruncated>"
ENCODED = "<EncodingType>url</EncodingType>"
AT = "2026-11-23T16:21:57.250Z"


def versions(*inside: str) -> bytes:
    """A page of versions."""
    return document("ListVersionsResult", *inside)


def uploads(*inside: str) -> bytes:
    """A page of uploads."""
    return document("ListMultipartUploadsResult", *inside)


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


encoded_keys = st.text(min_size=1, max_size=20).map(quote_plus)
times = st.integers(0, 2**32).map(lambda s: f"{datetime.fromtimestamp(s, UTC):%FT%T}.250Z")
version_entries = st.builds(
    version, encoded_keys, st.sampled_from(["true", "false"]), st.integers(0, 10**18 - 1), times
)


@settings(max_examples=100)
@given(st.lists(version_entries | st.builds(marker, encoded_keys, times), max_size=6))
def test_versions_are_read_as_botocore_reads_them(entries: list[str]) -> None:
    body = versions(LAST, ENCODED, *entries)
    parsed = parse_slowly("ListObjectVersions", body)
    found = [described for described in parsed.get("Versions", []) if not described["IsLatest"]]
    found += parsed.get("DeleteMarkers", [])
    assert list(read_version_page(body).entries) == [
        OldVersion(
            unquote_plus(item["Key"]),
            item["VersionId"],
            item.get("Size", 0),
            to_ms(item["LastModified"]),
            "Size" not in item,
        )
        for item in found
    ]


@settings(max_examples=100)
@given(st.lists(st.builds(upload, encoded_keys, st.sampled_from(["u1", "u2"]), times), max_size=6))
def test_uploads_are_read_as_botocore_reads_them(entries: list[str]) -> None:
    body = uploads(LAST, ENCODED, *entries)
    assert list(read_upload_page(body).entries) == [
        MultipartUpload(unquote_plus(one["Key"]), one["UploadId"], to_ms(one["Initiated"]))
        for one in parse_slowly("ListMultipartUploads", body).get("Uploads", [])
    ]


@pytest.mark.parametrize(
    ("read", "body", "options"),
    [
        (read_object_page, page(entry()), None),
        (
            read_object_page,
            page(entry(), more=f"{MORE}<NextContinuationToken>t&amp;1</NextContinuationToken>"),
            {"ContinuationToken": "t&1"},
        ),
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
def test_what_is_no_page_of_versions_or_uploads_is_refused(
    read: Callable[[bytes], ListingPage[Any]], body: bytes, complaint: str
) -> None:
    with pytest.raises(StoreRejectedError, match=complaint):
        read(body)


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (read_object_page, page(entry(), entry("l"))),
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
