"""Payloads for tests: record batches as Kafka's producers make them, key-values of a MetaStream."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Mapping, Sequence

import google_crc32c
import pyarrow as pa

from tests.kit.kafka_batches import Rec, encode_record

NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
NO_PRODUCER = (-1, -1, -1)
TIME_MS = 1_712_451_146_370

Headers = Sequence[tuple[str, bytes | None]]


def kafka_record(
    offset_delta: int,
    key: bytes | None,
    value: bytes | None,
    headers: Headers = (),
    time_delta: int = 0,
) -> bytes:
    return encode_record(Rec(time_delta, key, value, headers), 0, offset_delta)


def compressed(codec: int, data: bytes, *, framed: bool = False) -> bytes:
    """`framed`: snappy as the Java clients write it, in blocks of 32 bytes here."""
    match codec:
        case 1:
            return gzip.compress(data)
        case 2 if framed:
            blocks = [pa.compress(data[i : i + 32], "snappy", asbytes=True)
                      for i in range(0, len(data), 32)]  # fmt: skip
            head = b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1)
            return head + b"".join(struct.pack(">i", len(block)) + block for block in blocks)
        case 2:
            return bytes(pa.compress(data, "snappy", asbytes=True))
        case 3 | 4:
            return bytes(pa.compress(data, "lz4" if codec == LZ4 else "zstd", asbytes=True))
        case _:
            return data


def kafka_batch(
    base_offset: int,
    records: Sequence[bytes],
    *,
    codec: int = NONE,
    framed: bool = False,
    attributes: int = 0,
    producer: tuple[int, int, int] = NO_PRODUCER,
    leader_epoch: int = 0,
    max_time: int = TIME_MS,
    record_count: int | None = None,
) -> bytes:
    count = len(records) if record_count is None else record_count
    checked = struct.pack(
        ">hiqqqhii", attributes | codec, len(records) - 1, TIME_MS, max_time, *producer, count
    )
    checked += compressed(codec, b"".join(records), framed=framed)
    crc = google_crc32c.value(checked)
    body = struct.pack(">ibI", leader_epoch, 2, crc) + checked
    return struct.pack(">qi", base_offset, len(body)) + body


Producer = tuple[int, int, int, int, int, int, int, int]


def meta_payload(key: str, value: bytes) -> bytes:
    name = key.encode()
    return b"\x00" + struct.pack(">i", len(name)) + name + value


def epochs_value(entries: Sequence[tuple[int, int]], version: int = 0) -> bytes:
    head = struct.pack(">ii", version, len(entries))
    return head + b"".join(struct.pack(">iq", *entry) for entry in entries)


def snapshots_value(snapshots: Mapping[int, Sequence[Producer]]) -> bytes:
    value = b"\x18"
    for offset, producers in snapshots.items():
        checked = struct.pack(">i", len(producers))
        checked += b"".join(struct.pack(">qhiqiqiq", *producer) for producer in producers)
        content = struct.pack(">hI", 1, google_crc32c.value(checked)) + checked
        value += struct.pack(">qi", offset, len(content)) + content
    return value


PARTITION = meta_payload("PARTITION", b'{"s":0,"c":0,"r":50540,"cs":false}')
EPOCHS = meta_payload("LEADER_EPOCH_CHECKPOINT", epochs_value([(0, 0)]))
PRODUCERS = meta_payload(
    "PRODUCER_SNAPSHOTS",
    snapshots_value(
        {
            50555: [
                (7001, 0, 49999, 49999, 64, 1712451139190, -1, -1),
                (7002, 0, 554, 50554, 74, 1712451146293, -1, -1),
            ]
        }
    ),
)
