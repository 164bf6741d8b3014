"""A session by its frames: rules of RFC 9113, windows both ways, and bounds on what is wasted."""

import contextlib
import struct
from collections.abc import Callable

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammeta.controller.grpc_server import http2_connection, outflow
from streammeta.controller.grpc_server.frames import (
    FRAME_BYTES_MAX,
    PREFACE,
    STREAM_ID_MAX,
    ErrorCode,
    Flag,
    Frame,
    Http2Error,
    Kind,
    Setting,
    frame,
)
from streammeta.controller.grpc_server.headers import STATUS_OK, literal
from tests.grpc_server.session_client import (
    BLOCK,
    STREAMS_MAX,
    WINDOW,
    Client,
    grant,
    greeted,
    opened,
    refused,
    reset,
    resets,
    setting,
    sized,
)
from tests.grpc_server.test_header_blocks import REQUEST, block


@pytest.fixture
def client() -> Client:
    return greeted()


def test_a_call_comes_and_is_answered(client: Client) -> None:
    client.say(opened(1), frame(Kind.DATA, Flag.END_STREAM, 1, b"asked"))
    assert client.heads[0][1].path == "/a.B/C"
    assert client.data == {1: b"asked"}
    stream = client.stream(1)
    client.session.send_head(stream, b"\x88")
    assert client.session.send(stream, b"answer")
    client.session.end(stream, STATUS_OK)
    assert client.frames() == [
        (Kind.HEADERS, Flag.END_HEADERS, 1, b"\x88"),
        (Kind.DATA, 0, 1, b"answer"),
        (Kind.HEADERS, Flag.END_HEADERS | Flag.END_STREAM, 1, STATUS_OK),
    ]
    assert client.closed == [(1, False)]
    assert not client.session.streams


def test_headers_may_come_in_parts_with_padding_and_priority(client: Client) -> None:
    first = bytes((2,)) + bytes(5) + BLOCK[:10] + bytes(2)
    flags = Flag.PADDED | Flag.PRIORITY | Flag.END_STREAM
    client.say(
        frame(Kind.HEADERS, flags, 1, first),
        frame(Kind.CONTINUATION, 0, 1, BLOCK[10:20]),
        frame(Kind.CONTINUATION, Flag.END_HEADERS, 1, BLOCK[20:]),
    )
    assert client.heads[0][1].path == "/a.B/C"
    assert client.stream(1).is_ended_there


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([frame(Kind.HEADERS, 0, 1, BLOCK), frame(Kind.PING, 0, 0, bytes(8))], "PROTOCOL_ERROR"),
        ([frame(Kind.HEADERS, 0, 1, BLOCK), frame(Kind.CONTINUATION, 4, 3)], "PROTOCOL_ERROR"),
        ([frame(Kind.CONTINUATION, 4, 1, BLOCK)], "PROTOCOL_ERROR"),
        ([opened(2)], "PROTOCOL_ERROR"),
        ([opened(5), opened(3)], "PROTOCOL_ERROR"),
        ([frame(Kind.HEADERS, Flag.END_HEADERS, 1, b"\xff\xff\xff")], "COMPRESSION_ERROR"),
        ([frame(Kind.DATA, 0, 1, b"a")], "PROTOCOL_ERROR"),
        ([reset(1)], "PROTOCOL_ERROR"),
        ([grant(1, 1)], "PROTOCOL_ERROR"),
        ([grant(0, 0)], "PROTOCOL_ERROR"),
        ([grant(0, STREAM_ID_MAX)], "FLOW_CONTROL_ERROR"),
        ([setting(Setting.INITIAL_WINDOW_SIZE, 1 << 31)], "FLOW_CONTROL_ERROR"),
        (
            [opened(1), grant(1, 1 << 30), setting(Setting.INITIAL_WINDOW_SIZE, 1 << 30)],
            "FLOW_CONTROL_ERROR",
        ),
        ([setting(Setting.MAX_FRAME_SIZE, FRAME_BYTES_MAX - 1)], "PROTOCOL_ERROR"),
        ([setting(Setting.ENABLE_PUSH, 2)], "PROTOCOL_ERROR"),
    ],
)
def test_a_broken_rule_ends_the_connection(client: Client, parts: list[bytes], code: str) -> None:
    assert refused(client, *parts).name == code


def test_the_first_frame_tells_settings() -> None:
    for first in (opened(1), frame(Kind.PING, 0, 0, bytes(8))):
        assert refused(Client(), PREFACE, first) is ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([opened(1, is_last=True), frame(Kind.DATA, 0, 1, b"a")], ErrorCode.STREAM_CLOSED),
        ([opened(1), frame(Kind.DATA, 0, 1, bytes(WINDOW + 1))], ErrorCode.FLOW_CONTROL_ERROR),
        ([opened(1), grant(1, 0)], ErrorCode.PROTOCOL_ERROR),
        ([opened(1), grant(1, STREAM_ID_MAX)], ErrorCode.FLOW_CONTROL_ERROR),
        ([opened(1), opened(1)], ErrorCode.PROTOCOL_ERROR),
        ([frame(Kind.HEADERS, 4, 1, block(*REQUEST[1:]))], ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_a_broken_rule_of_a_stream_resets_it_alone(
    client: Client, parts: list[bytes], code: ErrorCode
) -> None:
    assert resets(client.say(*parts)) == {1: code}
    client.say(opened(3))
    assert client.session.streams.keys() == {3}


def test_streams_beyond_the_limit_are_refused_and_others_go_on(client: Client) -> None:
    ids = range(1, 2 * STREAMS_MAX + 2, 2)
    assert resets(client.say(*map(opened, ids))) == {ids[-1]: ErrorCode.REFUSED_STREAM}
    client.say(reset(1))
    assert client.closed == [(1, True)]
    assert resets(client.say(opened(ids[-1] + 2))) == {}


def test_late_frames_of_a_closed_stream_are_passed_over(client: Client) -> None:
    client.say(opened(1))
    client.session.reset(client.stream(1), ErrorCode.CANCEL)
    client.frames()
    late = [frame(Kind.DATA, 0, 1, b"a"), grant(1, 1), reset(1), opened(1, is_last=True)]
    assert client.say(*late) == []
    assert client.data == {}


def test_an_answer_goes_as_far_as_windows_allow(client: Client) -> None:
    client.say(setting(Setting.INITIAL_WINDOW_SIZE, 10), opened(1, is_last=True))
    stream = client.stream(1)
    assert not client.session.send(stream, bytes(range(25)))
    client.session.end(stream, STATUS_OK)
    assert client.frames() == [(Kind.DATA, 0, 1, bytes(range(10)))]
    assert client.say(grant(1, 5)) == [(Kind.DATA, 0, 1, bytes(range(10, 15)))]
    more = client.say(setting(Setting.INITIAL_WINDOW_SIZE, 30))
    assert more[1][3] == bytes(range(15, 25))


def test_data_that_settings_allow_comes_after_their_acknowledgement(client: Client) -> None:
    """Until then a client still keeps to its former window, and refuses the data."""
    client.say(setting(Setting.INITIAL_WINDOW_SIZE, 0), opened(1, is_last=True))
    client.session.send(client.stream(1), bytes(40_000))
    client.session.end(client.stream(1), STATUS_OK)
    assert client.frames() == []

    found = client.say(setting(Setting.INITIAL_WINDOW_SIZE, 40_000))
    assert found[0] == (Kind.SETTINGS, Flag.ACK, 0, b"")
    assert [kind for kind, *_ in found[1:]] == [Kind.DATA, Kind.DATA, Kind.DATA, Kind.HEADERS]


def test_the_window_of_the_connection_is_shared_by_turns(client: Client) -> None:
    client.say(setting(Setting.INITIAL_WINDOW_SIZE, 1 << 20), opened(1), opened(3))
    for stream_id in (1, 3):
        client.session.send(client.stream(stream_id), bytes(70_000))
    sent = sum(len(received[3]) for received in client.frames())
    assert sent == outflow.DEFAULT_WINDOW
    client.say(grant(0, 1 << 20))
    assert client.sent == [1, 3]


def test_no_more_is_given_out_than_a_burst_until_the_transport_takes_more(client: Client) -> None:
    client.say(setting(Setting.INITIAL_WINDOW_SIZE, 1 << 30), grant(0, 1 << 30), opened(1))
    client.session.send(client.stream(1), bytes(3 * outflow.BURST_BYTES))
    first = sum(map(len, client.session.out))
    assert outflow.BURST_BYTES <= first < outflow.BURST_BYTES + outflow.SENT_FRAME_BYTES_MAX * 2
    client.frames()
    client.session.refill()
    assert sum(len(payload) for *_, payload in client.say()) >= outflow.BURST_BYTES


def test_data_of_all_streams_is_granted_anew_and_no_more_is_taken(client: Client) -> None:
    client.say(opened(1))
    stream = client.stream(1)
    for _ in range(http2_connection.CONNECTION_WINDOW // 4 // WINDOW + 1):
        client.say(frame(Kind.DATA, 0, 1, bytes(WINDOW)))
        client.session.grant(stream, WINDOW)
    assert len(client.data[1]) > http2_connection.CONNECTION_WINDOW // 4
    client.session._granted = WINDOW - 1
    over = frame(Kind.DATA, 0, 1, bytes(WINDOW))
    assert refused(client, over) is ErrorCode.FLOW_CONTROL_ERROR


def granted_to(stream_id: int, frames: list[Frame]) -> int:
    return sum(
        struct.unpack(">I", payload)[0]
        for kind, _, of, payload in frames
        if kind == Kind.WINDOW_UPDATE and of == stream_id
    )


@pytest.mark.parametrize("is_open", [True, False])
def test_the_window_of_the_connection_comes_back_whatever_becomes_of_its_data(
    client: Client, is_open: bool
) -> None:
    """A client whose calls were reset amid their data could send nothing more otherwise."""
    client.say(opened(1))
    stream, granted, sent = client.stream(1), 0, 0
    if not is_open:
        client.session.reset(stream, ErrorCode.CANCEL)
    while sent < http2_connection.CONNECTION_WINDOW + http2_connection.CONNECTION_WINDOW // 2:
        size = WINDOW if is_open else FRAME_BYTES_MAX
        sent += size
        granted += granted_to(0, client.say(frame(Kind.DATA, 0, 1, bytes(size))))
        client.data.clear()
        if is_open:
            client.session.grant(stream, WINDOW)
        client.data.clear()  # which is joined with all that came before
    assert sent - http2_connection.CONNECTION_WINDOW // 4 <= granted <= sent


def test_a_stream_has_no_more_than_was_granted_however_it_is_torn(client: Client) -> None:
    half = frame(Kind.DATA, 0, 1, bytes(WINDOW // 2))
    assert client.say(opened(1), half, half) == []
    assert resets(client.say(frame(Kind.DATA, 0, 1, b"a"))) == {1: ErrorCode.FLOW_CONTROL_ERROR}
    assert client.data == {1: bytes(WINDOW)}


def test_padding_is_granted_anew(client: Client) -> None:
    padded = bytes((10,)) + b"data" + bytes(10)
    found = client.say(opened(1), frame(Kind.DATA, Flag.PADDED, 1, padded))
    assert granted_to(1, found) == 11
    assert client.data == {1: b"data"}
    client.session.grant(client.stream(1), 4)
    assert client.stream(1).granted == WINDOW


@pytest.mark.parametrize(
    "made",
    [opened, lambda stream_id: frame(Kind.HEADERS, 4, stream_id, block(*REQUEST[1:]))],
    ids=["refused", "malformed"],
)
def test_streams_that_are_reset_at_once_are_waste(
    client: Client, made: Callable[[int], bytes]
) -> None:
    most, _ = http2_connection.RESETS
    many = b"".join(made(2 * number + 1) for number in range(most + STREAMS_MAX + 1))
    with pytest.raises(Http2Error, match="too many"):
        client.say(many)


def test_headers_that_are_passed_over_take_the_work_of_many_frames(client: Client) -> None:
    """They are too long to be decoded, and each part of them is looked through all the same."""
    long = block(*REQUEST, (b"word", b"a" * 300_000))
    client.session.feed(frame(Kind.HEADERS, 0, 1, long[:FRAME_BYTES_MAX]))
    for at in range(FRAME_BYTES_MAX, len(long), FRAME_BYTES_MAX):
        client.session.feed(frame(Kind.CONTINUATION, 0, 1, long[at : at + FRAME_BYTES_MAX]))
    assert client.session.work(0.0, 64)


@pytest.mark.parametrize(
    ("bound", "made"),
    [
        (http2_connection.RESETS, lambda number: opened(2 * number + 1) + reset(2 * number + 1)),
        (http2_connection.SETTINGS_CHANGES, lambda _: frame(Kind.SETTINGS, 0, 0)),
        (http2_connection.WASTED_FRAMES, lambda _: frame(Kind.PRIORITY, 0, 1, bytes(5))),
        (http2_connection.WASTED_FRAMES, lambda _: frame(200, 0, 0, b"new")),
        (http2_connection.WASTED_FRAMES, lambda _: frame(Kind.SETTINGS, Flag.ACK, 0)),
        (http2_connection.WASTED_FRAMES, lambda _: frame(Kind.PING, Flag.ACK, 0, bytes(8))),
        (http2_connection.PINGS, lambda _: frame(Kind.PING, 0, 0, bytes(8))),
    ],
    ids=[
        *("resets", "settings", "priorities", "unknown"),
        *("acknowledgements", "answers to pings", "pings"),
    ],
)
def test_what_is_wasted_ends_the_connection_and_a_little_of_it_does_not(
    client: Client, bound: tuple[int, float], made: Callable[[int], bytes]
) -> None:
    most, per_s = bound
    for number in range(most - 1):
        client.say(made(number))
    client.now += 10 / per_s
    for number in range(most - 1, most + 8):
        client.say(made(number))
    rest = b"".join(made(number) for number in range(most + 8, most + 14))
    assert refused(client, rest) is ErrorCode.ENHANCE_YOUR_CALM


def test_pings_by_which_a_client_measures_what_it_is_sent_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Go's clients send one for each piece of an answer, thousands a second on a short way."""
    monkeypatch.setattr(http2_connection, "PINGS", (3, 0.0))
    client, ping = greeted(), frame(Kind.PING, 0, 0, bytes(8))
    client.say(opened(1), ping)
    for _ in range(20):
        client.session.send(client.stream(1), b"piece")
        assert (Kind.PING, Flag.ACK, 0, bytes(8)) in client.say(ping)
    client.say(ping, ping)
    assert refused(client, ping) is ErrorCode.ENHANCE_YOUR_CALM


def numbered(*parts: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """Return what makes frames of a stream from the stream's number."""
    return lambda number: b"".join(part(2 * number + 1) for part in parts)


def of_stream(kind: int, flags: int, payload: bytes) -> Callable[[int], bytes]:
    return lambda stream_id: frame(kind, flags, stream_id, payload)


@pytest.mark.parametrize(
    "made",
    [
        numbered(opened, lambda stream_id: grant(stream_id, 0)),
        numbered(opened, lambda stream_id: grant(stream_id, STREAM_ID_MAX)),
        numbered(opened, opened),
        numbered(opened, of_stream(Kind.DATA, 0, bytes(WINDOW + 1))),
        numbered(opened, of_stream(Kind.DATA, 1, b""), of_stream(Kind.DATA, 0, b"a")),
        numbered(opened, of_stream(Kind.DATA, 1, b""), opened),
        numbered(lambda stream_id: sized(stream_id, 1), of_stream(Kind.DATA, 0, b"ab")),
        numbered(lambda stream_id: sized(stream_id, 1), of_stream(Kind.DATA, 1, b"")),
        numbered(opened, reset, of_stream(Kind.DATA, 1, b"a")),
    ],
    ids=[
        *("no grant", "too much granted", "headers again", "more than granted", "data of an ended"),
        *("headers of an ended", "longer", "shorter", "data of a reset one"),
    ],
)
def test_streams_that_a_client_has_the_server_reset_count_as_its_own_resets(
    client: Client, made: Callable[[int], bytes]
) -> None:
    """Each begins work that is thrown away; found as MadeYouReset, CVE-2025-8671."""
    most = http2_connection.RESETS[0]
    client.say(b"".join(made(number) for number in range(most // 2)))
    assert len(client.heads) == most // 2
    with pytest.raises(Http2Error) as raised:
        client.say(b"".join(made(number) for number in range(most // 2, most + 2)))
    assert raised.value.code is ErrorCode.ENHANCE_YOUR_CALM


def test_empty_data_is_waste(client: Client) -> None:
    client.say(opened(1))
    with pytest.raises(Http2Error):
        client.say(frame(Kind.DATA, 0, 1) * (http2_connection.WASTED_FRAMES[0] + 1))


@pytest.mark.parametrize("size", [0, 1_024])
def test_headers_without_an_end_are_cut_off(client: Client, size: int) -> None:
    client.say(frame(Kind.HEADERS, 0, 1, BLOCK))
    endless = frame(Kind.CONTINUATION, 0, 1, bytes(size)) * 90
    assert refused(client, endless) is ErrorCode.ENHANCE_YOUR_CALM


@given(st.integers(1, 1 << 14))
@settings(max_examples=20, deadline=None)
def test_headers_too_long_to_be_decoded_are_refused_and_the_table_stays_right(size: int) -> None:
    """They add entries, a small one and one that no table holds, and are torn anywhere."""
    client, encoder = Client(), hpack.Encoder()
    client.say(PREFACE, frame(Kind.SETTINGS, 0, 0))
    for stream_id, words in ((1, []), (3, [(b"word", b"a" * 300_000), (b"k", b"v")]), (5, [])):
        sent = encoder.encode([*REQUEST, *words], huffman=False)
        parts = [sent[at : at + size] for at in range(0, len(sent), size)]
        if len(parts) > 30:
            parts = [sent[at : at + FRAME_BYTES_MAX] for at in range(0, len(sent), FRAME_BYTES_MAX)]
        client.say(frame(Kind.HEADERS, Flag.END_HEADERS * (len(parts) == 1), stream_id, parts[0]))
        for place, part in enumerate(parts[1:], 2):
            last = Flag.END_HEADERS * (place == len(parts))
            client.say(frame(Kind.CONTINUATION, last, stream_id, part))
    assert [head.is_too_large for _, head in client.heads] == [False, True, False]
    assert client.heads[2][1].path == "/a.B/C"


def test_long_headers_take_the_work_of_many_frames(client: Client) -> None:
    long = block(*REQUEST, (b"word", b"a" * 15_000))
    for stream_id in (1, 3, 5, 7):
        client.session.feed(frame(Kind.HEADERS, Flag.END_HEADERS, stream_id, long))
    assert client.session.work(0.0, 256)
    assert len(client.heads) == 2


def test_an_end_is_announced_before_it_is_final(client: Client) -> None:
    """Streams that were opened before the client has heard of it are served."""
    client.session.announce_end()
    kinds = [(kind, payload[:4]) for kind, _, _, payload in client.frames()]
    assert kinds == [(Kind.GOAWAY, struct.pack(">I", STREAM_ID_MAX)), (Kind.PING, b"the ")]
    client.say(opened(1))
    assert not client.has_heard
    client.say(frame(Kind.PING, Flag.ACK, 0, bytes(8)))
    assert not client.has_heard
    client.say(frame(Kind.PING, Flag.ACK, 0, b"the end?"))
    assert client.has_heard
    client.session.take_no_more()
    assert client.frames()[0][3][:4] == struct.pack(">I", 1)
    assert client.say(opened(3)) == []
    assert client.session.streams.keys() == {1}
    assert not client.session.is_done
    client.session.end(client.stream(1), STATUS_OK)
    assert client.session.is_done


def test_streams_after_the_last_one_are_waste(client: Client) -> None:
    client.session.take_no_more()
    late = range(1, 2 * http2_connection.WASTED_FRAMES[0] + 4, 2)
    assert client.say(opened(1), frame(Kind.DATA, Flag.END_STREAM, 1, b"a"))[1:] == []
    with pytest.raises(Http2Error, match="too many"):
        client.say(b"".join(opened(stream_id, is_last=True) for stream_id in late[1:]))


def test_a_smaller_table_of_the_client_is_acknowledged_by_the_next_block(client: Client) -> None:
    client.say(setting(Setting.HEADER_TABLE_SIZE, 0), opened(1))
    client.session.send_head(client.stream(1), b"\x88")
    assert client.frames()[0][3] == b"\x20\x88"


def test_a_long_block_goes_in_parts(client: Client) -> None:
    client.say(opened(1))
    long = literal(b"a", b"b" * 40_000)
    client.session.end(client.stream(1), long)
    found = client.frames()
    assert [sent_frame[0] for sent_frame in found] == [
        Kind.HEADERS,
        Kind.CONTINUATION,
        Kind.CONTINUATION,
    ]
    assert [sent_frame[1] for sent_frame in found] == [Flag.END_STREAM, 0, Flag.END_HEADERS]
    assert b"".join(sent_frame[3] for sent_frame in found) == long


ANY = st.builds(
    frame,
    st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 200]),
    st.integers(0, 255),
    st.sampled_from([0, 1, 2, 3, 5, 7, STREAM_ID_MAX]),
    st.one_of(st.binary(max_size=40), st.just(BLOCK), st.just(bytes(4)), st.just(bytes(8))),
)


@given(st.lists(ANY, max_size=40), st.integers(1, 500))
def test_whatever_comes_does_no_worse_than_end_the_connection(
    frames: list[bytes], size: int
) -> None:
    client = Client()
    data = PREFACE + frame(Kind.SETTINGS, 0, 0) + b"".join(frames)
    with contextlib.suppress(Http2Error):
        for at in range(0, len(data), size):
            client.say(data[at : at + size])
    assert len(client.session.streams) <= STREAMS_MAX
    for stream in client.session.streams.values():
        assert 0 <= stream.granted <= WINDOW
    opened_ids = {stream_id for stream_id, _ in client.heads}
    assert {stream_id for stream_id, _ in client.closed} <= opened_ids
    assert opened_ids == client.session.streams.keys() | {stream for stream, _ in client.closed}
