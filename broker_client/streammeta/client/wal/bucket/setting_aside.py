"""Objects of acknowledged records that can't be committed, kept for the operator.

Their keys are under `<namespace>/wal/<node>/aside/`. The log never reads, changes or removes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from streammeta.client.wal.bucket.bucket_slots import SlotStore
from streammeta.storage.object_format.record import RecordBatch, encode_record
from streammeta.storage.object_log import slot as slot_format
from streammeta.storage.object_log.slot import LogName
from streammeta.storage.object_store.protocol.base import ObjectStore


async def write_aside(
    slots: SlotStore, log: LogName, records: Iterable[RecordBatch], reason: str
) -> str | None:
    """Write records to an object next to the logs of a node. Return its key, None for no records.

    The same records have the same key, so a repeated recovery leaves one object.
    """
    encoded = [encode_record(record) for record in records]
    if not encoded:
        return None

    body = b"".join(encoded)
    # From the records alone: the reason may differ between two attempts.
    token = hashlib.sha256(body).hexdigest()[:32]
    slot = slot_format.Slot(
        log,
        bytes(slot_format.LOG_ID_SIZE),
        0,
        0,
        0,
        slot_format.SlotKind.ASIDE,
        len(encoded),
        slot_format.aside_body(reason, body),
    )
    key = log.aside_key(token)
    await slots.put(key, slot.encode())

    return key


def read_aside(store: ObjectStore, key: str, namespace: str) -> tuple[str, list[RecordBatch]]:
    """Return the reason and the records of an object of records set aside.

    Raises `CorruptObjectError`, `ObjectNotFoundError`, and errors of the read.
    """
    slot = slot_format.decode_slot(store.get_range(key), key, namespace)
    return slot.reason(), slot.records(key)
