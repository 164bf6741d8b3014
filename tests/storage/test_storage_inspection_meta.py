"""Key-values of MetaStreams: those of a published dump, byte for byte of its sizes, and damage."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammeta.storage.errors import PayloadError
from streammeta.storage.inspection.meta_stream import LeaderEpochs, decode_meta_entry
from streammeta.storage.inspection.rendering import meta_document, meta_lines
from tests.storage.meta_payloads import (
    EPOCHS,
    PARTITION,
    PRODUCERS,
    epochs_value,
    meta_payload,
    snapshots_value,
)

NO_EPOCHS_LINE = (
    "key=LEADER_EPOCH_CHECKPOINT, value=ElasticLeaderEpochCheckpointMeta{version=0, entries=[]}"
)
EPOCHS_LINE = (
    "key=LEADER_EPOCH_CHECKPOINT, value=ElasticLeaderEpochCheckpointMeta{version=0,"
    " entries=[EpochEntry(epoch=0, startOffset=0)]}"
)
PRODUCERS_LINE = (
    "offset=50555, content=[ProducerStateEntry(producerId=7001, producerEpoch=0,"
    " currentTxnFirstOffset=OptionalLong.empty, coordinatorEpoch=-1,"
    " lastTimestamp=1712451139190, batchMetadata=[BatchMetadata(firstSeq=49935,"
    " lastSeq=49999, firstOffset=49935, lastOffset=49999, timestamp=1712451139190)]),"
    " ProducerStateEntry(producerId=7002, producerEpoch=0,"
    " currentTxnFirstOffset=OptionalLong.empty, coordinatorEpoch=-1,"
    " lastTimestamp=1712451146293, batchMetadata=[BatchMetadata(firstSeq=480, lastSeq=554,"
    " firstOffset=50480, lastOffset=50554, timestamp=1712451146293)])]"
)
NO_EPOCHS = meta_payload("LEADER_EPOCH_CHECKPOINT", epochs_value([]))
PUBLISHED = {
    "PARTITION": (PARTITION, 48, ['key=PARTITION, value={"s":0,"c":0,"r":50540,"cs":false}']),
    "no epochs": (NO_EPOCHS, 36, [NO_EPOCHS_LINE]),
    "epochs": (EPOCHS, 48, [EPOCHS_LINE]),
    "producers": (PRODUCERS, 138, ["key=PRODUCER_SNAPSHOTS", PRODUCERS_LINE]),
}
"""Payloads, their sizes and their lines as they were published of a real object."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_key_values_read_and_show_as_published(name: str) -> None:
    payload, size, lines = PUBLISHED[name]
    assert len(payload) == size
    assert list(meta_lines(decode_meta_entry(payload))) == lines


def test_values_are_there_for_programs_too() -> None:
    assert meta_document(decode_meta_entry(PARTITION))["value"] == {
        "s": 0,
        "c": 0,
        "r": 50540,
        "cs": False,
    }
    assert decode_meta_entry(EPOCHS).value == LeaderEpochs(0, ((0, 0),))
    (snapshot,) = meta_document(decode_meta_entry(PRODUCERS))["value"]
    assert snapshot["offset"] == 50555
    assert [one["producer_id"] for one in snapshot["producers"]] == [7001, 7002]


def test_a_transaction_and_a_producer_without_batches_show() -> None:
    value = snapshots_value({9: [(1, 2, -1, -1, 0, -1, 4, 77)]})
    (_, line) = meta_lines(decode_meta_entry(meta_payload("PRODUCER_SNAPSHOTS", value)))
    assert "currentTxnFirstOffset=OptionalLong[77], coordinatorEpoch=4" in line
    assert "batchMetadata=[]" in line


def test_an_unknown_key_keeps_its_bytes_and_shows_nothing_unprintable() -> None:
    entry = decode_meta_entry(meta_payload("K\x1b[2J", b"\x00\xffvalue"))
    assert (entry.value, entry.raw) == (None, b"\x00\xffvalue")
    (line,) = meta_lines(entry)
    assert line.isprintable()
    assert meta_document(entry)["value_base64"] == "AP92YWx1ZQ=="


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"\x00\x00", "what is left for a key-value at byte 0 is 2 bytes, wanted 5"),
        (b"\x01" + PARTITION[1:], "magic of a MetaStream key-value at byte 0 is 1, wanted 0"),
        (b"\x00" + struct.pack(">i", 2**31 - 1), "key length at byte 1 is 2147483647"),
        (meta_payload("PARTITION", b"{"), "value at byte 14 is no JSON"),
        (meta_payload("LOG", b"7"), "value at byte 8 is int, wanted a JSON object"),
        (
            meta_payload("LEADER_EPOCH_CHECKPOINT", struct.pack(">ii", 0, 2**31 - 1)),
            "number of leader epochs in 8 bytes at byte 32 is 2147483647, wanted 0",
        ),
        (meta_payload("PRODUCER_SNAPSHOTS", b"\x19"), "magic of producer snapshots"),
        (PRODUCERS[:-1] + b"\x00", "CRC-32C of a producer snapshot"),
        (PRODUCERS[:-1], "snapshot length"),
        (b"\x00\x00\x00\x00\x01\xff", "key at byte 5 is"),
    ],
)
def test_what_is_malformed_is_named(payload: bytes, message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        decode_meta_entry(payload)


@given(
    st.sampled_from([PARTITION, EPOCHS, PRODUCERS]),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=4),
    st.integers(0, 200),
)
def test_damage_is_refused_or_reads(
    payload: bytes, changes: list[tuple[int, int]], size: int
) -> None:
    damaged = bytearray(payload)
    for at, value in changes:
        damaged[at % len(damaged)] = value
    with contextlib.suppress(PayloadError):
        list(meta_lines(decode_meta_entry(bytes(damaged[:size]))))
