"""Objects for tests of reading: one of several streams, and reading one that is in memory."""

from __future__ import annotations

from streammeta.storage.errors import Deviation
from streammeta.storage.object_format.composite import LinkedObject
from streammeta.storage.object_format.index_block import IndexBlock, IndexEntry
from streammeta.storage.object_format.object_reader import ObjectReader
from streammeta.storage.object_format.record import RecordBatch
from tests.kit.built_objects import BuiltObject, ObjectBuilder

PUBLISHED_LINES = """\
indexStartPosition: 5242006
indexBlockLength: 252
streamId=3, startOffset=4, endOffset=6, recordCount=2, startPosition=0, size=262
streamId=4, startOffset=50390, endOffset=51410, recordCount=68, startPosition=262, size=1060062
streamId=4, startOffset=51410, endOffset=52430, recordCount=68, startPosition=1060324, size=1060062
streamId=4, startOffset=52430, endOffset=53450, recordCount=68, startPosition=2120386, size=1060062
streamId=4, startOffset=53450, endOffset=54470, recordCount=68, startPosition=3180448, size=1060062
streamId=4, startOffset=54470, endOffset=55430, recordCount=64, startPosition=4240510, size=997706
streamId=5, startOffset=8376, endOffset=9384, recordCount=84, startPosition=5238216, size=3790
objectId=78, ranges=[3:4-6, 4:50390-55430, 5:8376-9384, ]""".splitlines()
"""How the published dump of a real object shows its footer, index and ranges."""


def published_object(*meta: bytes) -> BuiltObject:
    """The object whose dump was published, with payloads of zeros but for the two of `meta`."""
    first, second = meta or (bytes(138), bytes(48))
    builder = ObjectBuilder(1024 * 1024)
    builder.write([RecordBatch(3, 0, 4, 1, first), RecordBatch(3, 0, 5, 1, second)])
    builder.write([RecordBatch(4, 0, 50390 + 15 * i, 15, bytes(15556)) for i in range(336)])
    builder.write([RecordBatch(5, 0, 8376 + 12 * i, 12, bytes(12)) for i in range(84)])
    return builder.finish()


def small_object() -> BuiltObject:
    """Five blocks of three streams, one with a gap."""
    builder = ObjectBuilder(64)
    builder.write([RecordBatch(3, 1, 4, 2, b"hi!")])
    builder.write([RecordBatch(4, 0, 10 + 5 * i, 5, bytes([i]) * 40) for i in range(3)])
    builder.write([RecordBatch(5, 0, 0, 12, b"d" * 12), RecordBatch(5, 0, 20, 12, b"")])
    return builder.finish()


LINKS = (
    LinkedObject(101, 0, (IndexEntry(9, 0, 10, 1, 0, 53),)),
    LinkedObject(102, 2, (IndexEntry(9, 10, 20, 1, 0, 113), IndexEntry(9, 20, 25, 1, 113, 48))),
)
"""Links of a small composite object."""


def read_whole(
    data: bytes, size: int | None = None, noted: list[Deviation] | None = None
) -> tuple[IndexBlock, list[RecordBatch]]:
    """Read all of an object the way a reader of a store does."""
    reader = ObjectReader("test", len(data) if size is None else size, noted)
    while reader.needed is not None:
        reader.receive(data[reader.needed.start : reader.needed.end])
    records: list[RecordBatch] = []
    for entry in reader.index:
        wanted = reader.block_range(entry)
        records += reader.records(entry, data[wanted.start : wanted.end])
    return reader.index, records
