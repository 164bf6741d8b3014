"""Speed of the object format: encoding and decoding compared with memcpy, and searches in an index.

All of it is one thread's work in memory, measured in that thread's CPU time, so that other work on
the machine does not count. memcpy is the interpreter's copy of the same bytes, in pieces as large
as the object's parts, into new memory. Both release a piece before the next one, and both take
turns, so that memory is equally cold.
"""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmarks.figures import Outcome, Progress, Table, median
from scripts.benchmarks.options import option
from scripts.benchmarks.processes import thread_s
from streammeta.storage.object_format.index_block import (
    IndexBlock,
    IndexEntry,
    decode_index,
    encode_index,
)
from streammeta.storage.object_format.object_reader import ObjectReader
from streammeta.storage.object_format.object_writer import ObjectSummary, ObjectWriter
from streammeta.storage.object_format.record import RecordBatch

PART_SIZE = 16 * 1024 * 1024
WRITE_BYTES = 1024 * 1024
"""Bytes of one call of the writer."""
OFFSETS = 4
"""Offsets of each record."""
ENTRIES_A_STREAM = 20
SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes of payloads and indexes, and the amount of work."""

    payloads: tuple[int, ...] = option((1024, 16 * 1024), "bytes of a record's payload")
    entries: tuple[int, ...] = option((1, 1_000, 20_000), "entries of an index")
    volume: int = 64 * 1024 * 1024
    searches: int = 20_000
    repetitions: int = 15


def measure(_root: Path, settings: Settings, progress: Progress) -> Outcome:
    """Measure all sizes."""
    figures: dict[str, float] = {}
    coding, searching = [], []
    for payload in settings.payloads:
        progress(f"object format: records of {payload} bytes")
        found = _measure_coding(payload, settings)
        figures |= {f"{name}_{payload}_gb_per_s": value for name, value in found.items()}
        ratio = round(found["encode"] / found["memcpy"], 3)
        figures[f"encode_{payload}_share_of_memcpy"] = ratio
        coding.append((payload, *found.values(), ratio))

    for entries in settings.entries:
        progress(f"object format: search in {entries} entries")
        nanoseconds = _measure_search(entries, settings.searches)
        figures[f"find_{entries}_ns"] = nanoseconds
        searching.append((entries, nanoseconds))
    columns = ("payload, bytes", "memcpy", "encode", "with CRC-32C", "decode", "encode : memcpy")
    return Outcome(
        benchmark="objects",
        settings={"volume_bytes": settings.volume},
        figures=figures,
        tables=[
            Table(title="Object format, GB/s of payload", columns=columns, rows=tuple(coding)),
            Table(
                title="Search in an index, ns for one (stream, offset)",
                columns=("entries", "find, one entry"),
                rows=tuple(searching),
            ),
        ],
    )


def _measure_coding(payload: int, settings: Settings) -> dict[str, float]:
    records = [
        RecordBatch(1, 0, i * OFFSETS, OFFSETS, os.urandom(payload))
        for i in range(settings.volume // payload)
    ]
    data, sizes, summary = _write(records)
    kinds: dict[str, Callable[[], object]] = {
        "memcpy": lambda: _copy(memoryview(data), sizes),
        "encode": lambda: _encode(records, checksum=False),
        "encode_crc": lambda: _encode(records, checksum=True),
        "decode": lambda: _decode(data, summary),
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(settings.repetitions):
        for name, run in kinds.items():
            seconds[name].append(thread_s(run))

    return {
        name: round(settings.volume / median(times) / 1e9, 3) for name, times in seconds.items()
    }


def _write(records: list[RecordBatch]) -> tuple[bytes, list[int], ObjectSummary]:
    writer = ObjectWriter(part_size=PART_SIZE)
    writer.write(records)
    writer.finish()
    parts = list(writer.parts())
    return b"".join(parts), [len(part) for part in parts], writer.summary


def _copy(data: memoryview, sizes: list[int]) -> None:
    at = 0
    for size in sizes:
        copied = bytes(data[at : at + size])
        at += len(copied)
        del copied


def _encode(records: list[RecordBatch], *, checksum: bool) -> None:
    writer = ObjectWriter(part_size=PART_SIZE, checksum=checksum)
    step = max(1, WRITE_BYTES // len(records[0].payload))
    for first in range(0, len(records), step):
        writer.write(records[first : first + step])
        _drop_parts(writer)
    writer.finish()
    _drop_parts(writer)


def _drop_parts(writer: ObjectWriter) -> None:
    for part in writer.parts():
        del part


def _decode(data: bytes, summary: ObjectSummary) -> None:
    reader, view = ObjectReader("benchmark", len(data)), memoryview(data)
    for entry in summary.entries:
        wanted = reader.block_range(entry)
        reader.records(entry, view[wanted.start : wanted.end])


def _measure_search(entries: int, searches: int) -> float:
    index = _index(entries)
    dice = random.Random(SEED)
    ordinals = [dice.randrange(entries) for _ in range(searches)]
    wanted = [(ordinal // ENTRIES_A_STREAM, _start(ordinal) + 3) for ordinal in ordinals]

    def find() -> None:
        for stream, at in wanted:
            index.find(stream, at, at + 1, 1)

    return round(median([thread_s(find) for _ in range(5)]) / searches * 1e9, 1)


def _start(ordinal: int) -> int:
    return ordinal % ENTRIES_A_STREAM * 10


def _index(entries: int) -> IndexBlock:
    listed = [
        IndexEntry(i // ENTRIES_A_STREAM, _start(i), _start(i) + 10, 1, i * 100, 100)
        for i in range(entries)
    ]
    return decode_index(memoryview(encode_index(listed)), data_size=100 * entries)
