"""Headers: a block means what the table of its time says, kept or not; bad ones are refused."""

import contextlib

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammeta.controller.grpc_server.frames import Http2Error
from streammeta.controller.grpc_server.headers import (
    Head,
    HeaderDecoder,
    literal,
    status,
)

REQUEST = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a.B/C"),
    (b":authority", b"here"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
]
LIST_BYTES_MAX = 16_384


def block(*headers: tuple[bytes, bytes]) -> bytes:
    return b"".join(literal(*each) for each in headers)


def decoded(*headers: tuple[bytes, bytes]) -> Head:
    return HeaderDecoder(LIST_BYTES_MAX).decode(block(*headers))


WORDS = st.sampled_from([b"one", b"two", b"three" * 40, b"4" * 900])
METADATA = st.lists(st.tuples(WORDS, WORDS), max_size=3)


@given(st.lists(st.tuples(METADATA, st.booleans()), max_size=14))
def test_a_kept_meaning_is_that_of_the_table_as_it_is(
    requests: list[tuple[list[tuple[bytes, bytes]], bool]],
) -> None:
    """The encoder indexes, and pushes entries out: equal bytes may mean something else later."""
    encoder, decoder = hpack.Encoder(), HeaderDecoder(LIST_BYTES_MAX)
    for metadata, repeats in requests:
        for _ in range(1 + repeats):
            head = decoder.decode(encoder.encode([*REQUEST, *metadata], huffman=False))
            assert head.path == "/a.B/C"
            assert list(head.metadata) == [
                (name.decode(), value.decode()) for name, value in metadata
            ]


def test_a_kept_meaning_is_forgotten_when_an_entry_takes_anothers_place() -> None:
    """The table is as long as before, and what an index names is another."""
    decoder, newest = HeaderDecoder(LIST_BYTES_MAX), block(*REQUEST) + b"\xbe"
    for each in b"abcdefgh":  # four of them fill the table
        word = bytes((each,)) * 900
        added = b"\x40" + literal(b"word", word)[1:]
        assert decoder.decode(block(*REQUEST) + added).metadata == (("word", word.decode()),)
        for _ in range(2):
            assert decoder.decode(newest).metadata == (("word", word.decode()),)


def test_a_table_of_another_size_forgets_what_blocks_meant() -> None:
    encoder, decoder = hpack.Encoder(), HeaderDecoder(LIST_BYTES_MAX)
    decoder.decode(encoder.encode(REQUEST))
    again = encoder.encode(REQUEST)
    assert decoder.decode(again).path == decoder.decode(again).path == "/a.B/C"
    decoder.decode(b"\x20" + block(*REQUEST))  # the table is empty now
    with pytest.raises(Http2Error):
        decoder.decode(again)


@pytest.mark.parametrize(
    "headers",
    [
        REQUEST[:2],
        [*REQUEST, REQUEST[2]],
        [*REQUEST[4:], *REQUEST[:4]],
        [(b":other", b"1"), *REQUEST],
        [*REQUEST, (b"Upper", b"1")],
        [*REQUEST, (b"a b", b"1")],
        [*REQUEST, (b"", b"1")],
        [*REQUEST, (b"connection", b"close")],
        [*REQUEST, (b"te", b"gzip")],
        [*REQUEST, (b"word", b"a\r\nb")],
        [*REQUEST, (b"word-bin", b"a*b")],
        [*REQUEST, (b"grpc-timeout", b"5")],
        [*REQUEST, (b"grpc-timeout", b"123456789S")],
        [*REQUEST, (b"grpc-timeout", b"1x")],
    ],
)
def test_headers_that_break_a_rule_are_malformed(headers: list[tuple[bytes, bytes]]) -> None:
    assert decoded(*headers).is_malformed


def test_a_request_that_is_none_of_grpc_is_refused_by_http() -> None:
    assert decoded((b":method", b"GET"), *REQUEST[1:]).http_status == 405
    assert decoded(*REQUEST[:-1], (b"content-type", b"text/html")).http_status == 415
    assert decoded(*REQUEST[:-1]).http_status == 415
    assert decoded(*REQUEST[:-1], (b"content-type", b"application/grpc+proto")).http_status == 200


@pytest.mark.parametrize(
    ("said", "seconds"), [(b"2H", 7200), (b"3M", 180), (b"5S", 5), (b"250m", 0.25), (b"7u", 7e-6)]
)
def test_a_timeout_has_a_unit(said: bytes, seconds: float) -> None:
    assert decoded(*REQUEST, (b"grpc-timeout", said)).timeout_s == pytest.approx(seconds)


def test_metadata_of_bytes_is_decoded_with_and_without_padding() -> None:
    head = decoded(*REQUEST, (b"a-bin", b"AQI="), (b"b-bin", b"AQI"), (b"c", b"d"))
    assert head.metadata == (("a-bin", b"\x01\x02"), ("b-bin", b"\x01\x02"), ("c", "d"))


def test_headers_beyond_the_size_are_refused_and_far_beyond_it_end_the_connection() -> None:
    assert decoded(*REQUEST, (b"word", b"a" * LIST_BYTES_MAX)).is_too_large
    with pytest.raises(Http2Error):
        decoded(*REQUEST, (b"word", b"a" * 70_000))


@given(st.binary(max_size=200))
def test_no_bytes_but_blocks_are_decoded_and_none_do_worse_than_end_the_connection(
    data: bytes,
) -> None:
    decoder = HeaderDecoder(LIST_BYTES_MAX)
    with contextlib.suppress(Http2Error):
        assert isinstance(decoder.decode(data), Head)


def test_a_status_is_escaped_as_grpc_wants_it() -> None:
    found = dict(hpack.Decoder().decode(status(5, "100 % né\n", [("a-bin", b"\x01")]), raw=True))
    assert found == {
        b"grpc-status": b"5",
        b"grpc-message": b"100 %25 n%C3%A9%0A",
        b"a-bin": b"AQ==",
    }
