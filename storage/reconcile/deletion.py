"""Checks candidates with the leader and deletes them, on Spark executors.

A key is deleted only if it is still the object of the plan and the leader says, just before, that
the map issued its id once and has forgotten it. Any error, of the leader, the store or the disk of
the undo records, spares the whole batch and ends the task. Before a batch is deleted, what is known
of its objects is on disk.
"""

from __future__ import annotations

import enum
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa

from storage.errors import ObjectNotFoundError, StorageError
from storage.object_format.object_key import key_for
from storage.object_store.base import ObjectStore
from storage.object_store.factory import open_object_store
from storage.reconcile.errors import ControllerError
from storage.reconcile.leader import LeaderClient, removed, state_name
from storage.reconcile.tables import record_batch

_HEADS_AT_ONCE = 8
_LARGEST_BATCH = 1000

OUTCOME_COLUMNS = "key string, object_id long, size long, outcome string, detail string"


class Outcome(enum.StrEnum):
    """What became of a candidate."""

    DELETED = "deleted"
    WOULD_DELETE = "would_delete"  # a dry run; with --yes it would be gone
    KEPT = "kept"  # the leader does not say that it is forgotten
    CHANGED = "changed"  # another object than the plan saw lies under the key
    GONE = "gone"  # not in the bucket any more
    REFUSED = "refused"  # the plan's key is not the key of the plan's id
    FAILED = "failed"  # an error; not deleted unless `detail` says that deleting began
    SKIPPED = "skipped"  # not tried, because of an error before


@dataclass(frozen=True, slots=True)
class Candidate:
    """A key to delete, as the plan saw it: bytes, Unix ms, the store's etag."""

    key: str
    object_id: int
    size: int
    modified_ms: int
    etag: str


@dataclass(frozen=True, slots=True)
class DeletionOrder:
    """What every task of a run is told. `keys_per_s` is one task's share of the budget.

    With `delete` False nothing is deleted and no undo record is written.
    """

    store: str
    connect: tuple[str, ...]
    patience_s: float
    cluster_id: str
    namespace: str
    undo_folder: str
    keys_per_s: float
    delete: bool


@dataclass(frozen=True, slots=True)
class Judged:
    """A candidate and what became of it."""

    candidate: Candidate
    outcome: Outcome
    detail: str = ""


class Pacer:
    """Lets keys through at no more than `keys_per_s`, on average over any stretch of time."""

    def __init__(
        self,
        keys_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._keys_per_s = keys_per_s
        self._clock = clock
        self._sleep = sleep
        self._free_at = clock()

    @property
    def batch_size(self) -> int:
        """The most keys to take at once: a second's worth."""
        return max(1, min(_LARGEST_BATCH, int(self._keys_per_s)))

    def wait_for(self, keys: int) -> None:
        """Return when all keys let through before have had their time, and count these."""
        wait = self._free_at - self._clock()
        if wait > 0:
            self._sleep(wait)
        self._free_at = max(self._free_at, self._clock()) + keys / self._keys_per_s


class Deleter:
    """Works through the candidates of one task, batch by batch, until the first error."""

    def __init__(
        self, order: DeletionOrder, task: str, store: ObjectStore, leader: LeaderClient
    ) -> None:
        self._order = order
        self._task = task
        self._store = store
        self._leader = leader
        self._pacer = Pacer(order.keys_per_s)

    def run(self, candidates: Iterable[Candidate]) -> Iterator[list[Judged]]:
        """The outcomes of every batch; after an error the rest is skipped, not dropped."""
        remaining = iter(candidates)
        for number in itertools.count():
            batch = list(itertools.islice(remaining, self._pacer.batch_size))
            if not batch:
                return
            judged = self._batch(batch, number)
            yield judged
            if any(one.outcome is Outcome.FAILED for one in judged):
                break
        while batch := list(itertools.islice(remaining, _LARGEST_BATCH)):
            yield [Judged(one, Outcome.SKIPPED, "an earlier batch failed") for one in batch]

    def _batch(self, batch: Sequence[Candidate], number: int) -> list[Judged]:
        try:
            settled, free = self._sift(batch)
            if not self._order.delete:
                return settled + [Judged(one, Outcome.WOULD_DELETE) for one in free]
            if free:
                self._pacer.wait_for(len(free))
                self._write_undo(free, number)
        except (StorageError, OSError) as error:
            return [Judged(one, Outcome.FAILED, f"nothing deleted: {error}") for one in batch]
        return settled + self._delete(free)

    def _sift(self, batch: Sequence[Candidate]) -> tuple[list[Judged], list[Candidate]]:
        """Tell what must stay, and why, from what is free to be deleted."""
        settled: list[Judged] = []
        asked: list[Candidate] = []
        for one in batch:
            if one.key == key_for(one.object_id, self._order.namespace):
                asked.append(one)
            else:
                settled.append(Judged(one, Outcome.REFUSED, f"not the key of {one.object_id}"))
        forgotten: list[Candidate] = []
        for one, state in zip(asked, self._states(asked), strict=True):
            if removed(state):
                forgotten.append(one)
            else:
                settled.append(Judged(one, Outcome.KEPT, f"the map says {state_name(state)}"))
        free: list[Candidate] = []
        for judged in self._look_again(forgotten):
            if isinstance(judged, Candidate):
                free.append(judged)
            else:
                settled.append(judged)
        return settled, free

    def _states(self, asked: Sequence[Candidate]) -> tuple[int, ...]:
        if not asked:
            return ()
        standing = self._leader.check_objects([one.object_id for one in asked])
        if standing.cluster_id != self._order.cluster_id:
            raise ControllerError(
                f"the controllers are cluster {standing.cluster_id!r}, the plan is of"
                f" {self._order.cluster_id!r}; apply it with --connect of its own cluster"
            )
        return standing.states

    def _look_again(self, batch: Sequence[Candidate]) -> list[Candidate | Judged]:
        """Compare with what lies in the bucket now; a `Candidate` is unchanged."""
        if not batch:
            return []
        with ThreadPoolExecutor(min(_HEADS_AT_ONCE, len(batch))) as pool:
            return list(pool.map(self._look_at, batch))

    def _look_at(self, one: Candidate) -> Candidate | Judged:
        try:
            info = self._store.head(one.key)
        except ObjectNotFoundError:
            return Judged(one, Outcome.GONE)
        # HEAD and list may tell the time with different precision: whole seconds must agree.
        same_time = info.last_modified_ms // 1000 == one.modified_ms // 1000
        if same_time and (info.size, info.etag) == (one.size, one.etag):
            return one
        return Judged(one, Outcome.CHANGED, "size, time or etag is not that of the plan")

    def _write_undo(self, free: Sequence[Candidate], number: int) -> None:
        """Put on disk, durably, what is about to be deleted: one JSON object a line."""
        folder = Path(self._order.undo_folder)
        folder.mkdir(parents=True, exist_ok=True)
        checked_ms = time.time_ns() // 1_000_000
        path = folder / f"{self._task}-{number:06d}.jsonl"
        draft = path.with_suffix(".draft")
        with draft.open("w") as file:
            for one in free:
                file.write(json.dumps(asdict(one) | {"checked_ms": checked_ms}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
        _sync_folder(folder)

    def _delete(self, free: Sequence[Candidate]) -> list[Judged]:
        if not free:
            return []
        try:
            failed = self._store.delete_many([one.key for one in free]).failed
        except StorageError as error:
            doubt = f"deleting began and may have succeeded in part: {error}"
            return [Judged(one, Outcome.FAILED, doubt) for one in free]
        return [
            Judged(one, Outcome.FAILED, f"the store kept it: {failed[one.key]}")
            if one.key in failed
            else Judged(one, Outcome.DELETED)
            for one in free
        ]


def deleter(
    order: DeletionOrder,
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Make the function that an executor runs: candidates in, outcomes out."""

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        task = f"{context.partitionId():05d}-{context.attemptNumber()}" if context else "driver"
        candidates = (Candidate(**row) for batch in batches for row in batch.to_pylist())
        first = next(candidates, None)
        if first is None:
            return
        store = open_object_store(order.store)
        try:
            with LeaderClient(order.connect, order.patience_s) as leader:
                work = Deleter(order, task, store, leader)
                for judged in work.run(itertools.chain([first], candidates)):
                    yield _outcome_rows(judged)
        finally:
            store.close()

    return run


def _outcome_rows(judged: Sequence[Judged]) -> pa.RecordBatch:
    values = {
        "key": [one.candidate.key for one in judged],
        "object_id": [one.candidate.object_id for one in judged],
        "size": [one.candidate.size for one in judged],
        "outcome": [str(one.outcome) for one in judged],
        "detail": [one.detail for one in judged],
    }
    return record_batch(OUTCOME_COLUMNS, values)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
