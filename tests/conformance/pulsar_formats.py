"""Scenarios about the byte formats of offloaded ledgers: blocks, index objects, values, names."""

from __future__ import annotations

import re
from collections.abc import Callable
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
)
from streammeta.storage.errors import PayloadError
from tests.conformance.scenario_args import Args
from tests.conformance.shape_answers import Runner, Said

UUID = "12345678-1234-1234-1234-123456789abc"


def _raises(call: Callable[[], object], kind: type[Exception]) -> bool:
    try:
        call()
    except kind:
        return True
    return False


# ---- blocks ----


def _header(given: Args) -> dict[str, Any]:
    header = BlockHeader(given.take("block_length"), given.take("first_entry_id"))
    data = header.encode()
    again = BlockHeader.decode(data)
    zeros = _raises(lambda: BlockHeader.decode(bytes(128)), PayloadError)
    short = _raises(lambda: BlockHeader.decode(data[:127]), EOFError)
    return {
        "expect": {
            "size": len(data),
            "round_trip": {
                "block_length": again.block_length,
                "first_entry_id": again.first_entry_id,
            },
            "128_zero_bytes": Said.of({'IO error "Data block header magic word not match"': zeros}),
            "127_bytes": Said.of({"end of file error": short}),
        },
        "derived": {"hex_without_trailing_zeros": data.rstrip(b"\0").hex()},
    }


def _block_facts(block: Block, *, whole: bool) -> dict[str, Any]:
    entries = list(decode_block(block.data))
    filler = block.data[len(block.data) - block.padding :]
    pattern = b"".join([filler[:4]] * (len(filler) // 4 + 1))[: len(filler)] == filler
    return {
        "entries": len(entries) if whole else "others than written",
        "entry_bytes": sum(len(one.data) for one in entries),
        "end_entry": entries[-1].entry_id if entries else block.end_entry,
        "padding": block.padding,
        "padding_pattern": filler[:4].hex() if pattern else filler.hex(),
    }


def _block(given: Args) -> dict[str, Any]:
    count, size = given.take("last_entry") + 1, given.take("entry_size")
    byte = int(given.take("entry_byte", "0x0b"), 16)
    entries = [Entry(at, bytes([byte]) * size) for at in range(count)]
    block = encode_block(entries, given.take("block_size"), 0)
    whole = list(decode_block(block.data)) == entries[: block.entries]
    return {"expect": _block_facts(block, whole=whole)}


def _small_block(given: Args) -> dict[str, Any]:
    entries = [
        Entry(one.take("id"), bytes.fromhex(one.take("hex"))) for one in given.each("entries")
    ]
    block = encode_block(entries, given.take("block_size"), entries[0].entry_id)
    header = block.data[:128]
    return {
        "derived": {
            "hex_from_byte_128": block.data[128:].hex(),
            "header_hex": header[:28].hex() + header[28:].strip(b"\0").hex(),
            "entries": block.entries,
            "end_entry": block.end_entry,
        }
    }


def _size_rule(given: list[dict[str, int]]) -> dict[str, Any]:
    found = [
        block_size(one["max"], one["entries"] - one["first"], one["ledger_bytes"] - one["written"])
        for one in given
    ]
    return {"derived": found}


def _buffered(given: Args) -> dict[str, Any]:
    count = int(given.take("entries").split()[0])
    given.take("block_size")
    entries = [Entry(at, bytes(at)) for at in range(count)]
    extras = given.take("extra")
    used = 128 + 12 * count + sum(len(one.data) for one in entries)
    blocks = [encode_block(entries, used + extra, 0, ledger_id=0) for extra in extras]
    header = BlockHeader.decode(blocks[0].data)
    same = all(list(decode_block(one.data)) == entries for one in blocks)
    tail = all(len(one.data) == used + extra for one, extra in zip(blocks, extras, strict=True))
    return {
        "expect": {
            "padding": [one.padding for one in blocks],
            "entry_ids": Said.of({f"0..{count - 1}": same}),
            "end_of_stream_repeats": tail,
            "header": {"first_entry_id": header.first_entry_id, "ledger_id": header.ledger_id},
        }
    }


# ---- index objects ----


def _entry_offsets(given: list[dict[str, int]]) -> dict[str, Any]:
    entries = [IndexEntry(one["entry"], one["part"], one["offset"], one["header"]) for one in given]
    return {"expect": {"data_offsets": [one.data_offset for one in entries]}}


def _metadata(given: Args) -> LedgerMetadata:
    custom = given.take("custom")
    return LedgerMetadata(
        given.take("length"),
        given.take("last_entry"),
        given.take("ensemble"),
        given.take("write_quorum"),
        given.take("ack_quorum"),
        Digest[given.take("digest")],
        {0: tuple(given.take("bookies"))},
        dict(custom),
    )


def _v1(given: Args, custom: tuple[str, ...] | None = None) -> IndexBlock:
    metadata = _metadata(given.within("ledger"))
    if custom is not None:
        kept = {key: value for key, value in metadata.custom.items() if key in custom}
        metadata = LedgerMetadata(
            metadata.length,
            metadata.last_entry,
            metadata.ensemble,
            metadata.write_quorum,
            metadata.ack_quorum,
            metadata.digest,
            metadata.ensembles,
            kept,
        )
    header = given.take("header_length")
    entries = placed(given.take("blocks"), header)
    length = given.take("data_object_length")
    return IndexBlock(metadata, length, header, LedgerIndex(entries, metadata.last_entry))


def _lookup(find: Callable[[], IndexEntry]) -> Any:
    try:
        one = find()
    except IndexError as error:
        return Said.of({f'IndexOutOfBounds "{error}"': True, "IndexOutOfBounds": True})
    return [one.first_entry, one.part, one.offset]


def _index_v1(given: Args) -> dict[str, Any]:
    block = _v1(given)
    data = block.encode()
    again = IndexBlock.decode(data)
    zeros = _raises(lambda: IndexBlock.decode(bytes(len(data))), PayloadError)
    short = _raises(lambda: IndexBlock.decode(data[:-1]), EOFError)
    names = ("ack quorum", "ensemble", "digest", "ensembles", "entry count")
    return {
        "expect": {
            "entry_count": len(again.index.entries),
            "found": [_lookup(lambda at=at: again.index.find(at)) for at in given.take("lookups")],  # type: ignore[misc]
            "index_length_equals_bytes": int.from_bytes(data[4:8], "big") == len(data),
            "round_trip": [Said.of({name: again == block}) for name in names],
            "zero_bytes": Said.of({'IO error "Invalid MagicWord"': zeros}),
            "one_byte_short": Said.of({"end of file error": short}),
        }
    }


def _index_v1_bytes(given: Args) -> dict[str, Any]:
    """Encode the index of another scenario, which the input is by now, with fewer values."""
    given.take("lookups")
    block = _v1(given, custom=("key1",))
    data = block.encode()
    return {
        "derived": {
            "size": len(data),
            "hex": data.hex(),
            "metadata_length": len(block.metadata.encode()),
        }
    }


def _index_v2(given: Args) -> dict[str, Any]:
    header, offset = given.take("header_length"), 0
    infos = {
        one.take("ledger_id"): LedgerInfo(
            one.take("ledger_id"), one.take("entries"), one.take("size")
        )
        for one in given.each("ledger_infos")
    }
    rows: dict[int, list[tuple[int, int, int]]] = {ledger_id: [] for ledger_id in infos}
    for one in given.each("blocks"):
        rows[one.take("ledger")].append((one.take("first"), one.take("part"), one.take("size")))
    ledgers = {}
    for ledger_id, blocks in rows.items():
        entries = placed(blocks, header, offset)
        offset += sum(size for _, _, size in blocks)
        info = infos[ledger_id]
        ledgers[ledger_id] = (info, LedgerIndex(entries, info.entries - 1))
    block = StreamingIndexBlock(given.take("data_object_length"), header, ledgers)
    data = block.encode()
    again = StreamingIndexBlock.decode(data)
    found = [_lookup(lambda at=at: again.find(*at)) for at in given.take("lookups")]  # type: ignore[misc]
    count = sum(len(index.entries) for _, index in again.ledgers.values())
    return {
        "expect": {"found": found, "entry_count": count},
        "derived": {"size": len(data), "hex": data.hex()},
    }


def _floor_and_ceiling(given: Args) -> dict[str, Any]:
    entries = placed([(first, 1, 1) for first in given.take("indexed")], 128)
    index = LedgerIndex(entries, given.take("entries") - 1)
    asked = given.take("ask")
    ceilings = [index.ceiling(one) for one in asked]
    return {
        "expect": {
            "floor": [index.find(one).first_entry for one in asked],
            "ceiling": [-1 if one is None else one.first_entry for one in ceilings],
        }
    }


# ---- values and names ----


def _context(given: Args) -> dict[str, Any]:
    context = OffloadContext(
        given.take("uuid"),
        given.take("complete"),
        None,
        given.take("timestamp"),
        given.take("driver"),
        dict(given.take("driver_metadata")),
    )
    one = given.within("ledger_info")
    info = LedgerInfo(
        one.take("ledger_id"),
        one.take("entries"),
        one.take("size"),
        one.take("timestamp"),
        context,
    )
    data = info.encode()
    is_same = LedgerInfo.decode(data) == info
    return {
        "derived": {
            "context_hex": context.encode().hex(),
            "ledger_info_hex": data.hex() if is_same else "another when read again",
        }
    }


def _names(given: Args) -> dict[str, Any]:
    if not re.match(r"u \(36 characters\)", given.take("uuid")):
        raise ValueError("uuid is something else")
    ledger_id = given.take("ledger_id")
    found = [object_names.data_name(UUID, ledger_id), object_names.index_name(UUID, ledger_id)]
    said = {"data name": found[0], "index name": found[1]}
    ledgers = given.take("parse_ledger_of")
    uuids = [
        object_names.uuid_of(said.get(name, name), number)
        for name, number in given.take("parse_uuid_of")
    ]
    return {
        "expect": {
            "ledger": [object_names.ledger_id_of(said.get(name, name)) for name in ledgers],
            "uuid": ["u" if one == UUID else one for one in uuids],
        },
        "derived": {"names": [name.replace(UUID, "<u>") for name in found]},
    }


RUNNERS: dict[str, Runner] = {
    "data_block_header": _header,
    "block_with_padding": _block,
    "block_without_padding": _block,
    "block_too_small_for_entry": _block,
    "block_bytes_small": _small_block,
    "block_size_rule": _size_rule,
    "buffered_stream_padding": _buffered,
    "index_entry_offsets": _entry_offsets,
    "index_v1": _index_v1,
    "index_v1_bytes": _index_v1_bytes,
    "index_v2_two_ledgers": _index_v2,
    "index_floor_and_ceiling": _floor_and_ceiling,
    "offload_context_bytes": _context,
    "object_names": _names,
}
