"""The state machine of the writer to shared streams, with any order of events and a simple leader.

The leader follows the contract: rows of a stream stand or fall together, sequences of producers are
checked, and a repeated object gets its first answer.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from streammeta.client import Producer, WriterConfig, errors
from streammeta.client.writing import shared_core
from streammeta.client.writing.record_buffer import NO_TIME
from streammeta.client.writing.shared_batches import SharedBatch, SharedVerdict, encode_shared
from streammeta.client.writing.shared_core import SharedStage, SharedUpload, SharedWriterCore
from streammeta.storage.object_format.checksum import ObjectChecksum
from streammeta.storage.object_format.object_reader import ObjectReader
from streammeta.v1 import common_pb2 as codes
from tests.kit.seeds import seeds

_STREAMS = 3
_PRODUCERS = 2
_CONFIG = WriterConfig(
    max_buffer_bytes=12_000, upload_bytes=1_000, shared_batch_bytes=900, parallel_uploads=3
)
_GONE = 99
"""A stream that does not exist."""


@dataclass(eq=False)
class Answered:
    """The answer to an append, at most one."""

    results: list[int | Exception] = field(default_factory=list)

    def done(self) -> bool:
        return False

    def set_result(self, result: int) -> None:
        self.results.append(result)

    def set_exception(self, exception: Exception) -> None:
        self.results.append(exception)


@dataclass(eq=False)
class Turn:
    """A caller that was woken, or not yet."""

    is_woken: bool = False

    def set(self) -> None:
        self.is_woken = True


class Leader:
    """Shared streams and producers as the controllers hold them."""

    def __init__(self) -> None:
        self.streams: dict[int, list[SharedBatch]] = {stream: [] for stream in range(_STREAMS)}
        self.ends: dict[int, int] = defaultdict(int)
        self.first: dict[int, tuple[list[SharedBatch], SharedVerdict]] = {}
        self.next: dict[tuple[int, int, int], int] = {}
        self.known: dict[tuple[int, Producer], int] = {}
        self.expired: set[int] = set()

    def commit(self, object_id: int, batches: list[SharedBatch]) -> SharedVerdict:
        if object_id in self.first:
            assert self.first[object_id][0] == batches, "a repeat has other rows"
            return self.first[object_id][1]
        if object_id in self.expired:
            rows = len(batches)
            gone = codes.ERROR_CODE_OBJECT_NOT_EXIST
            return SharedVerdict(gone, [gone] * rows, [-1] * rows)
        assert not self.first or object_id > max(self.first), "ids do not ascend"
        verdict = self._decide(batches)
        if 0 in verdict.codes:
            self.first[object_id] = (batches, verdict)
        return verdict

    def _decide(self, batches: list[SharedBatch]) -> SharedVerdict:
        after = dict(self.next)
        taken: set[object] = set()
        found = [self._check(batch, after, taken) for batch in batches]
        bad = {
            batch.stream_id for batch, (code, _) in zip(batches, found, strict=True) if code != 0
        }
        verdicts: list[int] = []
        offsets: list[int] = []
        for batch, (code, offset) in zip(batches, found, strict=True):
            if code == 0 and batch.stream_id in bad:
                verdicts.append(codes.ERROR_CODE_STREAM_ROWS_REJECTED)
                offsets.append(-1)
            else:
                verdicts.append(code)
                offsets.append(offset if code else self._place(batch))
        is_made = 0 in verdicts
        return SharedVerdict(0 if is_made else verdicts[0], verdicts, offsets)

    def _place(self, batch: SharedBatch) -> int:
        stream = batch.stream_id
        offset = self.ends[stream]
        self.ends[stream] += batch.count
        self.streams[stream].append(batch)
        if batch.producer is not None and batch.sequence_key is not None:
            self.known[stream, batch.producer] = offset
            self.next[batch.sequence_key] = batch.producer.first_sequence + batch.count
        return offset

    def _check(
        self, batch: SharedBatch, after: dict[tuple[int, int, int], int], taken: set[object]
    ) -> tuple[int, int]:
        if batch.stream_id not in self.streams:
            return codes.ERROR_CODE_STREAM_NOT_EXIST, -1
        key, producer = batch.sequence_key, batch.producer
        if key is None or producer is None:
            return 0, -1
        if (offset := self.known.get((batch.stream_id, producer))) is not None:
            return codes.ERROR_CODE_DUPLICATE_BATCH, offset
        if batch.identity in taken:
            return codes.ERROR_CODE_DUPLICATE_BATCH, -1
        # As in Kafka, an unknown producer may begin anywhere.
        if after.get(key, producer.first_sequence) != producer.first_sequence:
            return codes.ERROR_CODE_OUT_OF_ORDER_SEQUENCE, -1
        after[key] = producer.first_sequence + batch.count
        taken.add(batch.identity)
        return 0, -1


class Simulation:
    """A core whose loop carries out its effects late, in any order, and often fails."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.core = SharedWriterCore(_CONFIG)
        self.leader = Leader()
        self.admitted: list[SharedBatch] = []
        self.waiting: list[tuple[SharedBatch, Turn]] = []
        self.flushes: list[tuple[Turn, list[SharedBatch]]] = []
        self.uploading: list[SharedUpload] = []
        self.submitted: list[SharedUpload] = []
        self.sequences: dict[tuple[int, int], tuple[int, int]] = {}
        self.last_id = 0
        self.faults = 0.15

    def step(self) -> None:
        """Let one event happen, carry out its effects and check the invariants."""
        events: list[Callable[[], None]] = [self.append] * 6 + [self.store] * 5 + [self.answer] * 5
        self.rng.choice([*events, self.retry, self.retry, self.core.seal, self.flush])()
        self.carry_out()
        self.check()

    def append(self) -> None:
        stream = _GONE if self.rng.random() < 0.02 else self.rng.randrange(_STREAMS)
        producer = self.next_producer(stream)
        size = self.rng.choice([1, 40, 400])
        batch = SharedBatch(stream, [(bytes(size), 1), (b"", 2)], Answered(), producer)
        if self.core.admit(batch):
            self.admitted.append(batch)
        else:
            turn = Turn()
            self.core.wait(turn)
            self.waiting.append((batch, turn))

    def next_producer(self, stream: int) -> Producer | None:
        """Return the next batch of a sequence, sometimes an earlier one or one after a gap."""
        if self.rng.random() < 0.4:
            return None
        key = (stream, self.rng.randrange(_PRODUCERS))
        epoch, sequence = self.sequences.get(key, (0, 0))
        chance = self.rng.random()
        if chance < 0.12 and sequence:
            return Producer(key[1], epoch, sequence - 3)
        if chance < 0.15:
            return Producer(key[1], epoch, sequence + 300)
        if chance < 0.2:
            # A producer begins anew after an error.
            epoch, sequence = epoch + 1, 0
        self.sequences[key] = (epoch, sequence + 3)
        return Producer(key[1], epoch, sequence)

    def retry(self) -> None:
        """Try the first append that waits again, or cancel any."""
        if self.waiting and self.rng.random() < 0.1:
            _, turn = self.waiting.pop(self.rng.randrange(len(self.waiting)))
            self.core.leave(turn)
        elif self.waiting and self.waiting[0][1].is_woken:
            batch, turn = self.waiting[0]
            turn.is_woken = False
            if self.core.admit(batch, turn):
                self.admitted.append(batch)
                self.waiting.pop(0)
                self.core.leave(turn)
            else:
                self.core.make_space()

    def flush(self) -> None:
        turn = Turn()
        self.flushes.append((turn, list(self.admitted)))
        self.core.flush(turn)

    def store(self) -> None:
        """End some upload."""
        if not self.uploading:
            return
        upload = self.uploading.pop(self.rng.randrange(len(self.uploading)))
        if self.rng.random() < self.faults / 3:
            self.core.not_stored(upload, errors.UploadFailedError("key", 1, "rejected"))
            return
        self.last_id += 1
        if self.rng.random() < self.faults / 3:
            self.leader.expired.add(self.last_id)
        self.core.stored(upload, self.last_id)

    def answer(self) -> None:
        """Let a commit arrive, or not, and its answer too."""
        if not self.submitted:
            return
        upload = self.submitted.pop()
        chance = self.rng.random()
        if chance < self.faults:
            self.core.unknown(upload)
            return
        verdict = self.leader.commit(upload.object_id, list(upload.batches))
        if chance < 2 * self.faults:
            self.core.unknown(upload)
        else:
            self.core.answered(upload, verdict)

    def carry_out(self) -> None:
        effects, self.core.effects = self.core.effects, []
        for effect in effects:
            match effect:
                case shared_core.Wake():
                    effect.waiter.set()
                case shared_core.Upload():
                    assert effect.upload.batches
                    self.uploading.append(effect.upload)
                case shared_core.Submit():
                    assert effect.upload.batches
                    self.submitted.append(effect.upload)

    def check(self) -> None:
        assert len(self.submitted) <= 1
        storing = [u for u in self.core.in_flight if u.stage is SharedStage.UPLOADING]
        # One more if the oldest is stored again.
        assert len(storing) <= _CONFIG.parallel_uploads + 1
        open_ = [batch for batch in self.admitted if not results_of(batch)]
        assert self.core.buffered == sum(batch.cost for batch in open_)
        assert self.core.buffered <= _CONFIG.max_buffer_bytes
        held = [batch for upload in self.core.in_flight for batch in upload.batches]
        places = [*held, *self.core._open]
        repeats = self.core._repeats
        assert repeats.keys() <= set(places), "a repeat waits for a batch that is answered"
        behind = {batch for batches in repeats.values() for batch in batches}
        assert len(places) + len(behind) == len(open_)
        for stream in (*range(_STREAMS), _GONE):
            assert [b for b in places if b.stream_id == stream] == [
                b for b in open_ if b.stream_id == stream and b not in behind
            ]
        for turn, batches in self.flushes:
            assert turn.is_woken == all(results_of(batch) for batch in batches)

    def finish(self) -> None:
        """Let everything end without further faults, and check the outcomes."""
        self.faults = 0.0
        while self.waiting or self.core.buffered or self.uploading:
            self.core.seal()
            for event in (self.store, self.answer, self.retry):
                event()
                self.carry_out()
                self.check()
        self.check_outcomes()

    def check_outcomes(self) -> None:
        offsets: dict[SharedBatch, int] = {}
        for batches in self.leader.streams.values():
            at = 0
            for batch in batches:
                assert batch not in offsets, "a batch is committed twice"
                offsets[batch] = at
                at += batch.count
        for batch in self.admitted:
            (result,) = results_of(batch)
            if batch in offsets:
                assert result == offsets[batch]
            elif isinstance(result, int):
                # A duplicate has the offset of the first batch.
                assert batch.producer is not None
                assert result == self.leader.known[batch.stream_id, batch.producer]
            else:
                assert not isinstance(
                    result, errors.StreamRowsRejectedError | errors.DuplicateBatchError
                )
        order = {batch: number for number, batch in enumerate(self.admitted)}
        for batches in self.leader.streams.values():
            assert [order[batch] for batch in batches] == sorted(order[b] for b in batches)


def results_of(batch: SharedBatch) -> list[int | Exception]:
    assert isinstance(batch.ack, Answered)
    return batch.ack.results


@pytest.mark.parametrize("seed", seeds(20, slow=100, variable="STREAMMETA_SHARED_SEEDS"))
def test_every_append_has_one_outcome_and_streams_keep_their_order(seed: int) -> None:
    simulation = Simulation(random.Random(seed))
    try:
        for _ in range(600):
            simulation.step()
        simulation.finish()
    except BaseException:
        print(f"STREAMMETA_SHARED_SEEDS={seed}:{seed + 1}")
        raise
    assert sum(map(len, simulation.leader.streams.values())) > 20


def test_an_object_counts_offsets_from_0_in_each_stream_and_has_the_bounds_of_its_times() -> None:
    batches = [
        SharedBatch(3, [(b"a", 2), (b"b", 1)], Answered(), times=(50, 60)),
        SharedBatch(3, [(b"c", 4)], Answered(), times=(40, 40)),
        SharedBatch(8, [(b"d", 1)], Answered(), times=(70, 90)),
    ]
    made = encode_shared(batches, 1 << 20)
    assert made.times == (40, 90)
    assert made.crc32c == ObjectChecksum.of(made.data).value
    reader = ObjectReader("object", len(made.data), accept_relative=True)
    while (needed := reader.needed) is not None:
        reader.receive(made.data[needed.start : needed.end])
    assert reader.relative
    records = [
        record
        for entry in reader.index
        for record in reader.records(entry, made.data[entry.position : entry.position + entry.size])
    ]
    assert [(r.stream_id, r.epoch, r.base_offset, r.count, r.payload) for r in records] == [
        (3, 0, 0, 2, b"a"),
        (3, 0, 2, 1, b"b"),
        (3, 0, 3, 4, b"c"),
        (8, 0, 0, 1, b"d"),
    ]
    batches[1].times = NO_TIME
    assert encode_shared(batches, 1 << 20).times == NO_TIME


def uploads_of(core: SharedWriterCore) -> list[SharedUpload]:
    effects, core.effects = core.effects, []
    return [effect.upload for effect in effects if isinstance(effect, shared_core.Upload)]


def batch_of(stream: int, producer: Producer | None = None) -> SharedBatch:
    return SharedBatch(stream, [(b"x", 1)], Answered(), producer)


def sealed(core: SharedWriterCore, *batches: SharedBatch) -> SharedUpload:
    for batch in batches:
        assert core.admit(batch)
    core.seal()
    (upload,) = uploads_of(core)
    return upload


def test_a_gap_in_a_sequence_fails_the_batches_behind_it_and_no_others() -> None:
    core = SharedWriterCore(_CONFIG)
    first = batch_of(0, Producer(7, 0, 0))
    behind, other = batch_of(0, Producer(7, 0, 1)), batch_of(0)
    elsewhere = batch_of(1, Producer(7, 0, 0))
    upload = sealed(core, first)
    later = sealed(core, behind, other, elsewhere)
    core.stored(later, 2)
    lost = errors.UploadFailedError("key", 1, "rejected")
    core.not_stored(upload, lost)
    assert results_of(first) == results_of(behind) == [lost]
    assert later.batches == [elsewhere]
    (again,) = uploads_of(core)
    assert again.batches == [other]


def repeated_in_an_object(core: SharedWriterCore) -> tuple[SharedBatch, SharedBatch]:
    """Let a commit reject a batch and its repeat. The first one is gathered again."""
    first, repeat = (batch_of(0, Producer(7, 0, 0)) for _ in range(2))
    upload = sealed(core, first, repeat)
    core.stored(upload, 1)
    rejected = codes.ERROR_CODE_STREAM_ROWS_REJECTED
    duplicate = codes.ERROR_CODE_DUPLICATE_BATCH
    core.answered(upload, SharedVerdict(duplicate, [rejected, duplicate], [-1, -1]))
    assert results_of(first) == results_of(repeat) == []
    return first, repeat


def test_a_repeat_in_the_same_object_gets_the_answer_of_the_first_one() -> None:
    core = SharedWriterCore(_CONFIG)
    first, repeat = repeated_in_an_object(core)
    flushed = Turn()
    core.flush(flushed)
    (again,) = uploads_of(core)
    assert again.batches == [first]
    core.stored(again, 2)
    core.effects.clear()
    core.answered(again, SharedVerdict(0, [0], [5]))
    assert results_of(first) == results_of(repeat) == [5]
    assert not core.buffered
    assert core.effects == [shared_core.Wake(flushed)]


@pytest.mark.parametrize("end", ["not stored", "fenced", "abandoned"])
def test_a_repeat_in_the_same_object_fails_with_the_first_one(end: str) -> None:
    core = SharedWriterCore(_CONFIG)
    first, repeat = repeated_in_an_object(core)
    (again,) = uploads_of(core)
    if end == "not stored":
        core.not_stored(again, errors.UploadFailedError("key", 1, "rejected"))
    elif end == "fenced":
        core.fence(errors.NodeFencedError("node 1"))
    else:
        core.close()
        core.abandon()
    (failure,) = results_of(repeat)
    assert isinstance(failure, Exception)
    assert results_of(first) == [failure]
    assert not core.buffered


def test_a_fenced_node_fails_all_but_the_commit_in_flight() -> None:
    core = SharedWriterCore(_CONFIG)
    committing, stored, gathered = batch_of(0), batch_of(0), batch_of(0)
    first = sealed(core, committing)
    core.stored(first, 1)
    core.stored(sealed(core, stored), 2)
    core.admit(gathered)
    fenced = errors.NodeFencedError("node 1")
    core.fence(fenced)
    assert results_of(stored) == results_of(gathered) == [fenced]
    with pytest.raises(errors.NodeFencedError):
        core.require_accepting()
    core.answered(first, SharedVerdict(0, [0], [5]))
    assert results_of(committing) == [5]
    assert not core.buffered


def test_a_fence_in_an_answer_fails_everything() -> None:
    core = SharedWriterCore(_CONFIG)
    committing, gathered = batch_of(0), batch_of(1)
    first = sealed(core, committing)
    core.stored(first, 1)
    core.admit(gathered)
    code = codes.ERROR_CODE_NODE_EPOCH_EXPIRED
    core.answered(first, SharedVerdict(code, [code], [-1]))
    for batch in (committing, gathered):
        assert isinstance(results_of(batch)[0], errors.NodeEpochExpiredError)
    assert not core.buffered


def test_what_close_abandons_says_whether_it_may_be_committed() -> None:
    core = SharedWriterCore(_CONFIG)
    committing, gathered = batch_of(0), batch_of(1)
    core.stored(sealed(core, committing), 1)
    core.admit(gathered)
    core.close()
    core.abandon()
    assert "may be committed" in str(results_of(committing)[0])
    assert "not committed" in str(results_of(gathered)[0])
    with pytest.raises(errors.WriterClosedError):
        core.require_accepting()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (codes.ERROR_CODE_NONE, errors.OffsetsUnknownError),
        (codes.ERROR_CODE_OFFSETS_UNKNOWN, errors.OffsetsUnknownError),
        (codes.ERROR_CODE_DUPLICATE_BATCH, errors.DuplicateBatchError),
    ],
)
def test_a_commit_without_an_offset_is_an_error_that_says_so(code: int, kind: type) -> None:
    core = SharedWriterCore(_CONFIG)
    batch = batch_of(0)
    upload = sealed(core, batch)
    core.stored(upload, 1)
    core.answered(upload, SharedVerdict(0, [code], [-1]))
    assert isinstance(results_of(batch)[0], kind)
