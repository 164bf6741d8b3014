"""Bytes that the peers' clients send and receive, compared with the protocols' descriptions."""

import struct

import pytest

from scripts.benchmarks.committer import Load
from scripts.benchmarks.peers import jute
from scripts.benchmarks.peers.etcd_client import EtcdCommitter
from scripts.benchmarks.peers.template import Template
from scripts.benchmarks.peers.zookeeper_client import ZookeeperCommitter
from scripts.benchmarks.protobuf_bytes import count_of_field, fields, length_delimited, number

END_OF_MULTI = struct.pack(">i?i", -1, True, -1)


def reply_of_multi(*results: bytes) -> bytes:
    return struct.pack(">iqi", 1, 99, 0) + b"".join((*results, END_OF_MULTI))


def test_a_reply_says_which_error_failed_a_multi() -> None:
    """The operation to blame has the error; those before it have 0, those after it -2."""
    done = struct.pack(">i?i", jute.SET_DATA, False, 0) + bytes(80)
    failed = [
        struct.pack(">i?ii", -1, False, error, error)
        for error in (0, -103, -2)  # -103: bad version
    ]
    assert jute.error_of_multi(reply_of_multi(done)) == 0
    assert jute.error_of_multi(reply_of_multi(*failed)) == -103
    assert jute.error_of_multi(struct.pack(">iqi", 5, 99, -4)) == -4


def test_many_nodes_are_read_by_one_request() -> None:
    """Header of the request, header and path of each read, no watch, and the end mark."""
    assert jute.multi_read([b"/a"]) == bytes.fromhex(
        "00000021"  # 33 bytes follow
        "00000001 00000016"
        "00000004 00 ffffffff"
        "00000002 2f61 00"
        "ffffffff 01 ffffffff"
    )
    read = struct.pack(">i?i", jute.GET_DATA, False, 0) + jute.buffer(b"xyz") + bytes(68)
    failed = struct.pack(">i?ii", -1, False, -101, -101)  # -101: no node
    assert jute.data_count_of_multi_read(reply_of_multi(read, read)) == 2
    assert jute.data_count_of_multi_read(reply_of_multi(read, failed)) == 1
    assert jute.data_count_of_multi_read(struct.pack(">iqi", 1, 99, -4)) == 0


def test_repeated_fields_of_an_answer_are_counted() -> None:
    """Other fields, of other types, are passed over."""
    long = length_delimited(2, bytes(300))
    message = length_delimited(1, b"header") + long + number(3, 1_000) + length_delimited(2, b"")
    assert count_of_field(message, 2) == 2


def test_all_holes_of_a_name_are_filled_and_nothing_else() -> None:
    template = Template(lambda end, key: end + b"<" + end + b"-" + key, end=4, key=5)
    assert template.fill(end=b"1234", key=b"abcde") == b"1234<1234-abcde"
    assert template.fill(end=b"5678") == b"5678<5678-abcde"


@pytest.mark.parametrize("committer", [EtcdCommitter, ZookeeperCommitter])
def test_a_commit_has_the_offsets_of_all_its_streams(
    committer: type[EtcdCommitter] | type[ZookeeperCommitter],
) -> None:
    load = committer(Load(endpoint="", ranges=3, in_flight=1))
    template = load._template(load._slots[0])
    end, ranges = b"end-mark", b"r" * 48
    request = template.fill(end=end, object_id=b"0123456789", ranges=ranges)
    assert request.count(end) == 3
    assert request.count(b"o/0123456789") == 1
    assert ranges in request
    assert len(template.fill(end=bytes(8))) == len(request)


def test_fields_written_are_fields_read() -> None:
    """Numbers of any length, and bytes. The last value of a repeated field counts."""
    message = number(3, 300) + length_delimited(1, b"ab") + length_delimited(1, b"c")
    assert message == bytes.fromhex("18ac02 0a026162 0a0163")
    assert fields(message) == {3: 300, 1: b"c"}
