"""Mutated requests in random valid histories: the map answers or refuses each, and stays sound.

A second map is replayed through the encoding of records beside the first, and the slow model judges
every request that it can represent. `STREAMMETA_FUZZ_SEEDS=100:200` runs those seeds instead of
CI's. With `--slow`, seeds from `STREAMMETA_FUZZ_FIRST` on run for `STREAMMETA_FUZZ_SECONDS`. A
failure prints seed, step and request; the seed alone repeats it.
"""

import itertools
import os
import time
from contextlib import ExitStack, suppress
from random import Random
from typing import Any

import pytest

from streammeta.controller.errors import ApiError
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.api.validation import validate
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata, Decision
from streammeta.controller.records.codec import decode_records, encode_records
from streammeta.controller.records.record import Record
from tests.kit.seeds import seeds
from tests.metadata import mutated_requests
from tests.metadata.map_pair import Pair, in_columns, same, told
from tests.metadata.random_reads import RandomReads
from tests.metadata.random_requests import MAKERS, RandomRequests
from tests.metadata.small_tables import small_tables
from tests.metadata.test_metadata_section_rules import read_everything

_SECONDS = int(os.environ.get("STREAMMETA_FUZZ_SECONDS", "120"))
_SLOW_FIRST = int(os.environ.get("STREAMMETA_FUZZ_FIRST", "1000"))
_STEPS = 90
_JUDGED_MAX = 2_000
"""Largest offset that the model represents in reasonable time: it keeps sets of offsets."""
_KEPT_MAX = 10_000
"""Largest number in a request that stays in the history; others would end every later request."""
_ROWS_MAX = 100
_COMMITS = ("upload", "batch", "compact_set", "compact_stream")
_MAKERS = (*MAKERS, *_COMMITS * 3)
"""Commits come most often: they have the most fields and rules."""
_UNCHECKED_MAX = 8
"""Refused requests between two comparisons of the digest."""


class Trial:
    """One history with its mutated requests."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._where = f"seed {seed}"
        self._pair, self._twin = Pair(), ClusterMetadata()
        self._requests, self._reads = RandomRequests(self._rng), RandomReads(self._rng)
        self._mutations = mutated_requests.Mutations(self._rng)
        self._digest = self._pair.map.state_hash()
        self._unchecked: list[Any] = []
        self.mutated: set[type] = set()
        """Kinds of well-formed requests that were mutated."""

    def run(self) -> None:
        """Make the history; raises `AssertionError` with the request that shows a defect."""
        for request in self._requests.start(self._pair.model):
            self._write(request)
        makers = itertools.cycle(self._rng.sample(_MAKERS, len(_MAKERS)))
        for step in range(_STEPS):
            self._where = f"{self._where.split(',')[0]}, step {step}"
            self._pair.now += self._rng.choice((1, 1, 50, 400))
            self._write(self._requests.any(self._pair.model))
            for _ in range(2):
                self._offer(self._mutated(next(makers)))
            self._offer(self._mutations.repeated(self._pair.model.state))
            self._burst()
            self._read()
            if self._rng.random() < 0.05:
                self._restart()
        self._expect_unchanged()
        self._pair.check()

    # ---- requests ----

    def _mutated(self, maker: str) -> Any:
        request = self._requests.make(maker, self._pair.model)
        self.mutated.add(type(request))
        return self._mutations.mutated(request, self._pair.model.state)

    def _any(self) -> Any:
        """Return a request of any kind, mutated or not."""
        drawn = self._rng.random()
        if drawn < 0.2:
            kind = self._rng.choice(mutated_requests.WRITES)
            return self._mutations.nonsense(kind, self._pair.model.state)
        if drawn < 0.4:
            return self._mutations.repeated(self._pair.model.state)
        maker = self._rng.choice(_MAKERS)
        if drawn < 0.6:
            return self._requests.make(maker, self._pair.model)
        return self._mutated(maker)

    # ---- writes ----

    def _write(self, request: Any) -> None:
        """Make a request that stays, on both maps and in the model."""
        self._expect_unchanged()
        with told(f"{self._where}: {request}"):
            self._pair.write(request)
            if self._pair.map.applied_end_offset > self._twin.applied_end_offset:
                self._twin.apply(*self._last_entry())
        self._digest = self._same_digest(request)
        self._mutations.remember(request)

    def _offer(self, request: Any) -> None:
        """Judge a request, apply and undo it; the model judges it too if it can represent it."""
        end, before = self._pair.map.applied_end_offset, self._digest
        decision = self._decide(request)
        if decision is not None and decision.records:
            self._apply(request, decision.records)
            self._undo_to(end, before, request)
        if not _is_judged(request):
            return
        self._write(request)
        kept = mutated_requests.largest_number(request) <= _KEPT_MAX and self._rng.random() < 0.6
        if self._pair.map.applied_end_offset > end and not kept:
            self._pair.undo(len(self._pair.uncommitted) - 1)
            self._undo_to(end, before, request)

    def _last_entry(self) -> tuple[int, tuple[Record, ...]]:
        offset, payload = self._pair.log[-1]
        return offset, tuple(decode_records(payload))

    def _burst(self) -> None:
        """Apply requests on top of mutated ones, and undo all of them."""
        end, before = self._pair.map.applied_end_offset, self._digest
        accepted: list[Any] = []
        for _ in range(self._rng.randint(1, 5)):
            request = self._any()
            decision = self._decide(request)
            if decision is not None and decision.records:
                self._apply(request, decision.records)
                accepted.append(request)
        self._expect_unchanged()
        if accepted and self._rng.random() < 0.5:
            self._load_checkpoint(accepted)
        self._undo_to(end, before, accepted)

    def _decide(self, request: Any) -> Decision | None:
        """Return what is decided, None if the request is refused; neither changes the map."""
        cluster_metadata = self._pair.map
        self._unchecked.append(request)
        if len(self._unchecked) > _UNCHECKED_MAX:
            self._expect_unchanged()
        with suppress(ApiError), told(f"{self._where}: {request}", ApiError):
            return cluster_metadata.decide(
                request, self._pair.now, cluster_metadata.applied_end_offset
            )
        return None

    def _apply(self, request: Any, records: tuple[Record, ...]) -> None:
        self._expect_unchanged()
        offset = self._pair.map.applied_end_offset
        with told(f"{self._where}: {request}"):
            payload = encode_records(records)
            self._pair.map.apply(offset, decode_records(payload))
            self._twin.apply(offset, decode_records(payload))
        self._digest = self._same_digest(request)
        committed = self._pair.map.size().committed_bytes
        assert 0 <= committed < 2**63, f"{self._where}: {request}: {committed} bytes committed"

    def _undo_to(self, end: int, before: bytes, request: Any) -> None:
        for cluster_metadata in (self._pair.map, self._twin):
            cluster_metadata.undo_to(end)
        self._digest = self._same_digest(request)
        assert self._digest == before, f"{self._where}: {request}: undo makes another map"

    def _restart(self) -> None:
        """Commit everything and go on with a map made from a checkpoint of the other."""
        self._expect_unchanged()
        self._pair.restart()
        self._twin.forget_undo(self._twin.applied_end_offset)

    # ---- reads ----

    def _read(self) -> None:
        state = self._pair.model.state
        for kind in self._rng.sample(mutated_requests.READS, 4):
            request = self._reads.make(kind, state)
            self.mutated.add(kind)
            self._ask(request)
            self._ask(self._mutations.mutated(request, state))
        self._ask(self._mutations.nonsense(self._rng.choice(mutated_requests.READS), state))

    def _ask(self, request: Any) -> None:
        self._unchecked.append(request)
        with suppress(ApiError), told(f"{self._where}: {request}", ApiError):
            answer = self._pair.map.query(request)
            if mutated_requests.row_count(request) <= _ROWS_MAX:
                same(answer, self._pair.model.query(request), f"{self._where}: {request}")
            if isinstance(request, r.GetObjects):
                together = self._pair.map.query(in_columns(request))
                same(together, answer, f"{self._where}: {request} in columns")

    # ---- what must hold ----

    def _expect_unchanged(self) -> None:
        """Compare the digest with that after the last entry, and forget what was refused since."""
        unchanged = self._pair.map.state_hash() == self._digest
        assert unchanged, f"{self._where}: one of these changed the map: {self._unchecked}"
        self._unchecked.clear()

    def _same_digest(self, request: Any) -> bytes:
        digest = self._pair.map.state_hash()
        is_same = self._twin.state_hash() == digest
        assert is_same, f"{self._where}: {request}: replay makes another map"
        return digest

    def _load_checkpoint(self, accepted: list[Any]) -> None:
        """Load a checkpoint of the map, which makes every check of its sections, and read it."""
        frozen = self._pair.map.freeze()
        with told(f"{self._where}: {accepted}"):
            loaded = ClusterMetadata.from_sections(frozen.sections(), frozen.end_offset)
            assert loaded.state_hash() == self._digest, "the sections lose something"
            read_everything(loaded)


def _is_judged(request: Any) -> bool:
    """Whether a request is well-formed and small enough for the model."""
    try:
        validate(request)
    except ApiError:
        return False
    return (
        mutated_requests.offsets_end(request) <= _JUDGED_MAX
        and mutated_requests.row_count(request) <= _ROWS_MAX
    )


def _run(seed: int) -> set[type]:
    """Run one seed; return the kinds of well-formed requests that were mutated."""
    with ExitStack() as patches:
        if seed % 2:
            patches.enter_context(small_tables())
        trial = Trial(seed)
        trial.run()
    return trial.mutated


def _expect_every_kind(mutated: set[type]) -> None:
    missing = {*mutated_requests.WRITES, *mutated_requests.READS} - mutated
    assert not missing, f"{missing} not mutated; RandomRequests or RandomReads must make these"


@pytest.mark.parametrize("seed", seeds(2, variable="STREAMMETA_FUZZ_SEEDS"))
def test_mutated_requests_are_refused_or_answered_and_undone(seed: int) -> None:
    _expect_every_kind(_run(seed))


@pytest.mark.slow
@pytest.mark.timeout(_SECONDS + 600)
def test_mutated_requests_of_many_seeds() -> None:
    deadline = time.monotonic() + _SECONDS
    mutated: set[type] = set()
    for seed in itertools.count(_SLOW_FIRST):
        mutated |= _run(seed)
        if time.monotonic() > deadline:
            break
    _expect_every_kind(mutated)
