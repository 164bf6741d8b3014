"""Key-values of a MetaStream as brokers write them, for tests."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import google_crc32c

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
