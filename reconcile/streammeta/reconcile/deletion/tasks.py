"""Deletion of the candidates of one task, each checked with the leader just before.

A key is deleted only if the bucket bears the marker of the plan's cluster, the key is still the
object of the plan and has no records ahead of the map, and the leader of that cluster says, just
before, that the map issued its id once and has forgotten it; that it is deleted is in the leader's
audit log first. An error of the
marker, the lease, the leader, either audit log or the disk of the undo records spares the whole
batch and ends the task. A key that the store is too busy for is tried again from the start, after a
pause, and slows all tasks of the run down. What the store refuses of one object concerns no other
and never ends a task; refusals for a right or for the state of the store do, after many in a row.
Before a batch is deleted, what is known of its objects is on disk.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa

from streammeta.reconcile.cluster.controller_client import LeaderClient, state_name
from streammeta.reconcile.cluster.identity import check_bucket, check_standing
from streammeta.reconcile.cluster.lease import check_held
from streammeta.reconcile.deletion.ahead_of_metadata import judge_contents
from streammeta.reconcile.deletion.audit_trail import AuditTrail
from streammeta.reconcile.deletion.order import (
    ORPHAN_TAG,
    Candidate,
    DeletionOrder,
    Judged,
    Outcome,
    failed,
)
from streammeta.reconcile.deletion.pacing import LARGEST_BATCH, Pacer
from streammeta.reconcile.deletion.run_signals import RunSignals
from streammeta.reconcile.listing.lookup import find_by_listing
from streammeta.reconcile.vocabulary.attempts import Attempt, OtherAttempts
from streammeta.reconcile.vocabulary.quarantine import quarantined_key
from streammeta.reconcile.vocabulary.tables import OUTCOME_COLUMNS, record_batch
from streammeta.rpc import tracing
from streammeta.storage.durable_files import PosixFileSystem, replace_file
from streammeta.storage.errors import (
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
    StoreUnavailableError,
)
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.opening import open_object_store
from streammeta.storage.object_store.protocol.base import ObjectInfo, ObjectStore
from streammeta.v1 import common_pb2

_HEADS_AT_ONCE = 8
_ANNOUNCED_AT_ONCE = 100
"""Ids that a line of the audit log names one by one; of more it has a digest."""

_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_HOPELESS = 20
"""Consecutive keys that fail for a reason that may concern all, after which a task ends."""


class Deleter:
    """Processes the candidates of one task in batches, until an error that concerns all.

    `sleep` takes seconds.
    """

    def __init__(
        self,
        order: DeletionOrder,
        attempt: Attempt,
        store: ObjectStore,
        leader: LeaderClient,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._order = order
        self._attempt_name = attempt.name
        self._others = OtherAttempts(Path(order.undo_folder), attempt)
        self._store = store
        self._leader = leader
        self._sleep = sleep
        self._pacer = Pacer(order.keys_per_s)
        self._signals = RunSignals(Path(order.signals_folder), attempt.name)
        self._claimed_below: int | None = None
        self._undo_files = 0
        self._asked_for: set[str] = set()
        self._failed_in_a_row = 0
        self._is_over = False
        self._done = order.done
        self._trail = AuditTrail(order, attempt)

    def run(self, candidates: Iterable[Candidate]) -> Iterator[list[Judged]]:
        """Yield the outcomes of every batch; candidates not tried are `SKIPPED`.

        Once the run is to end there is no further batch, and no outcome of what is left.
        """
        remaining = iter(candidates)
        while not self._is_over:
            if self._signals.is_ending():
                return
            if self._signals.others_were_busy():
                self._pacer.slow_down()
            batch = list(itertools.islice(remaining, self._pacer.batch_size))
            if not batch:
                return
            judged = self._batch(batch)
            self._count_failures(judged)
            try:
                self._trail.end(judged)
            except OSError:  # what began is on record, and nothing more begins
                self._is_over = True
            yield judged

        while batch := list(itertools.islice(remaining, LARGEST_BATCH)):
            yield [Judged(one, Outcome.SKIPPED, "an earlier batch failed") for one in batch]

    def close(self) -> None:
        """Release the audit trail."""
        self._trail.close()

    def _count_failures(self, judged: Sequence[Judged]) -> None:
        if any(one.outcome is not Outcome.FAILED for one in judged):
            self._failed_in_a_row = 0
        else:
            self._failed_in_a_row += sum(one.may_concern_all for one in judged)
        self._is_over = self._is_over or self._failed_in_a_row >= _HOPELESS

    @tracing.span("streammeta.reconcile.batch")
    def _batch(self, batch: Sequence[Candidate]) -> list[Judged]:
        """Process a batch; throttled keys are tried again, with all checks, after a pause."""
        judged = self._attempt(batch)
        for pause_s in _PAUSES_S:
            busy = [one.candidate for one in judged if one.is_busy]
            if not busy or self._is_over:
                self._pacer.speed_up()
                break
            self._pacer.slow_down()
            self._signals.tell_busy()
            self._sleep(pause_s)
            judged = [one for one in judged if not one.is_busy] + self._attempt(busy)
        judged = self._credited(judged)
        tracing.note(Counter(str(one.outcome) for one in judged))
        return judged

    def _attempt(self, batch: Sequence[Candidate]) -> list[Judged]:
        try:
            if self._claimed_below is None:  # once per task, before any question to the leader
                self._claimed_below = check_bucket(self._store, self._order.identity)
            judged = self._sift(batch)
            free = [one.candidate for one in judged if one.outcome is Outcome.WOULD_DELETE]
            if not free or not self._order.delete:
                return judged
            self._pacer.wait_for(len(free))
            check_held(self._store, self._order.identity.namespace, self._order.run)
            self._write_undo(free)
            free, known = self._announced(free)
            self._trail.begin(free)
        except (StorageError, OSError) as error:
            self._is_over = True
            return [Judged(one, Outcome.FAILED, f"nothing deleted: {error}") for one in batch]

        kept = [one for one in judged if one.outcome is not Outcome.WOULD_DELETE]
        return kept + known + self._removed(free)

    def _sift(self, batch: Sequence[Candidate]) -> list[Judged]:
        """Judge every candidate: one that is free to delete is `WOULD_DELETE`."""
        judged: list[Judged] = []
        asked: list[Candidate] = []
        for one in batch:
            if one.key == key_for(one.object_id, self._order.identity.namespace):
                asked.append(one)
            else:
                judged.append(Judged(one, Outcome.REFUSED, f"not the key of {one.object_id}"))
        forgotten, known = self._forgotten(asked)
        looked_up = self._look_at_all(forgotten)
        present = [one.candidate for one in looked_up if one.outcome is Outcome.WOULD_DELETE]
        others = [one for one in looked_up if one.outcome is not Outcome.WOULD_DELETE]
        contents = judge_contents(self._store, self._leader, present, self._order.next_stream_id)
        return judged + known + others + list(contents)

    def _announced(self, free: Sequence[Candidate]) -> tuple[list[Candidate], list[Judged]]:
        """Have the leader put on record what is deleted next; return that, and what is kept.

        Asked for few at a time, so that its audit log has the id of each.
        """
        forgotten: list[Candidate] = []
        known: list[Judged] = []
        for first in range(0, len(free), _ANNOUNCED_AT_ONCE):
            part = self._forgotten(free[first : first + _ANNOUNCED_AT_ONCE], deleting=True)
            forgotten += part[0]
            known += part[1]
        return forgotten, known

    def _forgotten(
        self, asked: Sequence[Candidate], *, deleting: bool = False
    ) -> tuple[list[Candidate], list[Judged]]:
        """Return those that the map has forgotten, and the others as they are judged."""
        forgotten: list[Candidate] = []
        known: list[Judged] = []
        for one, state in zip(asked, self._states(asked, deleting=deleting), strict=True):
            if state == common_pb2.OBJECT_STATE_REMOVED:
                forgotten.append(one)
            else:
                known.append(Judged(one, Outcome.KEPT, f"the map says {state_name(state)}"))
        return forgotten, known

    def _states(self, asked: Sequence[Candidate], *, deleting: bool) -> Sequence[int]:
        if not asked:
            return ()
        ids = [one.object_id for one in asked]
        standing = self._leader.check_objects(ids, deleting=deleting)
        check_standing(
            standing,
            self._order.identity,
            claimed_below=self._claimed_below or 0,
            next_object_id=self._order.next_object_id,
        )
        return standing.states

    def _look_at_all(self, candidates: Sequence[Candidate]) -> list[Judged]:
        """Compare with what lies in the bucket now.

        No other object can be live under the key, since ids are never issued twice: this keeps what
        somebody put there by hand, and tells what is gone already.
        """
        in_order = sorted(candidates, key=lambda candidate: candidate.key)
        try:
            found, settled = find_by_listing(self._store, [one.key for one in in_order])
        except StoreUnavailableError as error:
            return [failed(one, "not deleted", error) for one in in_order]
        by_listing = [self._compared(one, found.get(one.key)) for one in in_order[:settled]]
        with ThreadPoolExecutor(_HEADS_AT_ONCE) as pool:
            return by_listing + list(pool.map(self._look_at, in_order[settled:]))

    def _look_at(self, candidate: Candidate) -> Judged:
        try:
            return self._compared(candidate, self._store.head(candidate.key))
        except ObjectNotFoundError:
            return Judged(candidate, Outcome.GONE)
        except StoreUnavailableError as error:
            return failed(candidate, "not deleted", error)

    def _compared(self, one: Candidate, info: ObjectInfo | None) -> Judged:
        if info is None:
            return Judged(one, Outcome.GONE)
        # HEAD and list may tell the time with different precision: whole seconds must agree.
        same_time = info.last_modified_ms // 1000 == one.modified_ms // 1000
        if same_time and (info.size, info.etag) == (one.size, one.etag):
            return Judged(one, Outcome.WOULD_DELETE)
        return Judged(one, Outcome.CHANGED, "size, time or etag is not that of the plan")

    def _credited(self, judged: Sequence[Judged]) -> list[Judged]:
        """Return the outcomes; an absent key that this run has deleted counts as deleted."""
        if any(one.outcome is Outcome.GONE for one in judged):
            self._others.look()
        return [self._credit(one) if one.outcome is Outcome.GONE else one for one in judged]

    def _credit(self, gone: Judged) -> Judged:
        candidate = gone.candidate
        if candidate.key in self._asked_for:
            return Judged(candidate, self._done, "the request that failed had deleted it")
        # An attempt that tags deletes nothing.
        if self._others.has_begun(candidate.key) and not self._order.tag:
            return Judged(candidate, self._done, "another attempt of this task had deleted it")
        return gone

    def _write_undo(self, free: Sequence[Candidate]) -> None:
        """Write the undo records of a batch durably: one JSON object a line."""
        number = self._undo_files
        self._undo_files += 1
        folder = Path(self._order.undo_folder)
        folder.mkdir(parents=True, exist_ok=True)
        checked_ms = time.time_ns() // 1_000_000
        lines = (json.dumps(asdict(one) | {"checked_ms": checked_ms}) + "\n" for one in free)
        path = folder / f"{self._attempt_name}-{number:06d}.jsonl"
        replace_file(PosixFileSystem(), path, map(str.encode, lines))

    def _removed(self, free: Sequence[Candidate]) -> list[Judged]:
        """Tag candidates, or delete them: those of which a copy is in quarantine if so ordered."""
        if self._order.tag:
            with ThreadPoolExecutor(_HEADS_AT_ONCE) as pool:
                return list(pool.map(self._tag, free))
        unsaved: list[Judged] = []
        if self._order.quarantine:
            with ThreadPoolExecutor(_HEADS_AT_ONCE) as pool:
                saved = list(pool.map(self._save, free))
            unsaved = [one for one in saved if one.outcome is not self._done]
            free = [one.candidate for one in saved if one.outcome is self._done]
        return unsaved + (self._delete(free) if free else [])

    def _save(self, one: Candidate) -> Judged:
        """Copy an object to quarantine; any error but its absence keeps it."""
        place = quarantined_key(one.key, self._order.identity.namespace)
        meant = ObjectInfo(one.key, one.size, one.modified_ms, one.etag)
        try:
            self._store.copy(one.key, place, meant)
        except ObjectNotFoundError:
            return Judged(one, Outcome.GONE)
        except ObjectChangedError as error:
            return Judged(one, Outcome.CHANGED, str(error))
        except StorageError as error:
            return failed(one, "not deleted, as it can't be copied", error)
        return Judged(one, self._done)

    def _tag(self, one: Candidate) -> Judged:
        try:
            self._store.add_tags(one.key, ORPHAN_TAG)
        except ObjectNotFoundError:
            return Judged(one, Outcome.GONE)
        except (StorageError, ValueError) as error:
            return failed(one, "not tagged", error)
        return Judged(one, self._done)

    def _delete(self, free: Sequence[Candidate]) -> list[Judged]:
        try:
            result = self._store.delete_many([one.key for one in free])
        except StorageError as error:
            if isinstance(error, StoreUnavailableError) and error.throttled:
                self._asked_for.update(one.key for one in free)
            else:
                self._is_over = True
            doubt = "deleting began and may have succeeded in part"
            return [failed(one, doubt, error) for one in free]

        return [
            Judged(
                one,
                Outcome.FAILED,
                f"the store kept it: {why}",
                is_busy=one.key in result.throttled,
                may_concern_all=one.key in result.throttled | result.denied,
            )
            if (why := result.failed.get(one.key)) is not None
            else Judged(one, self._done)
            for one in free
        ]


def carry_out(
    order: DeletionOrder, attempt: Attempt, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Carry out an order on the candidates of one task, in one attempt of it.

    Yields the outcomes of each batch once they are known.
    """
    candidates = (Candidate(**row) for batch in batches for row in batch.to_pylist())
    first = next(candidates, None)
    if first is None:
        return
    with (
        closing(open_object_store(order.store)) as store,
        LeaderClient(order.connect, order.patience_s, order.tls) as leader,
        closing(Deleter(order, attempt, store, leader)) as work,
    ):
        for judged in work.run(itertools.chain([first], candidates)):
            yield _outcome_rows(judged)


def _outcome_rows(judged: Sequence[Judged]) -> pa.RecordBatch:
    values = {
        "key": [one.candidate.key for one in judged],
        "object_id": [one.candidate.object_id for one in judged],
        "size": [one.candidate.size for one in judged],
        "outcome": [str(one.outcome) for one in judged],
        "detail": [one.detail for one in judged],
    }
    return record_batch(OUTCOME_COLUMNS, values)
