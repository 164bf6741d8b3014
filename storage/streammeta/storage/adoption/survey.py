"""Survey of a bucket after a restore: its objects, and the records of undecided ones.

Reads whole objects, because record headers contain the epochs and the comparison of objects needs
their records. `planner` makes the decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b

from streammeta.storage.adoption import model
from streammeta.storage.errors import CorruptObjectError, ObjectNotFoundError
from streammeta.storage.object_format.composite import decode_composite
from streammeta.storage.object_format.object_key import OwnKey, key_for, parse_key
from streammeta.storage.object_format.object_reader import ObjectReader
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.protocol.base import ObjectStore

# Each reader keeps one whole object in memory.
READERS = 8
"""Number of objects that are read concurrently."""

# Collisions must not happen by chance, and nobody gains from a forged one.
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object of the cluster in the bucket. `size` is in bytes."""

    object_id: int
    size: int


def list_stored(store: ObjectStore, namespace: str) -> Iterator[StoredObject]:
    """Yield all objects of a namespace, in any order."""
    for info in store.list_objects():
        owner = parse_key(info.key, namespace)
        if isinstance(owner, OwnKey):
            yield StoredObject(owner.object_id, info.size)


def find_present(
    store: ObjectStore, namespace: str, stored: Iterable[StoredObject], wanted: Iterable[int]
) -> set[int]:
    """Return the listed objects, and existing wanted objects missing from the list.

    Raises:
        StorageError: the store can't be read.
    """
    present = {listed.object_id for listed in stored}
    # A listing may miss objects created meanwhile, so their absence is confirmed one by one.
    unlisted = sorted(set(wanted) - present)
    return present | set(_look_up(store, namespace, unlisted))


def _look_up(store: ObjectStore, namespace: str, object_ids: Sequence[int]) -> Iterator[int]:
    """Yield the ids that exist in the bucket."""

    def is_present(object_id: int) -> bool:
        try:
            store.head(key_for(object_id, namespace))
        except ObjectNotFoundError:
            return False
        return True

    with ThreadPoolExecutor(READERS, "adoption") as pool:
        for object_id, found in zip(object_ids, pool.map(is_present, object_ids), strict=True):
            if found:
                yield object_id


def copy_torn(
    store: ObjectStore, namespace: str, object_ids: Iterable[int], free: Iterable[int]
) -> None:
    """Copy objects to keys of free ids, so that they can be adopted under these ids.

    Raises:
        StorageError: the store can't copy them.
    """
    for object_id, copy_id in zip(object_ids, free, strict=False):
        store.copy(key_for(object_id, namespace), key_for(copy_id, namespace))


def read_candidates(
    store: ObjectStore,
    namespace: str,
    stored: Iterable[StoredObject],
    on_read: Callable[[int], None],
) -> Iterator[model.Candidate | model.LeftBehind]:
    """Yield each object with its records, or the reason without any. `on_read` gets the count.

    Raises:
        StorageError: the store can't be read.
    """
    with ThreadPoolExecutor(READERS, "adoption") as pool:
        results = pool.map(lambda listed: _read(store, namespace, listed), stored)
        for count, result in enumerate(results, 1):
            on_read(count)
            yield result


def _read(
    store: ObjectStore, namespace: str, stored: StoredObject
) -> model.Candidate | model.LeftBehind:
    key = key_for(stored.object_id, namespace)
    data = memoryview(store.get_range(key))
    try:
        reader = _opened(key, data)
        if reader.relative:
            return model.LeftBehind(stored.object_id, -1, -1, -1, model.Why.RELATIVE)
        return model.Candidate(
            stored.object_id, len(data), tuple(_runs(stored.object_id, reader, data))
        )
    except CorruptObjectError:
        # A composite has no records, so the reader of other objects rejects it.
        why = model.Why.COMPOSITE if _is_composite(key, data) else model.Why.UNREADABLE
        return model.LeftBehind(stored.object_id, -1, -1, -1, why)


def _opened(key: str, data: memoryview) -> ObjectReader:
    """Return a reader that has read the index of an object."""
    reader = ObjectReader(key, len(data), accept_relative=True)
    while (wanted := reader.needed) is not None:
        reader.receive(data[wanted.start : wanted.end])
    return reader


def _runs(object_id: int, reader: ObjectReader, data: memoryview) -> Iterator[model.StoredRun]:
    """Yield the runs of an object's records, by stream, then offset."""
    run: list[model.Entry] = []
    stream_id = -1
    for entry in reader.index:
        if run and (entry.stream_id, entry.start_offset) != (stream_id, run[-1][-1].end):
            yield model.StoredRun(object_id, stream_id, tuple(run))
            run = []
        stream_id = entry.stream_id
        place = reader.block_range(entry)
        records = reader.records(entry, data[place.start : place.end])
        run.append(tuple(map(_stored, records)))

    if run:
        yield model.StoredRun(object_id, stream_id, tuple(run))


def _stored(batch: RecordBatch) -> model.StoredRecord:
    digest = blake2b(batch.payload, digest_size=_DIGEST_BYTES).digest()
    return model.StoredRecord(batch.base_offset, batch.end_offset, batch.epoch, digest)


def _is_composite(key: str, data: memoryview) -> bool:
    try:
        decode_composite(data, source=key)
    except CorruptObjectError:
        return False
    return True
