"""Shapes of offloaded ledgers: copied, read, deleted, streamed, and what failures leave."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from streammeta.brokers.pulsar.blobs.blobs import BlobError, MemoryBlobs, NoSuchBlobError
from streammeta.brokers.pulsar.blobs.range_stream import RangeStream
from streammeta.brokers.pulsar.formats.blocks import HEADER_SIZE, Entry
from streammeta.brokers.pulsar.formats.ledger_values import LedgerMetadata
from streammeta.brokers.pulsar.formats.object_names import VERSION_KEY, data_name, index_name
from streammeta.brokers.pulsar.formats.read_errors import (
    NoSuchLedgerError,
    OffloadReadHandleClosedError,
)
from streammeta.brokers.pulsar.offloader import NotAppendableError, OffloadedLedger, Offloader
from streammeta.storage.errors import PayloadError
from tests.conformance.pulsar_formats import UUID, entries_of
from tests.conformance.shape_facts import AnyOf, Done, Keyed, Refused, Words
from tests.conformance.shape_sentences import Clause, number_of
from tests.conformance.shape_vocabulary import Answer, Given, Shape, take_steps
from tests.conformance.shape_worlds import World, attempt, run_steps, verb

LEDGER = 7
NAMES = data_name(UUID, LEDGER), index_name(UUID, LEDGER)
BLOCK_SIZE = 5 << 20
READ_ERRORS = (
    OSError,
    ValueError,
    NoSuchLedgerError,
    OffloadReadHandleClosedError,
    BlobError,
    NoSuchBlobError,
    PayloadError,
    NotAppendableError,
)


class MemoryLedger:
    """A ledger in memory."""

    def __init__(self, ledger_id: int, bodies: list[bytes], *, is_closed: bool = True) -> None:
        self.ledger_id = ledger_id
        self.entries = [Entry(at, body) for at, body in enumerate(bodies)]
        self.is_closed = is_closed

    @property
    def metadata(self) -> LedgerMetadata:
        return LedgerMetadata(sum(len(entry.data) for entry in self.entries), len(self.entries) - 1)

    async def read(self, first: int, last: int) -> list[Entry]:
        return self.entries[first : last + 1]


def ledger_of_blocks(blocks: int = 1, block_size: int = BLOCK_SIZE) -> MemoryLedger:
    size = block_size // 16
    count = (block_size - HEADER_SIZE) // (size + 12) * blocks
    return MemoryLedger(LEDGER, [bytes([at % 251]) * size for at in range(count)])


def presence(blobs: MemoryBlobs) -> dict[str, bool]:
    data, index = (name in blobs.kept for name in NAMES)
    return {"data": data, "index": index}


_FAILURES = {
    r"start of the (?:multipart )?upload|multipart upload|begin|initiat\w*": "begin",
    r"(?:a |the |one )?(?:data block )?part(?: upload)?|uploading a part": "part",
    r"completion|complet\w+|completing the upload": "complete",
    r"(?:the |putting the )?index(?: object| block)?": "put",
    r"(?:the )?(?:deletion|delete)(?: of .*)?|deleting": "delete",
    r"(?:the )?reads?": "read",
}


class CopyWorld(World):
    """A ledger, its copy in a store that fails on demand, and a handle of the copy."""

    errors = READ_ERRORS

    def __init__(
        self, ledger: MemoryLedger, block_size: int, *, is_appendable: bool = True
    ) -> None:
        self.blobs = MemoryBlobs()
        self.ledger = ledger
        self.offloader = Offloader(self.blobs, block_size, is_appendable=is_appendable)
        self.handle: OffloadedLedger | None = None
        self.states: list[str] = []

    async def facts(self) -> Mapping[str, Any]:
        data, index = (name in self.blobs.kept for name in NAMES)
        handle = self.handle
        last = self.ledger.metadata.last_entry
        return {
            "data": data,
            "index": index,
            "data_object": data,
            "index_object": index,
            "objects": len(self.blobs.kept),
            "state": AnyOf(list(self.states), self.states[-1] if self.states else None),
            "last_entry_same": handle is not None and handle.metadata.last_entry == last,
            "last_entry": None if handle is None else handle.metadata.last_entry,
            "scanned": [ledger_id for ledger_id, _ in await self.offloader.list_copies()],
        }

    def conditions(self, sentence: str) -> str:
        self.blobs.fails = set()
        for words, call in _FAILURES.items():
            found = re.search(
                rf"(?:(?:while|but|and|where|when) )?(?:{words}) (?:upload )?(?:fails|"
                rf"failing|is refused)",
                sentence,
                re.I,
            )
            if found is not None:
                self.blobs.fails.add(call)
                left = sentence.replace(found[0], "").strip(" ,;:")
                return left or ("delete" if call == "delete" else "offload")
        return sentence

    @verb(r"offloads?|copy|copies", "offload")
    async def offload(self, clause: Clause) -> None:
        clause.skip(r"ledger|empty|open")
        await self.offloader.offload(self.ledger, UUID, {"ManagedLedgerName": "ml"})

    @verb(r"opens?", "open")
    async def open(self, clause: Clause) -> None:
        clause.skip(r"handle|copy|ledger")
        self.handle = await self.offloader.open(LEDGER, UUID)
        self.states.append("Opened")

    @verb(r"closes?", "close")
    def close(self, clause: Clause) -> None:
        clause.skip(r"handle|copy|ledger")
        assert self.handle is not None
        self.handle.close()
        self.states.append("Closed" if self.handle.is_closed else "Opened")

    @verb(r"reads?", "read [0, 9]")
    async def read(self, clause: Clause) -> Any:
        found = clause.take(r"[(\[]\s*([^,\]]+),\s*([^)\]]+)[)\]]") or clause.take(
            r"(-?\d+)(?:\.\.| to )(.+)"
        )
        clause.skip(r"all|every(?:thing)?|entries|ledger|handle")
        return await self.read_range(*((found[1], found[2]) if found else (0, "last entry")))

    async def read_range(self, first: Any, last: Any) -> Any:
        if self.handle is None:
            await self.open(Clause("open"))
        assert self.handle is not None
        begin, end = (self._entry(position) for position in (first, last))
        read = await self.handle.read(begin, end)
        same = read == self.ledger.entries[begin : end + 1]
        return Done(
            AnyOf(
                Words({"ok|equal|right|same|ids, lengths and bytes(?: are)? equal": same}),
                same,
                len(read) if same else None,
            )
        )

    def _entry(self, said: Any) -> int:
        """Return an entry's id: a number, or words such as "last entry + 1"."""
        text = str(said).strip()
        found = re.fullmatch(r"(?:the )?(?:last|end)(?: entry)?(?: ?([+-]) ?(\d+))?", text)
        if found is None:
            return number_of(text)
        return self.ledger.metadata.last_entry + (int(f"{found[1]}{found[2]}") if found[1] else 0)

    @verb(r"deletes?|removes?|destroys?", "delete")
    async def delete(self, clause: Clause) -> None:
        if clause.take(r"(?:the )?data object(?: after .*)?") is not None:
            self.blobs.kept.pop(NAMES[0], None)
        elif clause.take(r"(?:the )?index object(?: after .*)?") is not None:
            self.blobs.kept.pop(NAMES[1], None)
        else:
            clause.skip(r"offloaded|copy|objects|ledger|both")
            await self.offloader.delete(LEDGER, UUID)

    @verb(r"scans?|lists?", "scan")
    async def scan(self, clause: Clause) -> Any:
        clause.skip(r"ledgers|offloaded|objects")
        return len(await self.offloader.list_copies())


def _world(given: Given) -> CopyWorld:
    block_size = given.first("block_size", "max_block_size", default=BLOCK_SIZE)
    said = str(given.take("ledger", ""))
    blocks = re.search(r"(\w+) blocks?", said)
    is_closed = given.take("closed", True)
    if given.has("length") or given.has("last_entry"):
        count, length = given.first("last_entry", default=-1) + 1, given.first("length", default=0)
        bodies = [bytes(length // count)] * count if count else []
        return CopyWorld(MemoryLedger(LEDGER, bodies, is_closed=is_closed), block_size)
    if given.has("entries"):
        bodies = [entry.data for entry in entries_of(given)]
        return CopyWorld(MemoryLedger(LEDGER, bodies, is_closed=is_closed), block_size)
    appendable = given.take("offloader", "appendable") == "appendable"
    ledger = ledger_of_blocks(number_of(blocks[1]) if blocks else 1, block_size)
    ledger.is_closed = is_closed
    return CopyWorld(ledger, block_size, is_appendable=appendable)


async def _copy(given: Given) -> Any:
    """Run steps on a copy; a scenario without any offloads first."""
    world = _world(given)
    versions = {
        name: given.take(f"format_version_of_{name}_object", None) for name in ("data", "index")
    }
    if any(value is not None for value in versions.values()):
        return await _versions(world, versions)
    special = {
        name: given.take(name)
        for name in ("delete", "read_after_close", "reads")
        if given.has(name)
    }
    steps = take_steps(given, CopyWorld)
    if not steps or not re.match(r"(offload|start|.*fails)", str(steps[0])):
        steps = ["offload", *steps]
    if "delete" in special:
        said = str(special["delete"])
        steps += ["open", f"delete {said}"] if "after open" in said else [f"delete {said}", "open"]
        steps += ["read"]
    if special.get("read_after_close"):
        steps += ["open", "close", "read"]
    reads = special.get("reads")
    course = await run_steps(world, steps)
    if reads is not None:
        return await _reads(world, course, reads)
    if (
        any(name in ("entries", "read", "last_entry_same", "data_same") for name in given.stated)
        and len(steps) == 1
    ):
        course = await run_steps(world, ["open", "read"])
        course.extra["entries"] = course.moments[-1].outcome
    return course


async def _reads(world: CopyWorld, course: Any, reads: Any) -> Answer:
    if isinstance(reads, str):  # so many random ranges
        count = int((re.search(r"\d+", reads) or ["10"])[0])
        chance, last = random.Random(7), world.ledger.metadata.last_entry
        pairs = [sorted((chance.randint(0, last), chance.randint(0, last))) for _ in range(count)]
    else:
        pairs = reads
    done = [await attempt(world.read_range(*pair), *READ_ERRORS) for pair in pairs]
    course.extra |= dict.fromkeys(("reads", "results"), done)
    good = [step for step in done if isinstance(step, Done)]
    every = Words(
        {
            "ok|equal|same|ids, lengths and bytes equal": all(
                step.holds("ok") and step.holds("equal") for step in done
            )
        }
    )
    course.extra |= {
        "both": every,
        "each": every,
        "all": every,
        "entries": every,
        "read": every,
        "data": every,
    }
    course.extra |= {"errors": [one for one in done if isinstance(one, Refused)], "good": len(good)}
    return Answer(course, done)


async def _versions(world: CopyWorld, versions: Mapping[str, Any]) -> Any:
    """Give an object versions one after the other; say how opening and reading go."""
    opens, reads = list[Any](), list[Any]()
    for at, name in enumerate(("data", "index")):
        for version in versions[name] if isinstance(versions[name], list) else [versions[name]]:
            if version is None:
                continue
            await world.offloader.offload(world.ledger, UUID, {})
            world.blobs.kept[NAMES[at]][1][VERSION_KEY] = str(version)
            world.handle = None
            opened = await attempt(world.open(Clause("open")), *READ_ERRORS)
            opens.append(opened)
            reads.append(
                opened
                if isinstance(opened, Refused)
                else await attempt(world.read_range(0, 0), *READ_ERRORS)
            )
    return {
        "open": _same(opens),
        "read": _same(reads),
        "opens": opens,
        "reads": reads,
        "error": _same(reads),
    }


def _same(outcomes: list[Any]) -> Any:
    """Return what holds of every outcome."""

    class Every(Done):
        def holds(self, stated: object) -> bool:
            if isinstance(stated, list):
                return len(stated) == len(outcomes) and all(
                    outcome.holds(said) for outcome, said in zip(outcomes, stated, strict=True)
                )
            return bool(outcomes) and all(outcome.holds(stated) for outcome in outcomes)

    return Every(outcomes)


async def _failures(given: Given) -> Any:
    """Run each failure on a copy of its own."""
    found, courses = list[Any](), list[Any]()
    for said in given.take("input"):
        course = await run_steps(CopyWorld(ledger_of_blocks(), BLOCK_SIZE), [said])
        courses.append(course)
        error = getattr(course.moments[-1].outcome, "error", None)
        own = Words({"(?:that|error) of the store": isinstance(error, BlobError)})
        found.append(Keyed({**course.end, "error": AnyOf(own, course.moments[-1].outcome)}))

    class Every(Keyed):
        def find(self, key: str, stated: object) -> Any:
            if key in ("each", "all", "every"):
                return self
            facts = [step.find(key, stated) for step in found]
            return _same_facts(facts)

    return Answer(
        Every({"error": None, "data_object": None, "index_object": None}),
        found,
        [mismatch for course in courses for mismatch in course.mismatches],
    )


def _same_facts(facts: list[Any]) -> Any:
    class Every(Done):
        def holds(self, stated: object) -> bool:
            return all(AnyOf(fact).holds(stated) for fact in facts)

    return Every(facts)


async def _ranges(given: Given) -> Answer:
    world = CopyWorld(ledger_of_blocks(), BLOCK_SIZE)
    course = await run_steps(world, ["offload"])
    return await _reads(world, course, given.take("input"))


_STEP = re.compile(r"\b(offload|open|read|close|delete|scan)", re.IGNORECASE)


def _are_steps(value: Any, _: Any) -> bool:
    return (
        bool(value)
        and all(isinstance(item, str) and _STEP.match(item) for item in value)
        and "offload" in str(value[0])
    )


def _are_failures(value: Any, _: Any) -> bool:
    return bool(value) and all(isinstance(one, str) and re.search(r"\bfail", one) for one in value)


def _are_ranges(value: Any, stated: Any) -> bool:
    pairs = bool(value) and all(isinstance(item, list) and len(item) == 2 for item in value)
    said = isinstance(stated, list) and all(isinstance(item, str) for item in stated)
    return pairs and said and not any(isinstance(pair[0], str) or pair[0] is None for pair in value)


# ---- streams over ranges ----


class StreamWorld(World):
    """A stream over an object of known bytes."""

    errors = (OSError, ValueError)

    def __init__(self, data: bytes, buffer_size: int) -> None:
        self.data = data
        self.requests: list[tuple[int, int]] = []

        async def read(start: int, length: int) -> bytes:
            self.requests.append((start, length))
            return data[start : start + length]

        self.stream = RangeStream(read, len(data), buffer_size)

    async def facts(self) -> Mapping[str, Any]:
        return {"position": self.stream.position, "requests": len(self.requests)}

    @verb(r"seeks?[_ ]?(?:forward)?", "seekForward 6172")
    async def seek(self, clause: Clause) -> Any:
        position = clause.number(r"(\d+)")
        self.stream.seek_forward(position)
        probe = RangeStream(self._probe, len(self.data), 1000, position)
        return Done(
            Words(
                {
                    "ok": True,
                    "ok, rest of (?:the )?object (?:is )?equal": await self._is_rest(
                        probe, position
                    ),
                }
            )
        )

    async def _probe(self, start: int, length: int) -> bytes:
        return self.data[start : start + length]

    async def _is_rest(self, stream: RangeStream, position: int) -> bool:
        return await drained(stream, 100) == self.data[position:]

    @verb(r"reads?", "read 100")
    async def read(self, clause: Clause) -> Any:
        at = self.stream.position
        rest = clause.take(r"(?:the )?rest|to the end|all")
        part = await (
            drained(self.stream, 100) if rest else self.stream.read(clause.number(r"(\d+)"))
        )
        same = part == self.data[at : at + len(part)]
        return Done(AnyOf(len(part) if same else -1, Words({"ok|equal": same})))


async def drained(stream: RangeStream, step: int) -> bytes:
    parts = []
    while part := await stream.read(step):
        parts.append(part)
    return b"".join(parts)


def _object(size: int) -> bytes:
    return bytes(at % 253 for at in range(size))


async def _stream(given: Given) -> Any:
    size, buffer = given.take("size"), given.first("buffer", "buffer_size", default=1000)
    data = _object(size)
    steps = take_steps(given, StreamWorld)
    course = await run_steps(StreamWorld(data, buffer), steps)

    async def equal_in(step: int) -> bool:
        world = StreamWorld(data, buffer)
        return await drained(world.stream, step) == data

    steps = [int(n) for n in re.findall(r"(\d+) byte", str(given.stated.get("bytes", "")))] or [100]
    same = all([await equal_in(step) for step in (1, *steps)])

    async def nothing(start: int, length: int) -> bytes:
        raise OSError("no such object")

    missing = await attempt(RangeStream(nothing, size, buffer).read(1), OSError)
    course.extra["bytes"] = Words(
        {r"equal(?: by single bytes)?(?: and by \d+ bytes? reads)?": same, "same": same}
    )
    course.extra["missing_object"] = course.extra["error"] = missing
    world = StreamWorld(data, buffer)
    await drained(world.stream, 100)
    course.extra["range_reads"] = len(world.requests)
    return course


SHAPES = (
    Shape(
        "pulsar copy",
        _copy,
        "ledger block_size | reads | read_after_close | steps | entries block_size | delete | "
        "format_version_of_data_object | format_version_of_index_object | "
        "last_entry length closed | last_entry closed | ledger steps | ledger reads",
        "last_entry.*|entries|open|read.*|both|each|error.*|state|after_.*|before_.*|data.*|"
        "index.*|objects|scanned",
        "BlobStoreManagedLedgerOffloaderTest",
        keys="max_block_size entry_size entry_byte then offloader",
        fits=_are_steps,
        world=CopyWorld,
        words="offload",
    ),
    Shape(
        "pulsar failing offload",
        _failures,
        sources="BlobStoreManagedLedgerOffloaderTest",
        fits=_are_failures,
    ),
    Shape(
        "pulsar reads of a copy",
        _ranges,
        sources="BlobStoreManagedLedgerOffloaderTest",
        fits=_are_ranges,
    ),
    Shape(
        "pulsar range stream",
        _stream,
        "size buffer | size steps | size buffer_size",
        "bytes|missing_object|error|position|requests|range_reads",
        "BlobStoreBackedInputStreamTest",
        world=StreamWorld,
        words="seek",
    ),
)
