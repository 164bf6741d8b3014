"""Shapes of the index objects of offloaded ledgers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from streammeta.brokers.pulsar.formats.index_block import (
    IndexBlock,
    IndexEntry,
    LedgerIndex,
    StreamingIndexBlock,
    place_blocks,
)
from streammeta.brokers.pulsar.formats.ledger_values import LedgerInfo, LedgerMetadata
from tests.conformance.pulsar_formats import damages
from tests.conformance.pulsar_values import metadata_of
from tests.conformance.shape_facts import AnyOf, Fact, Keyed, Refused, Words
from tests.conformance.shape_vocabulary import Given, Shape
from tests.conformance.shape_worlds import error_names

# ---- index objects ----


def _index_entry(given: Given) -> Any:
    entry = IndexEntry(
        given.first("entry", "first_entry"),
        given.take("part"),
        given.take("offset"),
        given.first("header", "header_length"),
    )
    data = (
        entry.first_entry.to_bytes(8, "big")
        + entry.part.to_bytes(4, "big")
        + entry.offset.to_bytes(8, "big")
    )
    return {
        "data_offset": entry.data_offset,
        "entry": entry.first_entry,
        "part": entry.part,
        "offset": entry.offset,
        "hex": data.hex(),
    }


def _changed_metadata(metadata: LedgerMetadata, change: str) -> LedgerMetadata:
    """Return metadata with what is said of it: "custom metadata key1 only", "creation time 0"."""
    only = re.search(r"custom(?: metadata)? (\w+(?:(?:,| and) \w+)*) only", change)
    if only is not None:
        names = re.findall(r"\w+", only[1])
        metadata = replace(
            metadata, custom={key: value for key, value in metadata.custom.items() if key in names}
        )
    if re.search(r"(?:without|no) custom", change):
        metadata = replace(metadata, custom={})
    created = re.search(r"creation time (\d+)", change)
    return metadata if created is None else replace(metadata, created_ms=int(created[1]))


def _lookup(find: Callable[[], IndexEntry]) -> Any:
    try:
        one = find()
    except (IndexError, KeyError) as error:
        return Refused(error, "indexoutofbounds", *error_names(error))
    return [one.first_entry, one.part, one.offset]


def _round_trip(same: bool, names: Iterable[str]) -> Fact:
    return AnyOf(
        [Words({re.escape(name): same}) for name in names], same, Words({"equal|same": same})
    )


def _rows(given: Given) -> list[tuple[int, int, int]]:
    rows = given.take("blocks")
    return [
        tuple(row)
        if isinstance(row, list)
        else (row.get("first", row.get("entry")), row["part"], row["size"])
        for row in rows
    ]


def _index_v1(given: Given) -> Any:
    metadata = _changed_metadata(metadata_of(given.within("ledger")), given.take("change", ""))
    header = given.first("header_length", "data_header_length", default=128)
    rows = _rows(given)
    length = given.first("data_object_length", default=sum(size for _, _, size in rows))
    block = IndexBlock(
        metadata, length, header, LedgerIndex(place_blocks(rows, header), metadata.last_entry)
    )
    data = block.encode()
    again = IndexBlock.decode(data)
    lookups = given.take("lookups", [])
    names = (
        given.stated.get("round_trip", [])
        if isinstance(given.stated.get("round_trip"), list)
        else []
    )
    parts = {
        "ack quorum",
        "ensemble",
        "digest",
        "ensembles",
        "entry count",
        "write quorum",
        "length",
        "last entry",
        "custom",
        "data object length",
    }
    found = [_lookup(lambda at=at: again.index.find(at)) for at in lookups]  # type: ignore[misc]
    return Keyed(
        {
            "entry_count": len(again.index.entries),
            "found": found,
            "index_length_equals_bytes": int.from_bytes(data[4:8], "big") == len(data),
            "round_trip": _round_trip(again == block and parts.issuperset(names), names),
            "size": len(data),
            "hex": data.hex(),
            "metadata_length": len(metadata.encode()),
            "metadata_hex": metadata.encode().hex(),
            "data_object_length": again.data_object_length,
        },
        damages(IndexBlock.decode, data),
    )


def _index_v2(given: Given) -> Any:
    header, offset = given.first("header_length", "data_header_length", default=128), 0
    infos = {}
    for clause in given.each("ledger_infos"):
        info = LedgerInfo(
            clause.first("ledger_id", "ledger"),
            clause.take("entries"),
            clause.take("size"),
            clause.take("timestamp", None),
        )
        infos[info.ledger_id] = info
    rows: dict[int, list[tuple[int, int, int]]] = {}
    for clause in given.each("blocks"):
        row = clause.first("first", "entry"), clause.take("part"), clause.take("size")
        rows.setdefault(clause.first("ledger", "ledger_id"), []).append(row)
    ledgers = {}
    for ledger_id, blocks in rows.items():
        entries = place_blocks(blocks, header, offset)
        offset += sum(size for _, _, size in blocks)
        ledgers[ledger_id] = (infos[ledger_id], LedgerIndex(entries, infos[ledger_id].entries - 1))
    block = StreamingIndexBlock(given.first("data_object_length", default=offset), header, ledgers)
    data = block.encode()
    again = StreamingIndexBlock.decode(data)
    found = [_lookup(lambda at=at: again.find(*at)) for at in given.take("lookups", [])]  # type: ignore[misc]
    return Keyed(
        {
            "found": found,
            "entry_count": sum(len(index.entries) for _, index in again.ledgers.values()),
            "ledgers": list(again.ledgers),
            "index_length_equals_bytes": int.from_bytes(data[4:8], "big") == len(data),
            "round_trip": AnyOf(again == block, Words({"equal|same": again == block})),
            "size": len(data),
            "hex": data.hex(),
        },
        damages(StreamingIndexBlock.decode, data),
    )


def _floor_and_ceiling(given: Given) -> Any:
    entries = place_blocks([(first, 1, 1) for first in given.take("indexed")], 128)
    index = LedgerIndex(entries, given.take("entries") - 1)
    asked = given.first("ask", "lookups")
    ceilings = [index.ceiling(position) for position in asked]
    floors = [_lookup(lambda one=one: index.find(one)) for one in asked]  # type: ignore[misc]
    return {
        "floor": [floor[0] if isinstance(floor, list) else floor for floor in floors],
        "ceiling": [-1 if ceiling is None else ceiling.first_entry for ceiling in ceilings],
    }


SHAPES = (
    Shape(
        "pulsar index entry",
        _index_entry,
        "part offset header | part offset header_length",
        "data_offsets?|hex|entr.*|part.*|offset.*",
        "OffloadIndex(?:V2)?Test",
        keys="entry first_entry",
    ),
    Shape(
        "pulsar index of one ledger",
        _index_v1,
        "ledger blocks",
        "entry_count|found|index_length.*|round_trip|.*zero.*|.*short|size|hex|metadata_.*|"
        "data_object_length|empty|cut|.*_bytes",
        "OffloadIndexTest",
        keys="data_object_length header_length data_header_length lookups change",
    ),
    Shape(
        "pulsar index of several ledgers",
        _index_v2,
        "ledger_infos blocks",
        "entry_count|found|index_length.*|round_trip|.*zero.*|.*short|size|hex|ledgers|.*_bytes",
        "OffloadIndexV2Test|StreamingOffloadIndexTest",
        keys="data_object_length header_length data_header_length lookups",
    ),
    Shape(
        "pulsar index search",
        _floor_and_ceiling,
        "indexed entries ask | indexed entries lookups",
        "floor|ceiling",
        "BlobStoreBackedReadHandleImplTest",
    ),
)
