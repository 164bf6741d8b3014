"""Shapes of the byte formats of offloaded ledgers: blocks, index objects, values, names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from streammeta.brokers.pulsar import object_names
from streammeta.brokers.pulsar.blocks import (
    Block,
    BlockHeader,
    Entry,
    block_size,
    decode_block,
    encode_block,
)
from streammeta.brokers.pulsar.index_block import (
    IndexBlock,
    IndexEntry,
    LedgerIndex,
    StreamingIndexBlock,
    placed,
)
from streammeta.brokers.pulsar.ledger_values import (
    Digest,
    LedgerInfo,
    LedgerMetadata,
    OffloadContext,
    OffloadSegment,
)
from streammeta.brokers.pulsar.streaming import streaming_block_size
from streammeta.storage.errors import PayloadError
from tests.conformance.shape_facts import AnyOf, Data, Fact, Keyed, Refused, Words
from tests.conformance.shape_sentences import number_of, size_of
from tests.conformance.shape_vocabulary import Answer, Given, Shape, keys
from tests.conformance.shape_worlds import error_names

UUID = "12345678-1234-1234-1234-123456789abc"


def _raises(call: Callable[[], object]) -> Fact | None:
    try:
        call()
    except (PayloadError, EOFError, IndexError, ValueError) as error:
        names = ["io error", "ioexception"] if isinstance(error, PayloadError) else []
        return _Damage(error, *names, *error_names(error))
    return None


class _Damage(Refused):
    """An error over bytes; the peer's message of a wrong magic number has other words."""

    def holds(self, stated: object) -> bool:
        if isinstance(self.error, PayloadError) and isinstance(stated, str):
            stated = re.sub(r'"[^"]*magic ?word[^"]*"', "", stated, flags=re.IGNORECASE)
        return super().holds(stated)


def _damages(
    decode: Callable[[bytes], object], data: bytes
) -> dict[str, Callable[[re.Match[str]], Any]]:
    """Return facts of damaged bytes: zeros, and bytes that are cut, of any number."""
    return {
        r"(\d+)_zero_bytes": lambda found: _raises(lambda: decode(bytes(int(found[1])))),
        r"zero_bytes|zeros|wrong_magic|bad_magic": lambda _: _raises(
            lambda: decode(bytes(len(data)))
        ),
        r"one_byte_short|cut|truncated": lambda _: _raises(lambda: decode(data[:-1])),
        r"(\d+)_bytes_short": lambda found: _raises(lambda: decode(data[: -int(found[1])])),
        r"(\d+)_bytes": lambda found: _raises(lambda: decode(data[: int(found[1])])),
        r"empty": lambda _: _raises(lambda: decode(b"")),
    }


# ---- blocks ----


def _header(given: Given) -> Any:
    if given.has("hex"):
        header = BlockHeader.decode(bytes.fromhex(given.take("hex")).ljust(128, b"\0"))
    else:
        header = BlockHeader(
            given.take("block_length"),
            given.first("first_entry_id", "first_entry", default=0),
            given.take("ledger_id", None),
        )
    data = header.encode()
    again = BlockHeader.decode(data)
    fields = {
        "block_length": again.block_length,
        "first_entry_id": again.first_entry_id,
        "ledger_id": again.ledger_id,
    }
    return Keyed(
        {
            "size": len(data),
            "header_length": len(data),
            "round_trip": fields if again == header else "another",
            "hex": data.hex(),
            "hex_without_trailing_zeros": data.rstrip(b"\0").hex(),
            "header_hex": AnyOf(data.hex(), data.rstrip(b"\0").hex()),
            "magic": f"0x{data[:4].hex()}",
            **fields,
        },
        _damages(BlockHeader.decode, data),
    )


def entries_of(given: Given) -> list[Entry]:
    """Return the entries of an input: listed, counted, or all of one size."""
    listed = given.take("entries", None)
    if isinstance(listed, list):
        items = given.each("entries")
        return [
            Entry(one.first("id", "entry_id", default=at), _body(one))
            for at, one in enumerate(items)
        ]
    first = given.first("first_entry", "first_entry_id", "start_entry", default=0)
    said = str(listed or "")
    sizes = re.search(r"(\d+|\w+)(?: entries)? of (\d+)(?:\.\.(\d+))? bytes", said)
    byte = int(str(given.take("entry_byte", "0x0b")), 16)
    if sizes is not None:
        count, low, high = number_of(sizes[1]), int(sizes[2]), int(sizes[3] or sizes[2])
        step = max(high - low + 1, 1)
        return [Entry(first + at, bytes([byte]) * (low + at % step)) for at in range(count)]
    size = given.first("entry_size", default=10)
    last = given.first("last_entry", "lac")
    count = last + 1 - first if last is not None else int(listed) if listed is not None else 0
    return [Entry(first + at, bytes([byte]) * size) for at in range(count)]


def _body(one: Given) -> bytes:
    if one.has("hex"):
        return bytes.fromhex(one.take("hex"))
    return (
        str(one.first("text", "data", default="")).encode()
        if one.has("text") or one.has("data")
        else bytes(one.take("size", 0))
    )


def _one_block(given: Given) -> Any:
    entries = entries_of(given)
    first = entries[0].entry_id if entries else given.first("first_entry", default=0)
    size = given.first("block_size", "size")
    ledger = given.take("ledger_id", None)
    wanted = 128 + 12 * len(entries) + sum(len(one.data) for one in entries)
    extras = given.take("extra", None)
    if extras is not None or isinstance(size, str):
        sizes = [wanted + one for one in (extras if isinstance(extras, list) else [extras or 0])]
        if isinstance(size, str) and "extra" not in size and extras is None:
            sizes = [_expression(size, entries)]
    else:
        sizes = [wanted if size is None else size_of(size)]
    streams = extras is not None
    facts = [
        _block_facts(
            encode_block(entries, one, first, 0 if streams and ledger is None else ledger),
            entries,
            one,
        )
        for one in sizes
    ]
    if not isinstance(extras, list):
        return Keyed(facts[0])
    merged = {name: [one[name] for one in facts] for name in facts[0]}
    every = {"entry_ids": facts[0]["entry_ids"], "header": facts[0]["header"]}
    same = all(one["end_of_stream_repeats"] is True for one in facts)
    return Keyed({**merged, **every, "end_of_stream_repeats": same})


def _expression(said: str, entries: list[Entry]) -> int:
    said = re.sub(r"\bdata\b", str(sum(len(one.data) for one in entries)), said)
    return size_of(re.sub(r"\b(?:header|entries)\b", "0", said))


def _block_facts(block: Block, entries: list[Entry], size: int) -> dict[str, Any]:
    found = list(decode_block(block.data))
    filler = block.data[len(block.data) - block.padding :]
    pattern = (bytes.fromhex("fedcdead") * (len(filler) // 4 + 1))[: len(filler)] == filler
    header = BlockHeader.decode(block.data)
    whole = found == entries[: block.entries]
    ids = [one.entry_id for one in found]
    named = {f"{ids[0]}..{ids[-1]}": whole} if ids else {"none": True}
    return {
        "entries": len(found) if whole else "others than written",
        "entry_count": len(found) if whole else "others than written",
        "entry_bytes": sum(len(one.data) for one in found),
        "end_entry": ids[-1] if ids else block.end_entry,
        "last_entry": ids[-1] if ids else block.end_entry,
        "padding": block.padding,
        "padding_pattern": AnyOf(filler[:4].hex(), "fedcdead") if pattern else filler.hex(),
        "padding_hex": filler.hex(),
        "size": len(block.data),
        "block_length": header.block_length,
        "hex": block.data.hex(),
        "hex_from_byte_128": block.data[128:].hex(),
        "header_hex": AnyOf(
            block.data[:28].hex() + block.data[28:128].strip(b"\0").hex(),
            block.data[:128].hex(),
            block.data[:128].rstrip(b"\0").hex(),
        ),
        "entry_ids": AnyOf(ids, Words({re.escape(name): holds for name, holds in named.items()})),
        "end_of_stream_repeats": len(block.data) == size,
        "header": {
            "first_entry_id": header.first_entry_id,
            "ledger_id": header.ledger_id,
            "block_length": header.block_length,
        },
        "first_entry": header.first_entry_id,
        "first_entry_id": header.first_entry_id,
    }


def _size_rule(given: Given) -> Answer:
    if given.has("max") or given.has("max_block_size"):
        limit = given.first("max", "max_block_size")
        left = given.take("entries") - given.first("first", "first_entry", default=0)
        data = given.first("ledger_bytes", "bytes") - given.first("written", default=0)
        found = block_size(limit, left, data)
    else:
        found = streaming_block_size(
            given.take("entries"),
            given.first("bytes", "data_bytes"),
            given.first("min", "minimum", "least", default=0),
        )
    return Answer({"size": found, "block_size": found}, found)


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


def _metadata_of(given: Given) -> LedgerMetadata:
    segments = given.first("ensembles", "segments")
    bookies = given.take("bookies", [])
    ensembles = (
        {int(first): tuple(names) for first, names in segments.items()}
        if segments
        else {0: tuple(bookies)}
        if bookies
        else {}
    )
    metadata = LedgerMetadata(
        given.take("length"),
        given.take("last_entry"),
        given.first("ensemble", "ensemble_size", default=3),
        given.first("write_quorum", "quorum", default=3),
        given.first("ack_quorum", default=2),
        Digest[given.first("digest", default="CRC32C")],
        ensembles,
        dict(given.first("custom", "custom_metadata", default={})),
    )
    created = given.first("created", "created_ms", "ctime")
    return metadata if created is None else replace(metadata, created_ms=created)


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
        tuple(one)
        if isinstance(one, list)
        else (one.get("first", one.get("entry")), one["part"], one["size"])
        for one in rows
    ]


def _index_v1(given: Given) -> Any:
    metadata = _changed_metadata(_metadata_of(given.within("ledger")), given.take("change", ""))
    header = given.first("header_length", "data_header_length", default=128)
    rows = _rows(given)
    length = given.first("data_object_length", default=sum(size for _, _, size in rows))
    block = IndexBlock(
        metadata, length, header, LedgerIndex(placed(rows, header), metadata.last_entry)
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
        _damages(IndexBlock.decode, data),
    )


def _index_v2(given: Given) -> Any:
    header, offset = given.first("header_length", "data_header_length", default=128), 0
    infos = {}
    for one in given.each("ledger_infos"):
        info = LedgerInfo(
            one.first("ledger_id", "ledger"),
            one.take("entries"),
            one.take("size"),
            one.take("timestamp", None),
        )
        infos[info.ledger_id] = info
    rows: dict[int, list[tuple[int, int, int]]] = {}
    for one in given.each("blocks"):
        row = one.first("first", "entry"), one.take("part"), one.take("size")
        rows.setdefault(one.first("ledger", "ledger_id"), []).append(row)
    ledgers = {}
    for ledger_id, blocks in rows.items():
        entries = placed(blocks, header, offset)
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
        _damages(StreamingIndexBlock.decode, data),
    )


def _floor_and_ceiling(given: Given) -> Any:
    entries = placed([(first, 1, 1) for first in given.take("indexed")], 128)
    index = LedgerIndex(entries, given.take("entries") - 1)
    asked = given.first("ask", "lookups")
    ceilings = [index.ceiling(one) for one in asked]
    floors = [_lookup(lambda one=one: index.find(one)) for one in asked]  # type: ignore[misc]
    return {
        "floor": [one[0] if isinstance(one, list) else one for one in floors],
        "ceiling": [-1 if one is None else one.first_entry for one in ceilings],
    }


# ---- values and names ----


def _context_of(given: Given) -> OffloadContext:
    segments = tuple(
        OffloadSegment(
            one.take("uuid"),
            complete=one.take("complete", None),
            **{
                field: one.take(name)
                for name, field in (
                    ("assigned_timestamp", "assigned_ms"),
                    ("offloaded_timestamp", "offloaded_ms"),
                    ("end_entry", "end_entry"),
                )
                if one.has(name)
            },
        )
        for one in given.each("segments", [])
    )
    return OffloadContext(
        given.take("uuid", ""),
        given.take("complete", None) or False,
        given.first("bookkeeper_deleted", "source_deleted"),
        given.take("timestamp", None),
        given.take("driver", ""),
        dict(given.take("driver_metadata", {})),
        **({"segments": segments} if segments else {}),
    )


def _context(given: Given) -> Any:
    context = _context_of(given)
    facts: dict[str, Any] = {
        "context_hex": context.encode().hex(),
        "hex": context.encode().hex(),
        "size": len(context.encode()),
    }
    facts["round_trip"] = OffloadContext.decode(context.encode()) == context
    if given.has("ledger_info"):
        one = given.within("ledger_info")
        facts |= _info_facts(
            LedgerInfo(
                one.first("ledger_id", "ledger"),
                one.take("entries", 0),
                one.take("size", 0),
                one.take("timestamp", None),
                context,
            )
        )
    return facts


def _info_facts(info: LedgerInfo) -> dict[str, Any]:
    data = info.encode()
    same = LedgerInfo.decode(data) == info
    return {
        "ledger_info_hex": data.hex() if same else "another when read again",
        "info_size": len(data),
    }


def _info(given: Given) -> Any:
    context = _context_of(given.within("context")) if given.has("context") else None
    info = LedgerInfo(
        given.take("ledger_id"),
        given.take("entries", 0),
        given.take("size", 0),
        given.take("timestamp", None),
        context,
    )
    facts = _info_facts(info)
    return {
        **facts,
        "hex": facts["ledger_info_hex"],
        "size": facts["info_size"],
        "round_trip": LedgerInfo.decode(info.encode()) == info,
    }


def _ledger_metadata(given: Given) -> Any:
    metadata = _metadata_of(given)
    data = metadata.encode()
    same = LedgerMetadata.decode(data) == metadata
    return {
        "hex": data.hex(),
        "metadata_hex": data.hex(),
        "size": len(data),
        "metadata_length": len(data),
        "round_trip": AnyOf(same, Words({"equal|same": same})),
    }


def _names(given: Given) -> Any:
    uuid = str(given.first("uuid", default=UUID))
    is_letter = not re.fullmatch(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", uuid)
    letter, uuid = uuid.split(maxsplit=1)[0], UUID if is_letter else uuid
    ledger_id = given.first("ledger_id", default=0)
    made = [object_names.data_name(uuid, ledger_id), object_names.index_name(uuid, ledger_id)]
    said = {"data name": made[0], "index name": made[1]}
    segments = list(object_names.segment_names(uuid))
    ledgers = given.first("parse_ledger_of", default=[])
    pairs = given.first("parse_uuid_of", default=[])
    uuids = [object_names.uuid_of(said.get(name, name), number) for name, number in pairs]

    def short(name: str) -> Any:
        return AnyOf(name, name.replace(uuid, f"<{letter}>"), name.replace(uuid, letter))

    return {
        "ledger": [object_names.ledger_id_of(said.get(name, name)) for name in ledgers],
        "uuid": [AnyOf(one, letter if is_letter and one == uuid else one) for one in uuids],
        "names": [short(one) for one in made],
        "data": short(made[0]),
        "index": short(made[1]),
        "data_name": short(made[0]),
        "index_name": short(made[1]),
        "streaming_names": [short(one) for one in segments],
    }


def _object_metadata(given: Given) -> Any:
    made = object_names.object_metadata(
        given.take("role"), dict(given.first("extra", "extra_metadata", default={}))
    )
    known = object_names.is_known_version(made)
    return Keyed({**made, "known_version": known, "keys": sorted(made), "data": Data(b"")})


SHAPES = (
    Shape(
        "pulsar block header",
        _header,
        (keys("block_length"), keys("block_length first_entry_id"), keys("hex")),
        keys("block_length first_entry_id first_entry ledger_id hex"),
        r"size|header_.*|round_trip|hex.*|.*_bytes|magic|block_length|"
        r"first_entry_id|ledger_id|.*short",
        "DataBlockHeader(?:V2)?Test|StreamingDataBlockHeaderTest",
    ),
    Shape(
        "pulsar block",
        _one_block,
        (
            keys("last_entry entry_size block_size"),
            keys("entries block_size"),
            keys("lac entry_size block_size"),
            keys("entries extra"),
            keys("first_entry entry_size block_size"),
        ),
        keys(
            "last_entry lac entries entry_size entry_byte block_size size extra "
            "ledger_id first_entry first_entry_id start_entry"
        ),
        r"entr.*|end_entry|padding.*|hex.*|header.*|size|end_of_stream.*|"
        r"block_length|first_entry.*|last_entry",
        "BlockAwareSegmentInputStreamTest|BufferedOffloadStreamTest",
    ),
    Shape(
        "pulsar block size",
        _size_rule,
        (
            keys("max entries"),
            keys("max_block_size entries"),
            keys("entries bytes"),
            keys("entries data_bytes"),
        ),
        keys(
            "max max_block_size entries ledger_bytes bytes data_bytes first "
            "first_entry written min minimum least"
        ),
        "size|block_size",
    ),
    Shape(
        "pulsar index entry",
        _index_entry,
        (keys("part offset header"), keys("part offset header_length")),
        keys("entry first_entry part offset header header_length"),
        r"data_offsets?|hex|entr.*|part.*|offset.*",
        "OffloadIndex(?:V2)?Test",
    ),
    Shape(
        "pulsar index of one ledger",
        _index_v1,
        (keys("ledger blocks"),),
        keys("ledger blocks data_object_length header_length data_header_length lookups change"),
        r"entry_count|found|index_length.*|round_trip|.*zero.*|.*short|size|hex|"
        r"metadata_.*|data_object_length|empty|cut|.*_bytes",
        "OffloadIndexTest",
    ),
    Shape(
        "pulsar index of several ledgers",
        _index_v2,
        (keys("ledger_infos blocks"),),
        keys("ledger_infos blocks data_object_length header_length data_header_length lookups"),
        r"entry_count|found|index_length.*|round_trip|.*zero.*|.*short|size|hex|"
        r"ledgers|.*_bytes",
        "OffloadIndexV2Test|StreamingOffloadIndexTest",
    ),
    Shape(
        "pulsar index search",
        _floor_and_ceiling,
        (keys("indexed entries ask"), keys("indexed entries lookups")),
        facts="floor|ceiling",
        sources="BlobStoreBackedReadHandleImplTest",
    ),
    Shape(
        "pulsar offload context",
        _context,
        (
            keys("uuid complete"),
            keys("uuid driver"),
            keys("segments driver"),
            keys("uuid timestamp"),
        ),
        keys(
            "uuid complete bookkeeper_deleted source_deleted timestamp driver "
            "driver_metadata segments ledger_info"
        ),
        r"context_hex|ledger_info_hex|hex|size|round_trip|info_size",
        "OffloadUtils",
    ),
    Shape(
        "pulsar ledger info",
        _info,
        (keys("ledger_id entries size"), keys("ledger_id context")),
        keys("ledger_id entries size timestamp context"),
        r"ledger_info_hex|hex|size|round_trip",
    ),
    Shape(
        "pulsar ledger metadata",
        _ledger_metadata,
        (
            keys("length last_entry ensemble"),
            keys("length last_entry digest"),
            keys("length last_entry bookies"),
        ),
        keys(
            "length last_entry ensemble ensemble_size write_quorum quorum "
            "ack_quorum digest bookies ensembles segments custom custom_metadata "
            "created created_ms ctime"
        ),
        r"hex|metadata_.*|size|round_trip",
    ),
    Shape(
        "pulsar object names",
        _names,
        (keys("parse_ledger_of"), keys("parse_uuid_of"), keys("uuid ledger_id")),
        keys("uuid ledger_id parse_ledger_of parse_uuid_of"),
        r"ledger|uuid|names|.*_names?|data|index",
        "DataBlockUtilsTest",
    ),
    Shape(
        "pulsar object metadata",
        _object_metadata,
        (keys("role"),),
        keys("role extra extra_metadata"),
        r"role|keys|known_version|.*ormatversion|ManagedLedgerName",
        "DataBlockUtilsTest",
    ),
)
