"""Shape of the producers of a partition: sequences, epochs, duplicates, snapshots, expiry."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from streammeta.brokers.partition import producer_state
from streammeta.brokers.partition.errors import InvalidProducerEpochError, OutOfOrderSequenceError
from streammeta.brokers.partition.meta_map import encode_entry, encode_snapshots
from streammeta.brokers.partition.record_batch import read_batches
from streammeta.storage.inspection.meta_stream import decode_meta_entry
from tests.conformance.shape_facts import AnyOf, Done, Words
from tests.conformance.shape_sentences import Clause
from tests.conformance.shape_synonyms import time_in
from tests.conformance.shape_vocabulary import Answer, Given, Shape
from tests.conformance.shape_worlds import NotOfferedError, World, run_steps, sentence_of, verb
from tests.kit.kafka_batches import sequenced

_NOT_OFFERED = re.compile(
    r"transact|\btxn|marker|abort|coordinator|watermark|verification|keep_range|truncat",
    re.IGNORECASE,
)
_PRODUCER = 7


class ProducerWorld(World):
    """What a partition knows of its producers."""

    errors = (OutOfOrderSequenceError, InvalidProducerEpochError)

    def __init__(self) -> None:
        self.states = producer_state.ProducerStates()
        self.now_ms = 1
        self.snapshots: dict[int, bytes] = {}
        self.is_replicated = False

    def conditions(self, sentence: str) -> str:
        if _NOT_OFFERED.search(sentence):
            raise NotOfferedError
        replicated = re.compile(
            r",?\s*\(?(?:as |by |through |from |origin )?(?:a )?(?:replicat\w+|replica|log "
            r"(?:load\w*|replay))\)?",
            re.I,
        )
        self.is_replicated = replicated.search(sentence) is not None
        sentence = re.sub(r"\b(days?|hours?|minutes?),? (?:and|\+) (?=\d)", r"\1 ", sentence)
        return replicated.sub("", sentence)

    async def facts(self) -> Mapping[str, Any]:
        known = self.states.producers
        last = known.get(_PRODUCER) or next(iter(known.values()), None)
        entry: dict[str, Any] | None = None
        if last is not None:
            first, newest = last.batches[0], last.batches[-1]
            entry = {
                "epoch": last.epoch,
                "first_seq": AnyOf(first.first_sequence, newest.first_sequence),
                "last_seq": newest.last_sequence,
                "first_offset": AnyOf(first.first_offset, newest.first_offset),
                "last_offset": newest.last_offset,
                "timestamp": newest.timestamp,
                "batches": len(last.batches),
                "sequences": [first.first_sequence, newest.last_sequence],
                "offsets": [first.first_offset, newest.last_offset],
            }
        return {
            "entry": entry,
            "last_entry": entry,
            "producers": AnyOf(len(known), sorted(known)),
            "active_producers": AnyOf(len(known), sorted(known)),
            "map_end": self.states.map_end,
            "producer_map_end": self.states.map_end,
            "snapshots": sorted(self.snapshots),
            **(entry or {}),
        }

    @verb(r"(?:takes? (?:a )?)?snapshots?", "snapshot")
    def snapshot(self, clause: Clause) -> None:
        self.snapshots[self.states.map_end] = self.states.snapshot()

    @verb(r"reloads?|loads?|restarts?|recovers?", "reload")
    def reload(self, clause: Clause) -> None:
        clause.skip(r"state|from|snapshot")
        payload = encode_entry("PRODUCER_SNAPSHOTS", encode_snapshots(self.snapshots))
        value: Any = decode_meta_entry(payload).value
        newest = max(value, key=lambda snapshot: snapshot.offset, default=None)
        self.states = (
            producer_state.ProducerStates.of_snapshot(newest.offset, newest.producers)
            if newest
            else producer_state.ProducerStates()
        )
        self.states.expire(self.now_ms)

    @verb(r"expires?|removes? expired", "expire")
    def expire(self, clause: Clause) -> Any:
        clause.skip(r"producers?|expired|ids?")
        self.states.expire(self.now_ms)
        return AnyOf(Done(), len(self.states.producers))

    @verb(r"waits?|sleeps?|passes?|later", "wait 86400001 ms")
    def wait(self, clause: Clause) -> None:
        found = clause.take(r"(?:the )?expiration(?: time)?(?: \+ (\d+))?") or clause.take(
            r"((?:\d+ ?(?:ms|milliseconds?|s|seconds?|minutes?|hours?|days?) ?)+)|(\d+)"
        )
        assert found is not None
        if "expiration" in found[0]:
            self.now_ms += producer_state.EXPIRATION_MS + int(found[1] or 1)
        else:
            self.now_ms += int(found[2]) if found[2] else time_in(found[1]) or 0

    @verb(r"appends?|batch(?:es)?|writes?|(?=(?:producer|pid|epoch|seq)\w* \d+)", "epoch 0, seq 1")
    def append(self, clause: Clause) -> Any:
        clause.skip(r"appends?|batch(?:es)?|writes?")
        producer = clause.take(r"(?:producer|pid)(?: id)? (\d+)")
        epoch = clause.take(r"epoch (\d+)")
        span = clause.take(r"(?:seq|sequence)s? (\d+)\.\.(\d+)")
        first = int(span[1]) if span else clause.number(r"(?:seq|sequence)(?: number)? (\d+)", 0)
        offset = clause.take(r"(?:at )?(?:offset|at) (\d+)")
        time = clause.take(r"(?:at )?time(?:stamp)? (\d+)")
        count = int(span[2]) - first + 1 if span else clause.number(r"(?:of )?(\d+) records?", 1)
        number, number_epoch = (
            int(producer[1]) if producer else _PRODUCER,
            int(epoch[1]) if epoch else 0,
        )
        at = int(offset[1]) if offset else self.states.map_end
        (batch,) = read_batches(
            sequenced(
                number, number_epoch, first, count, time=int(time[1]) if time else self.now_ms
            )
        )
        repeated = self.states.duplicate_of(batch)
        if not self.is_replicated:
            try:
                self.states.check(number, number_epoch, first)
            except OutOfOrderSequenceError as error:
                if repeated is None:
                    raise
                # duplicates are looked for first: the answer is the old offset
                return _Duplicate(error, repeated.first_offset)
        self.states.record(batch, at)
        return Done(at)


class _Duplicate(Done):
    """A repeated batch: accepted with its old offset, or refused where only this check is asked."""

    def __init__(self, error: Exception, offset: int) -> None:
        super().__init__(offset)
        self.error = error

    def holds(self, stated: object) -> bool:
        if isinstance(stated, str) and stated.lower().startswith("duplicate"):
            numbers = re.findall(r"\d+", stated)
            return not numbers or int(numbers[0]) == self.value
        return stated in ("OutOfOrderSequence", "OutOfOrderSequenceException", "DuplicateSequence")


def _joined(step: Any) -> str:
    """Return a step as one sentence: [epoch 0, seq 1] is one append."""
    if isinstance(step, list) and all(isinstance(word, str) for word in step):
        return " ".join(step)
    if isinstance(step, Mapping):
        return sentence_of(step).replace(",", "")
    return re.sub(r"(epoch \d+),\s*(seq)", r"\1 \2", str(step))


def _of(producer: int | None, epoch: int | None, sentence: str) -> str:
    """Return a sentence with the producer and the epoch that a scenario has for all of them."""
    if re.search(r"\bseq", sentence) and producer is not None and "producer" not in sentence:
        sentence = f"producer {producer} {sentence}"
    if re.search(r"\bseq", sentence) and epoch is not None and "epoch" not in sentence:
        sentence = f"epoch {epoch} {sentence}"
    return sentence


async def _producers(given: Given) -> Any:
    world = ProducerWorld()
    steps = (
        given.take("input")
        if given.has("input")
        else [*given.first("appends", default=[]), *given.steps()]
    )
    said = str(
        [
            steps,
            {name: given.take(name) for name in ("transactional", "keep_range") if given.has(name)},
        ]
    )
    if _NOT_OFFERED.search(said):
        raise NotOfferedError
    producer, epoch = given.take("producer_id", None), given.take("epoch", None)
    course = await run_steps(world, [_of(producer, epoch, _joined(step)) for step in steps])
    course.extra["last"] = course.moments[-1] if course.moments else None
    return course


def _are_producer_steps(value: Any, _: Any) -> bool:
    return (
        bool(value)
        and bool(re.search(r"\bepoch\b.*\bseq|\bseq(?:uence)?s? \d|\bproducer \d", str(value)))
        and all(isinstance(item, str | list | Mapping) for item in value)
    )


def _next_sequence(given: Given) -> Answer:
    """Return whether a sequence follows another, or the bounds of a batch whose sequences wrap."""
    if given.has("batch"):
        first, last = given.take("batch")
        (batch,) = read_batches(sequenced(_PRODUCER, 0, first, (last - first) % 2**31 + 1))
        return Answer(
            {}, Words({f"ok: first {batch.base_sequence}, last {batch.last_sequence}": True})
        )
    is_next = producer_state.sequence_after(given.take("last")) == given.take("next")
    return Answer(
        {"next": producer_state.sequence_after(given.take("last"))},
        "ok" if is_next else "OutOfOrderSequence",
    )


SHAPES = (
    Shape(
        "kafka producers",
        _producers,
        "appends | steps | appends transactional | appends then | appends steps",
        "entry|last.*|producers|map_end|snapshots|after_.*|active_.*|epoch|first_seq|errors?|"
        "open_transaction",
        "ElasticProducerStateManagerTest",
        keys="keep_range producer_id epoch",
        fits=_are_producer_steps,
        world=ProducerWorld,
        words=r"\bseq|\bepoch \d|producer \d",
    ),
    Shape("kafka next sequence", _next_sequence, "last next | batch"),
)
