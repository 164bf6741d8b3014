"""Objects of records that were acknowledged and can't be committed, kept for the operator.

They lie under `<namespace>/wal/<node>/aside/`; the log never reads, changes or removes them again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from streammeta.client.wal.bucket.bucket_slots import SlotStore
from streammeta.storage.object_format.record import RecordBatch, encode_record
from streammeta.storage.object_log.slot import (
    LOG_ID_SIZE,
    Slot,
    SlotKind,
    aside_body,
    decode_slot,
)
from streammeta.storage.object_log.slot_keys import LogName
from streammeta.storage.object_store.protocol.base import ObjectStore


async def write_aside(
    slots: SlotStore, log: LogName, records: Iterable[RecordBatch], reason: str
) -> str | None:
    """Write records beside the logs of a node; return the key, None for no records.

    The same records have the same key, so a recovery that is repeated leaves one object.
    """
    encoded = [encode_record(one) for one in records]
    if not encoded:
        return None
    body = b"".join(encoded)
    token = hashlib.sha256(body).hexdigest()[:32]
    slot = Slot(
        log,
        bytes(LOG_ID_SIZE),
        0,
        0,
        0,
        SlotKind.ASIDE,
        len(encoded),
        aside_body(reason, body),
    )
    key = log.aside_key(token)
    await slots.put(key, slot.encode())
    return key


def read_aside(store: ObjectStore, key: str, namespace: str) -> tuple[str, list[RecordBatch]]:
    """Return the reason and the records of an object of records set aside.

    Raises `CorruptObjectError` or `ObjectNotFoundError`, and what reading raises.
    """
    slot = decode_slot(store.get_range(key), key, namespace)
    return slot.reason(), slot.records(key)
