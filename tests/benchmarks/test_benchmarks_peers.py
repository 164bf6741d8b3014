"""What the peers' clients send, byte by byte, against what the protocols' descriptions say."""

import struct

import pytest

from scripts.benchmarks.peers import jute
from scripts.benchmarks.peers.template import Template
from scripts.benchmarks.protobuf_bytes import count_of_field, fields, length_delimited, number


def _multi_reply(*results: bytes) -> bytes:
    return struct.pack(">iqi", 1, 99, 0) + b"".join((*results, jute.end_of_multi()))


def test_a_reply_says_which_error_failed_a_multi() -> None:
    """The operation to blame has the error; those before it have 0, those after it -2."""
    done = struct.pack(">i?i", jute.SET_DATA, False, 0) + bytes(80)
    failed = [
        struct.pack(">i?ii", -1, False, error, error)
        for error in (0, -103, -2)  # -103: bad version
    ]
    assert jute.reply_of_multi(_multi_reply(done)) == (1, 0)
    assert jute.reply_of_multi(_multi_reply(*failed)) == (1, -103)
    assert jute.reply_of_multi(struct.pack(">iqi", 5, 99, -4)) == (5, -4)


def test_many_nodes_are_read_by_one_request() -> None:
    """Header of the request, header and path of each read, no watch, and the end mark."""
    assert jute.multi_read(1, ["/a"]) == bytes.fromhex(
        "00000021"  # 33 bytes follow
        "00000001 00000016"
        "00000004 00 ffffffff"
        "00000002 2f61 00"
        "ffffffff 01 ffffffff"
    )
    read = struct.pack(">i?i", jute.GET_DATA, False, 0) + jute.buffer(b"xyz") + bytes(68)
    failed = struct.pack(">i?ii", -1, False, -101, -101)  # -101: no node
    assert jute.data_count_of_multi_read(_multi_reply(read, read)) == 2
    assert jute.data_count_of_multi_read(_multi_reply(read, failed)) == 1
    assert jute.data_count_of_multi_read(struct.pack(">iqi", 1, 99, -4)) == 0


def test_repeated_fields_of_an_answer_are_counted() -> None:
    """Other fields, of other types, are passed over."""
    long = length_delimited(2, bytes(300))
    message = length_delimited(1, b"header") + long + number(3, 1_000) + length_delimited(2, b"")
    assert count_of_field(message, 2) == 2


def test_all_holes_of_a_name_are_filled_and_nothing_else() -> None:
    """A template within another keeps its holes, at their new places."""
    inner = Template()
    inner.hole("end", 2)
    inner.add(b"-")
    outer = Template()
    outer.hole("end", 2)
    outer.add(b"<")
    outer.append(inner)
    outer.hole("id", 1)
    assert outer.fill(end=b"12", id=b"x") == b"12<12-x"
    assert outer.fill(end=b"34") == b"34<34-x"


def test_holes_of_one_name_have_one_size() -> None:
    """Else a fill would be ambiguous."""
    template = Template()
    template.hole("end", 2)
    with pytest.raises(ValueError, match="'end'"):
        template.hole("end", 3)


def test_fields_written_are_fields_read() -> None:
    """Numbers of any length, and bytes; of a repeated field the last counts."""
    message = number(3, 300) + length_delimited(1, b"ab") + length_delimited(1, b"c")
    assert message == bytes.fromhex("18ac02 0a026162 0a0163")
    assert fields(message) == {3: 300, 1: b"c"}
