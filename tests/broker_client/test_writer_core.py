"""The stream writer's state machine in any order of events, and appends no object can hold."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from streammeta.client import OpenedStream, WriterConfig, errors
from streammeta.client.arguments import INT64_MAX
from streammeta.client.config import ACK_OVERHEAD, RECORD_OVERHEAD
from streammeta.client.parts import StreamWriter
from streammeta.client.writing import core as writing_core
from streammeta.client.writing.admission import AttachedStreams
from streammeta.client.writing.batch import BatchUpload, Stage
from streammeta.client.writing.record_buffer import StreamRun
from streammeta.storage.object_format.record import RECORD_HEADER_SIZE
from tests.kit.fake_broker import writing
from tests.kit.seeds import seeds

_STREAMS = 4
_CONFIG = WriterConfig(
    max_buffer_bytes=6_000, upload_bytes=700, parallel_uploads=2, max_streams=3, linger_s=1.0
)


class BrokenLogError(Exception):
    """A reason to accept no more appends."""


@dataclass(eq=False)
class Append:
    """An append that is admitted or waits for space."""

    stream_id: int
    size: int
    is_woken: bool = True

    def set(self) -> None:
        self.is_woken = True


@dataclass(eq=False)
class Turn:
    """A caller that was woken, or not yet."""

    is_woken: bool = False

    def set(self) -> None:
        self.is_woken = True


@dataclass(eq=False)
class Flush(Turn):
    """A flush, and the batches that it has to wait for."""

    batches: list[BatchUpload] = field(default_factory=list)


class WriterSimulation:
    """A core whose loop carries out its effects late, in any order, and often fails."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.cancellations = 0.02
        self.streams = AttachedStreams()
        opened = [OpenedStream(stream_id, 1, 0, 0) for stream_id in range(_STREAMS)]
        self.streams.attach(opened)
        self.core = writing_core.WriterCore(_CONFIG, self.streams)
        self.waiting: list[Append] = []
        self.flushes: list[Flush] = []
        self.turns: dict[BatchUpload, Turn] = {}
        self.sealed: list[BatchUpload] = []
        self.settled: set[BatchUpload] = set()
        self.submitting: set[BatchUpload] = set()
        self.submitted: dict[int, list[StreamRun]] = defaultdict(list)
        self.outcomes: dict[StreamRun, Exception | None] = {}
        self.held: set[BatchUpload] = set()

    def step(self) -> None:
        """Let one event happen, carry out its effects and check the invariants."""
        events = [self.append] * 6 + [self.retry] * 4 + [self.advance] * 12
        events += [self.core.seal, self.flush]
        if self.rng.random() < 0.001:
            events = [self.fence, self.core.close, self.reject]
        self.rng.choice(events)()
        self.carry_out()
        self.check()

    def append(self) -> None:
        append = Append(self.rng.randrange(_STREAMS), self.rng.choice([1, 50, 300, 900]))
        if not self.admit(append, is_waiting=False):
            self.waiting.append(append)
            self.core.wait(append)
            append.is_woken = self.core._waiting[0] is append

    def retry(self) -> None:
        """Try an append again that was woken, or cancel any."""
        for append in self.waiting:
            is_cancelled = self.rng.random() < self.cancellations
            if is_cancelled or append.is_woken:
                append.is_woken = False
                if is_cancelled or self.admit(append, is_waiting=True):
                    self.waiting.remove(append)
                    self.core.leave(append)
                else:
                    self.core.make_space()
                return

    def admit(self, append: Append, *, is_waiting: bool) -> bool:
        """Return whether the append was admitted or rejected."""
        size = append.size + RECORD_HEADER_SIZE
        cost = append.size + RECORD_OVERHEAD + ACK_OVERHEAD
        try:
            stream = self.core.accepting(append.stream_id)
        except (errors.BrokerClientError, BrokenLogError):
            return True
        assert not self.core.is_closed
        assert self.core.fenced is None

        run = self.core.admit(stream, 1, cost, size, append if is_waiting else None)
        if run is None:
            return False
        first = self.waiting[0] if self.waiting else append
        assert first is append, "an append overtook another one that waited for space"
        self.carry_out()
        run.add(b"." * append.size, 1)
        self.core.count_append(run, cost, size)
        assert self.core.buffered <= _CONFIG.max_buffer_bytes
        return True

    def flush(self) -> None:
        flush = Flush()
        self.core.flush(flush)
        flush.batches = list(self.core.in_flight)
        self.flushes.append(flush)

    def fence(self) -> None:
        self.core.fence(_fencing())

    def reject(self) -> None:
        self.core.reject(BrokenLogError())

    def advance(self) -> None:
        """Let a batch end its stage, with or without a failure."""
        ready = [batch for batch, turn in self.turns.items() if turn.is_woken]
        if not ready:
            return
        batch = self.rng.choice(ready)
        for run in batch.runs:
            if batch.stage is Stage.UPLOAD and self.rng.random() < 0.02:
                batch.failures.setdefault(run, ValueError("upload"))

        if batch.stage is Stage.FINISH and batch not in self.held and self.rng.random() < 0.2:
            self.held.add(batch)
            self.core.hold()
        elif batch.stage is Stage.FINISH or self.rng.random() < 0.005:
            self.settle(batch)
        else:
            if batch.stage is Stage.SUBMIT:
                self.submit(batch)
            self.enter(batch, Stage(batch.stage + 1))

    def enter(self, batch: BatchUpload, stage: Stage) -> None:
        has_entered = self.core.enter(batch, stage)
        self.turns[batch] = turn = Turn(is_woken=has_entered)
        if not has_entered:
            batch.turn = turn

    def submit(self, batch: BatchUpload) -> None:
        for run in batch.runs:
            if run in batch.failures:
                continue
            earlier = self.submitted[run.stream.stream_id]
            assert not earlier or earlier[-1].end_offset <= run.start_offset
            earlier.append(run)

    def settle(self, batch: BatchUpload) -> None:
        if batch.stage is Stage.FINISH:
            assert next(iter(self.core.in_flight)) is batch, "batches settle in order"
            for run in batch.runs:
                if run in batch.failures:
                    continue
                # The controllers reject a run after a gap.
                failed = run.stream.failure or (
                    ValueError("rejected") if self.rng.random() < 0.02 else None
                )
                if failed is None:
                    batch.committed.add(run)
                else:
                    batch.failures[run] = failed
        self.settled.add(batch)
        del self.turns[batch]
        self.core.settle(batch)
        for run in batch.runs:
            assert run.is_settled
            assert (run.outcome is None) == (run in batch.committed)

    def carry_out(self) -> None:
        effects, self.core.effects = self.core.effects, []
        for effect in effects:
            match effect:
                case writing_core.Wake(waiter):
                    waiter.set()
                case writing_core.Answer(runs):
                    for run in runs:
                        assert run.is_settled, "an append was answered before its outcome"
                        assert self.outcomes.setdefault(run, run.outcome) is run.outcome
                case writing_core.BatchSealed(batch):
                    self.sealed.append(batch)
                    self.enter(batch, Stage.ENCODE)
                    self.carry_out()

    def check(self) -> None:
        """Check what the docstring of the core promises."""
        in_flight = [batch for batch in self.sealed if batch not in self.settled]
        assert list(self.core.in_flight) == in_flight
        runs = [run for batch in in_flight for run in batch.runs] + list(self.core._open.values())
        assert self.core.buffered == sum(run.cost for run in runs)
        assert self.core._open_bytes == sum(run.encoded_bytes for run in self.core._open.values())
        assert self.core._unencoded_bytes == sum(
            batch.encoded_bytes for batch in self.core._ahead[Stage.ENCODE]
        )
        self.check_stages(in_flight)
        for batch in in_flight:
            if batch.stage is Stage.SUBMIT and batch not in self.submitting:
                self.submitting.add(batch)
                failed = [run for run in batch.runs if run.stream.failure is not None]
                assert batch.failures.keys() >= set(failed), "a gap would be committed"

        for flush in self.flushes:
            is_over = self.core.fenced is not None or self.settled.issuperset(flush.batches)
            assert flush.is_woken == is_over, "a flush ends with its last batch"
        assert all(run.is_settled for run in self.core._open.values()) or not self.core.fenced

    def check_stages(self, in_flight: list[BatchUpload]) -> None:
        inside = [batch.stage for batch in in_flight if batch.turn is None]
        limits = {Stage.ENCODE: 1, Stage.UPLOAD: 2, Stage.SUBMIT: 1, Stage.FINISH: 1}
        for stage, limit in limits.items():
            assert inside.count(stage) <= limit
        stages = [batch.stage for batch in in_flight]
        assert stages == sorted(stages, reverse=True), "a batch overtook another one"

    def finish(self) -> None:
        """Let every batch end: no append, flush or batch waits forever."""
        self.cancellations = 0.0
        self.flush()
        for _ in range(2_000):
            self.retry()
            self.advance()
            self.carry_out()
        assert not self.waiting
        self.core.close()
        self.flush()
        for _ in range(1_000):
            self.carry_out()
            self.advance()
        assert not self.core.in_flight
        assert self.core.buffered == 0
        assert all(flush.is_woken for flush in self.flushes)
        with pytest.raises(errors.WriterClosedError):
            self.core.accepting(0)


def _fencing() -> Exception:
    return errors.NodeFencedError("the test")


@pytest.mark.parametrize("seed", seeds(50, slow=100))
def test_invariants_hold_after_every_event(seed: int) -> None:
    simulation = WriterSimulation(random.Random(seed))
    try:
        for _ in range(800):
            simulation.step()
        simulation.finish()
    except AssertionError:
        print(f"replay: pytest {__file__} -k 'every_event[{seed}]'")
        raise


def test_no_batch_is_submitted_while_an_earlier_one_is_committed_again() -> None:
    simulation = WriterSimulation(random.Random(0))
    core, batches = simulation.core, simulation.sealed
    for stream_id in range(3):
        simulation.admit(Append(stream_id, 1), is_waiting=False)
        core.seal()
        simulation.carry_out()
    for batch, last in zip(batches, (Stage.FINISH, Stage.FINISH, Stage.SUBMIT), strict=True):
        if batch is batches[2]:
            core.hold()
        for stage in range(Stage.UPLOAD, last + 1):
            simulation.enter(batch, Stage(stage))
        simulation.carry_out()

    last_turn = simulation.turns[batches[2]]
    for batch in batches[:2]:
        assert not last_turn.is_woken
        simulation.settle(batch)
        simulation.carry_out()
    assert last_turn.is_woken


def test_a_fenced_node_fails_all_but_submitted_batches() -> None:
    simulation = WriterSimulation(random.Random(0))
    core, batches = simulation.core, simulation.sealed
    for stream_id in range(2):
        simulation.admit(Append(stream_id, 1), is_waiting=False)
        core.seal()
        simulation.carry_out()
    for stage in (Stage.UPLOAD, Stage.SUBMIT, Stage.FINISH):
        core.enter(batches[0], stage)
    simulation.admit(Append(2, 1), is_waiting=False)

    first, second = _fencing(), _fencing()
    core.fence(first)
    core.fence(second)
    simulation.carry_out()
    assert core.rejection is first
    assert [run.is_settled for batch in batches for run in batch.runs] == [False, True]
    assert list(simulation.outcomes.values()) == [first, first]


async def told(writer: StreamWriter, *stream_ids: int) -> list[Any]:
    """Append a record to each of the streams and flush; return their offsets or errors."""
    acks = [await writer.append(stream_id, b"x") for stream_id in stream_ids]
    await writer.flush()
    return await asyncio.gather(*acks, return_exceptions=True)


@pytest.mark.parametrize("left", [0, 3])
async def test_a_stream_without_offsets_left_fails_alone(left: int) -> None:
    """The append that does not fit is refused by itself; the batch and the stream go on."""
    async with writing(3) as (b, writer):
        first = INT64_MAX - left
        b.cluster.map.streams[0].start = b.cluster.map.streams[0].end = first
        opened = OpenedStream(0, b.cluster.map.streams[0].epoch, first, first)
        writer.attach([opened])
        others = [await writer.append(stream_id, b"x") for stream_id in (1, 2)]
        fits = [await writer.append(0, b"x", 2)] if left else []
        for refused in (
            writer.append(0, b"x", left + 1),
            writer.append_many(0, [b"x"] * (left + 1)),
        ):
            with pytest.raises(errors.LimitExceededError):
                await refused
        await writer.flush()
        assert await asyncio.gather(*others) == [0, 0]
        assert await asyncio.gather(*fits) == [first] * len(fits)
        assert writer.next_offset(0) == (first + 2 if left else first)
        assert writer.buffered_bytes == 0
        assert await told(writer, 1, 2) == [1, 1]


@pytest.mark.parametrize("name", ["stream_id", "epoch", "next_offset"])
async def test_a_stream_with_a_number_that_no_object_can_hold_is_not_attached(name: str) -> None:
    async with writing(2) as (_, writer):
        bad = replace(OpenedStream(7, 1, 0, 0), **{name: 2**63})
        with pytest.raises(ValueError, match=rf"streams\[0\]\.{name}"):
            writer.attach([bad])
        assert await told(writer, 0, 1) == [0, 0]
