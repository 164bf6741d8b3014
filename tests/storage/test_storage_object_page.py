"""Pages of objects: read as botocore reads them, and refused unless they are whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from urllib.parse import quote_plus
from xml.sax.saxutils import escape

import botocore.parsers
import botocore.session
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammeta.storage.errors import StorageError, StoreRejectedError, StoreUnavailableError
from streammeta.storage.object_store.protocol.base import ObjectInfo
from streammeta.storage.object_store.s3 import object_page
from streammeta.storage.object_store.s3.listing_page import ListingPage, to_ms
from streammeta.storage.object_store.s3.object_page import read_object_page

SHAPE = (
    botocore.session.get_session()
    .get_service_model("s3")
    .operation_model("ListObjectsV2")
    .output_shape
)
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
    inside = f"<Name>b</Name><Prefix></Prefix>{more}{''.join(entries)}"
    root = f"<ListBucketResult {attributes}>{inside}</ListBucketResult>"
    return f'<?xml version="1.0"?>\n{root}'.encode()


def by_botocore(body: bytes) -> list[ObjectInfo]:
    """The slow model."""
    assert SHAPE is not None
    parsed = botocore.parsers.create_parser("rest-xml").parse(
        {"body": body, "headers": {}, "status_code": 200}, SHAPE
    )
    return [
        ObjectInfo(one["Key"], one["Size"], to_ms(one["LastModified"]), one["ETag"].strip('"'))
        for one in parsed.get("Contents", [])
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
    assert [one.key for one in read_object_page(body).entries] == names


def test_keys_that_are_not_said_to_be_encoded_are_taken_as_they_are() -> None:
    (found,) = read_object_page(page(entry("a%20b+c"))).entries
    assert found == ObjectInfo("a%20b+c", 1, 1_795_450_917_250, "e-1")


def test_a_page_names_the_next_one() -> None:
    more = "<IsTruncated>true</IsTruncated><NextContinuationToken>t&amp;1</NextContinuationToken>"
    assert read_object_page(page(entry(), more=more)).next_options == {"ContinuationToken": "t&1"}
    assert read_object_page(page(entry())).next_options is None


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
    monkeypatch.delattr(object_page, "_read_any")
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
    assert read_object_page(body) == object_page._read_any(body)


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
    assert outcome(read_object_page, body) == outcome(object_page._read_any, body)


def outcome(
    read: Callable[[bytes], ListingPage[ObjectInfo]], body: bytes
) -> ListingPage[ObjectInfo] | type[StorageError]:
    """The page, or the error in its place."""
    try:
        return read(body)
    except StorageError as error:
        return type(error)


TRUNCATED = "<IsTruncated>true</IsTruncated>"


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (page(more=""), "IsTruncated is '', expected true or false"),
        (page(more=TRUNCATED), "NextContinuationToken is missing"),
        (page(more=f"{TRUNCATED}<NextContinuationToken/>"), "NextContinuationToken is missing"),
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


def test_a_page_that_broke_off_is_asked_for_again() -> None:
    whole = page(entry(), entry("l"))
    for length in range(len(whole)):
        with pytest.raises(StoreUnavailableError, match="XML"):
            read_object_page(whole[:length])


@settings(max_examples=200)
@given(st.integers(0), st.binary(min_size=1, max_size=3))
def test_damage_never_escapes_as_another_error(at: int, damage: bytes) -> None:
    whole = page(entry(), entry("l"))
    at %= len(whole)
    with suppress(StorageError):
        read_object_page(whole[:at] + damage + whole[at + len(damage) :])
