"""Headers: a block means what the table of its time says, kept or not; bad ones are refused."""

import contextlib

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammeta.controller.grpc_server.frames import Http2Error
from streammeta.controller.grpc_server.headers import Head, HeaderDecoder, literal, status

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
    return b"".join(literal(*header) for header in headers)


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
    for byte in b"abcdefgh":  # four of them fill the table
        word = bytes((byte,)) * 900
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


@pytest.mark.parametrize("name", [b":method", b":scheme", b":path", b":authority", b"word", b"te"])
def test_bytes_that_could_begin_another_header_are_in_no_value(name: bytes) -> None:
    """A proxy or a log that writes the value down would write another line (RFC 9113, 8.2.1)."""
    good = dict([*REQUEST, (b"word", b"some words")])
    value = good[name]
    for bad in (b"\0", b"\r", b"\n", b"\r\nhost: there", b"\x01", b"\x7f", b" ", b"\t"):
        for torn in (bad + value, value[:2] + bad + value[2:], value + bad):
            headers = [(header, torn if header == name else kept) for header, kept in good.items()]
            is_between_words = name == b"word" and torn.strip(b"\t ") == torn and bad in b"\t "
            assert decoded(*headers).is_malformed != is_between_words, torn


def test_a_name_is_of_lower_case_letters_and_of_no_blanks_or_colons() -> None:
    for byte in (*range(0x21), *range(0x41, 0x5B), 0x3A, *range(0x7F, 0x100)):
        bad = bytes((byte,))
        for name in (bad, b"a" + bad, bad + b"a"):
            assert decoded(*REQUEST, (name, b"1")).is_malformed, name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b":method", b""),
        (b":method", b"PO(ST"),
        (b":scheme", b""),
        (b":scheme", b"ht:tp"),
        (b":path", b""),
        (b":path", b"a.B/C"),
        (b":path", b"*"),
        (b":path", b"/\xff"),
        (b":authority", b"me@here"),
    ],
)
def test_a_pseudo_header_has_no_value_but_one_of_its_kind(name: bytes, value: bytes) -> None:
    headers = [(header, value if header == name else good) for header, good in REQUEST]
    assert decoded(*headers).is_malformed


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        (b"content-type", b"application/grpc", b"application/grpc"),
        (b"content-length", b"5", b"6"),
        (b"content-length", b"5", b"5"),
        (b"grpc-timeout", b"1S", b"2S"),
        (b"grpc-encoding", b"identity", b"gzip"),
        (b"host", b"here", b"here"),
    ],
)
def test_a_header_that_two_readers_could_read_differently_comes_once(
    name: bytes, first: bytes, second: bytes
) -> None:
    request = [header for header in REQUEST if header[0] != name]
    assert not decoded(*request, (name, first)).is_malformed
    assert decoded(*request, (name, first), (name, second)).is_malformed


@pytest.mark.parametrize("length", [b"", b"-1", b"+1", b"1 ", b"0x1", b"1,1", b"9" * 30, b"\xb2"])
def test_a_length_is_a_number(length: bytes) -> None:
    assert decoded(*REQUEST, (b"content-length", length)).is_malformed


def test_a_length_is_kept_for_the_data_to_be_compared_with() -> None:
    assert decoded(*REQUEST, (b"content-length", b"007")).content_length == 7
    assert decoded(*REQUEST).content_length is None


def test_a_host_is_that_of_the_authority() -> None:
    assert not decoded(*REQUEST, (b"host", b"HERE")).is_malformed
    assert decoded(*REQUEST, (b"host", b"there")).is_malformed


def test_trailers_have_no_pseudo_headers() -> None:
    assert decoded((b"word", b"1")).may_end
    assert decoded().may_end
    for headers in (
        [*REQUEST],
        [(b":path", b"/")],
        [(b"a", b"1"), (b":path", b"/")],
        [(b"A", b"1")],
    ):
        assert not decoded(*headers).may_end


def test_a_request_that_is_none_of_grpc_is_refused_by_http() -> None:
    assert decoded((b":method", b"GET"), *REQUEST[1:]).http_status == 405
    options = [(b":method", b"OPTIONS"), REQUEST[1], (b":path", b"*")]
    assert decoded(*options).http_status == 405
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
