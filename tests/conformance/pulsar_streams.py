"""Shape of streaming offload: entries of ledgers that go into segments of a bounded size."""

from __future__ import annotations

import re
from typing import Any

from streammeta.brokers.pulsar.blobs.blobs import MemoryBlobs
from streammeta.brokers.pulsar.formats.blocks import Entry
from streammeta.brokers.pulsar.segments import Segments
from streammeta.brokers.pulsar.streaming import OfferResult, SegmentLimits, StreamingSegment
from tests.conformance.pulsar_offload import READ_ERRORS
from tests.conformance.shape_facts import AnyOf, Keyed, Words
from tests.conformance.shape_sentences import number_of, range_of
from tests.conformance.shape_vocabulary import Given, Shape
from tests.conformance.shape_worlds import attempt

_Place = tuple[int, int]


def _places(given: Given, limit: int) -> tuple[list[_Place], int]:
    """Return ledger and entry of all that is offered, and the size of an entry."""
    size = given.take("entry_size", None)
    listed = [
        *_listed(given.take("entries", None)),
        *_listed(given.take("segments", None)),
        *_listed(given.take("ledgers", None)),
    ]
    places, sizes = list[_Place](), list[int]()
    for said in listed:
        found, own = _run_of_entries(said)
        places += found
        sizes += [own] * bool(own)
    count = len(places)
    segments = given.take("segments", None)
    shares = len(segments) if isinstance(segments, list) else 1
    return places, size or (sizes[0] if sizes else limit * shares // max(count, 1))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _run_of_entries(said: Any) -> tuple[list[_Place], int]:
    """Return entries of words such as "10 of 100 bytes in ledger 0", or of {ledger, entries}."""
    if isinstance(said, dict):
        number = int(said.get("ledger") or said.get("ledger_id") or 0)
        entries = said.get("entries", 0)
        span = (
            range_of(str(entries))
            if isinstance(entries, str)
            else range(said.get("first", 0), said.get("first", 0) + entries)
        )
        return [(number, at) for at in span or ()], said.get("size", 0)
    if isinstance(said, list):
        return [(said[0], said[1])], 0
    text = str(said)
    ledger = re.search(r"ledger (\d+)", text)
    number = int(ledger[1]) if ledger else 0
    text = re.sub(r"(?:in|of) ledger \d+", "", text)
    sized = re.search(r"(\w+)(?: entries)? of (\d+) bytes", text)
    span = range_of(text)
    if span is None:
        span = range(number_of(sized[1]) if sized else int((re.search(r"\d+", text) or ["0"])[0]))
    return [(number, at) for at in span], int(sized[2]) if sized else 0


class _Writer:
    """Streams entries, into the next segment where one is full."""

    def __init__(self, limits: SegmentLimits) -> None:
        self.blobs = MemoryBlobs()
        self.ends: list[_Place] = []
        self.results: list[OfferResult] = []
        self.taken: dict[int, list[Entry]] = {}
        self._limits = limits
        self._segment: StreamingSegment | None = None

    async def offer(self, ledger: int, entry: Entry) -> None:
        if self._segment is None:
            self._segment = self._begin(ledger, entry.entry_id)
        done = self._segment.offer(ledger, entry)
        if done is OfferResult.FAIL_SEGMENT_CLOSED:
            await self.end()
            self._segment = self._begin(ledger, entry.entry_id)
            done = self._segment.offer(ledger, entry)
        elif done is OfferResult.FAIL_BUFFER_FULL:
            await self._segment.upload_blocks()
            done = self._segment.offer(ledger, entry)
        self.results.append(done)
        if done is OfferResult.SUCCESS:
            self.taken.setdefault(ledger, []).append(entry)

    def _begin(self, ledger: int, entry: int) -> StreamingSegment:
        return StreamingSegment(
            self.blobs, f"segment-{len(self.ends)}", ledger, entry, limits=self._limits
        )

    async def end(self) -> None:
        if self._segment is not None and self.results and OfferResult.SUCCESS in self.results:
            end = await self._segment.finish()
            self.ends.append((end.ledger_id, end.entry_id))
        self._segment = None

    async def read(self, ledger: int, first: int, last: int) -> list[Entry]:
        uuids = [f"segment-{number}" for number in range(len(self.ends))]
        return await (await Segments(self.blobs).open(ledger, uuids)).read(first, last)


async def _streaming(given: Given) -> Any:
    limit = given.first("segment_max_bytes", "max_segment_bytes", "segment_bytes", default=1 << 30)
    block = given.first("block_bytes", "block_size", "min_block_size", default=300)
    buffer = given.first("buffer_bytes", "max_buffer_bytes", default=10 << 20)
    writer = _Writer(SegmentLimits(limit, buffer, block))
    places, size = _places(given, limit)
    for ledger, at in places:
        await writer.offer(ledger, Entry(at, bytes([at % 251]) * size))
    await writer.end()
    ledgers = list(writer.taken)

    async def equal(ledger: int, first: int, last: int) -> Any:
        wanted = [one for one in writer.taken.get(ledger, []) if first <= one.entry_id <= last]
        outcome = await attempt(writer.read(ledger, first, last), *READ_ERRORS)
        value = getattr(outcome, "value", None)
        same = value == wanted and len(wanted) == last - first + 1
        return outcome if value is None else AnyOf(Words({"equal|same|right|ok": same}), same)

    facts: dict[str, Any] = {
        "end_ledger": writer.ends[-1][0] if writer.ends else None,
        "end_entry": writer.ends[-1][1] if writer.ends else None,
        "end_entries": [entry for _, entry in writer.ends],
        "end_ledgers": [ledger for ledger, _ in writer.ends],
        "ends": [list(end) for end in writer.ends],
        "segments": len(writer.ends),
        "results": [result.value for result in writer.results],
        "ledgers": ledgers,
    }
    for name in map(str, given.stated):
        found = re.fullmatch(r"read(?:_ledger_(\d+))?_(\d+)_(\d+)", name)
        if found is not None:
            facts[name] = await equal(
                int(found[1]) if found[1] else ledgers[0], int(found[2]), int(found[3])
            )
        elif name in ("read", "entries", "random_reads", "read_all", "data"):
            every = [
                await equal(id_, writer.taken[id_][0].entry_id, writer.taken[id_][-1].entry_id)
                for id_ in ledgers
            ]
            facts[name] = AnyOf(
                every, Words({"equal|same|right|ok": all(fact.holds("equal") for fact in every)})
            )
    spans = given.take("reads", [])
    if isinstance(spans, str):  # any ranges of all there is
        ends = [entry.entry_id for entry in writer.taken[ledgers[0]]]
        spans = [[first, last] for first in ends[::3] for last in ends[::4] if first <= last]
        every = [await equal(ledgers[0], first, last) for first, last in spans]
        facts["reads"] = Words({"equal|same|right|ok": all(fact.holds("equal") for fact in every)})
        return Keyed(facts)
    reads = [await equal(*([ledgers[0], *span] if len(span) == 2 else span)) for span in spans]
    facts |= {"reads": reads, "errors": reads} if reads else {}
    return Keyed(facts)


SHAPES = (
    Shape(
        "pulsar streaming",
        _streaming,
        "segment_max_bytes entries | segment_max_bytes segments | segment_max_bytes ledgers | "
        "segment_bytes entries | max_segment_bytes entries | buffer_bytes entries",
        "end_.*|ends|read.*|segments|results|ledgers|entries|errors|random_reads",
        "BlobStoreManagedLedgerOffloaderStreamingTest",
        keys="entry_size block_bytes block_size min_block_size max_buffer_bytes reads",
    ),
)
