"""Shapes of the blocks of offloaded ledgers, and facts of damaged bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from streammeta.brokers.pulsar.formats import blocks
from streammeta.brokers.pulsar.streaming import streaming_block_size
from streammeta.storage.errors import PayloadError
from tests.conformance.shape_facts import AnyOf, Fact, Keyed, Refused, Words
from tests.conformance.shape_sentences import number_of, size_of
from tests.conformance.shape_vocabulary import Answer, Given, Shape
from tests.conformance.shape_worlds import error_names

UUID = "12345678-1234-1234-1234-123456789abc"


def raised_by(call: Callable[[], object]) -> Fact | None:
    try:
        call()
    except (PayloadError, EOFError, IndexError, ValueError) as error:
        names = ["io error", "ioexception"] if isinstance(error, PayloadError) else []
        return Damage(error, *names, *error_names(error))
    return None


class Damage(Refused):
    """An error over bytes; the peer's message of a wrong magic number has other words."""

    def holds(self, stated: object) -> bool:
        if isinstance(self.error, PayloadError) and isinstance(stated, str):
            stated = re.sub(r'"[^"]*magic ?word[^"]*"', "", stated, flags=re.IGNORECASE)
        return super().holds(stated)


def damages(
    decode: Callable[[bytes], object], data: bytes
) -> dict[str, Callable[[re.Match[str]], Any]]:
    """Return facts of damaged bytes: zeros, and bytes that are cut, of any number."""
    return {
        r"(\d+)_zero_bytes": lambda found: raised_by(lambda: decode(bytes(int(found[1])))),
        r"zero_bytes|zeros|wrong_magic|bad_magic": lambda _: raised_by(
            lambda: decode(bytes(len(data)))
        ),
        r"one_byte_short|cut|truncated": lambda _: raised_by(lambda: decode(data[:-1])),
        r"(\d+)_bytes_short": lambda found: raised_by(lambda: decode(data[: -int(found[1])])),
        r"(\d+)_bytes": lambda found: raised_by(lambda: decode(data[: int(found[1])])),
        r"empty": lambda _: raised_by(lambda: decode(b"")),
    }


# ---- blocks ----


def _header(given: Given) -> Any:
    if given.has("hex"):
        header = blocks.BlockHeader.decode(bytes.fromhex(given.take("hex")).ljust(128, b"\0"))
    else:
        header = blocks.BlockHeader(
            given.take("block_length"),
            given.first("first_entry_id", "first_entry", default=0),
            given.take("ledger_id", None),
        )
    data = header.encode()
    again = blocks.BlockHeader.decode(data)
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
        damages(blocks.BlockHeader.decode, data),
    )


def entries_of(given: Given) -> list[blocks.Entry]:
    """Return the entries of an input: listed, counted, or all of one size."""
    listed = given.take("entries", None)
    if isinstance(listed, list):
        items = given.each("entries")
        return [
            blocks.Entry(item.first("id", "entry_id", default=at), _body(item))
            for at, item in enumerate(items)
        ]
    first = given.first("first_entry", "first_entry_id", "start_entry", default=0)
    said = str(listed or "")
    sizes = re.search(r"(\d+|\w+)(?: entries)? of (\d+)(?:\.\.(\d+))? bytes", said)
    byte = int(str(given.take("entry_byte", "0x0b")), 16)
    if sizes is not None:
        count, low, high = number_of(sizes[1]), int(sizes[2]), int(sizes[3] or sizes[2])
        step = max(high - low + 1, 1)
        return [blocks.Entry(first + at, bytes([byte]) * (low + at % step)) for at in range(count)]
    size = given.first("entry_size", default=10)
    last = given.first("last_entry", "lac")
    count = last + 1 - first if last is not None else int(listed) if listed is not None else 0
    return [blocks.Entry(first + at, bytes([byte]) * size) for at in range(count)]


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
    wanted = 128 + 12 * len(entries) + sum(len(entry.data) for entry in entries)
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
            blocks.encode_block(entries, size, first, 0 if streams and ledger is None else ledger),
            entries,
            size,
        )
        for size in sizes
    ]
    if not isinstance(extras, list):
        return Keyed(facts[0])
    merged = {name: [fact[name] for fact in facts] for name in facts[0]}
    every = {"entry_ids": facts[0]["entry_ids"], "header": facts[0]["header"]}
    same = all(fact["end_of_stream_repeats"] is True for fact in facts)
    return Keyed({**merged, **every, "end_of_stream_repeats": same})


def _expression(said: str, entries: list[blocks.Entry]) -> int:
    said = re.sub(r"\bdata\b", str(sum(len(entry.data) for entry in entries)), said)
    return size_of(re.sub(r"\b(?:header|entries)\b", "0", said))


def _block_facts(block: blocks.Block, entries: list[blocks.Entry], size: int) -> dict[str, Any]:
    found = list(blocks.decode_block(block.data))
    filler = block.data[len(block.data) - block.padding :]
    pattern = (bytes.fromhex("fedcdead") * (len(filler) // 4 + 1))[: len(filler)] == filler
    header = blocks.BlockHeader.decode(block.data)
    whole = found == entries[: block.entries]
    ids = [entry.entry_id for entry in found]
    named = {f"{ids[0]}..{ids[-1]}": whole} if ids else {"none": True}
    return {
        "entries": len(found) if whole else "others than written",
        "entry_count": len(found) if whole else "others than written",
        "entry_bytes": sum(len(entry.data) for entry in found),
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
        found = blocks.block_size(limit, left, data)
    else:
        found = streaming_block_size(
            given.take("entries"),
            given.first("bytes", "data_bytes"),
            given.first("min", "minimum", "least", default=0),
        )
    return Answer({"size": found, "block_size": found}, found)


SHAPES = (
    Shape(
        "pulsar block header",
        _header,
        "block_length | block_length first_entry_id | hex",
        "size|header_.*|round_trip|hex.*|.*_bytes|magic|block_length|first_entry_id|ledger_id|"
        ".*short",
        "DataBlockHeader(?:V2)?Test|StreamingDataBlockHeaderTest",
        keys="first_entry ledger_id",
    ),
    Shape(
        "pulsar block",
        _one_block,
        "last_entry entry_size block_size | entries block_size | lac entry_size block_size | "
        "entries extra | first_entry entry_size block_size",
        "entr.*|end_entry|padding.*|hex.*|header.*|size|end_of_stream.*|block_length|"
        "first_entry.*|last_entry",
        "BlockAwareSegmentInputStreamTest|BufferedOffloadStreamTest",
        keys="entry_byte size ledger_id first_entry_id start_entry",
    ),
    Shape(
        "pulsar block size",
        _size_rule,
        "max entries | max_block_size entries | entries bytes | entries data_bytes",
        "size|block_size",
        keys="ledger_bytes first first_entry written min minimum least",
    ),
)
