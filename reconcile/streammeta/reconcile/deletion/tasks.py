"""Deletion of a task's candidates, each checked with the leader just before.

A key is deleted only if all of these hold:

- the bucket has the marker of the plan's cluster,
- the key still has the plan's object, without records ahead of the metadata,
- the cluster's leader says, just before, that its metadata issued the id and has forgotten it.

The leader's audit log records the deletion first, and the undo records of a batch are on disk
before it is deleted. An error of the marker, the lease, the leader, an audit log or the disk of the
undo records spares the whole batch and ends the task. If the store is too busy for a key, the key
is tried again from the start after a pause, and all tasks of the run slow down. A failure of a
single object never ends a task. Failures because of a permission or the state of the store do,
after many in a row.

Keys close together are looked up by pages of a listing, of which one describes a thousand keys for
the price of a few HEAD requests. If too many other keys lie between them, HEAD requests look up the
rest.
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

from streammeta.reconcile.cluster import controller_client, identity, lease
from streammeta.reconcile.deletion import audit_trail, run_signals
from streammeta.reconcile.deletion.ahead_of_metadata import judge_contents
from streammeta.reconcile.deletion.order import (
    ORPHAN_TAG,
    Candidate,
    DeletionOrder,
    Judged,
    Outcome,
    failed,
)
from streammeta.reconcile.vocabulary import attempts, quarantine, tables
from streammeta.rpc import tracing
from streammeta.storage import durable_files, errors
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.opening import open_object_store
from streammeta.storage.object_store.protocol.base import ObjectInfo, ObjectStore
from streammeta.v1 import common_pb2

_PAGE = 1000
_OTHERS_A_KEY = 100
"""Keys that can be listed in half the time of one HEAD request."""


def find_by_listing(
    store: ObjectStore, keys: Sequence[str], page: int = _PAGE
) -> tuple[dict[str, ObjectInfo], int]:
    """Describe the ascending `keys` in the bucket, as far as a listing is cheaper.

    Returns the found objects by key, and the number of leading `keys` that are settled: found or
    known to be absent. The listing continues up to `page` keys, and 100 more for each settled key.
    """
    found: dict[str, ObjectInfo] = {}
    settled = 0
    if not keys:
        return found, settled
    # The longest prefix of the first key sorts before it and leaves little in between.
    listed = store.list_objects(start_after=keys[0][:-1])
    for passed, info in enumerate(listed):
        while settled < len(keys) and keys[settled] < info.key:
            settled += 1
        if settled < len(keys) and keys[settled] == info.key:
            found[info.key] = info
            settled += 1
        # Too many other keys lie between. The caller asks for the rest one by one.
        if settled == len(keys) or passed >= page + _OTHERS_A_KEY * settled:
            return found, settled
    return found, len(keys)


# HEAD requests mostly wait for the network, so a few at a time shorten a batch.
_HEADS_AT_ONCE = 8
_ANNOUNCED_AT_ONCE = 100
"""Maximum number of ids that a line of the audit log lists. A longer list becomes a digest."""

# The store has 15 s to recover before the keys are left to a later run.
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_HOPELESS = 20
"""Consecutive failures for reasons that may concern all keys, after which a task ends."""


class Deleter:
    """Processes a task's candidates in batches, until an error that concerns all.

    `sleep` takes seconds.
    """

    def __init__(
        self,
        order: DeletionOrder,
        attempt: attempts.Attempt,
        store: ObjectStore,
        leader: controller_client.LeaderClient,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._order = order
        self._attempt_name = attempt.name
        self._others = attempts.OtherAttempts(Path(order.undo_folder), attempt)
        self._store = store
        self._leader = leader
        self._sleep = sleep
        self._pacer = run_signals.Pacer(order.keys_per_s)
        self._signals = run_signals.RunSignals(Path(order.signals_folder), attempt.name)
        self._claimed_below: int | None = None
        self._undo_files = 0
        self._asked_for: set[str] = set()
        self._failed_in_a_row = 0
        self._is_over = False
        self._done = order.done
        self._trail = audit_trail.AuditTrail(order, attempt)

    def run(self, candidates: Iterable[Candidate]) -> Iterator[list[Judged]]:
        """Yield the outcomes of every batch. Candidates that are not tried are `SKIPPED`.

        Once the run ends, there are no further batches and no outcomes of the remaining candidates.
        """
        remaining = iter(candidates)
        while not self._is_over:
            if self._signals.is_ending():
                return
            # A bucket throttles all callers, so all tasks slow down together.
            if self._signals.others_were_busy():
                self._pacer.slow_down()
            batch = list(itertools.islice(remaining, self._pacer.batch_size))
            if not batch:
                return
            judged = self._process_batch(batch)
            self._count_failures(judged)
            try:
                self._trail.end(judged)
            except OSError:  # the beginning is on record, so stop before another one
                self._is_over = True
            yield judged

        while batch := list(itertools.islice(remaining, run_signals.LARGEST_BATCH)):
            yield [
                Judged(candidate, Outcome.SKIPPED, "an earlier batch failed") for candidate in batch
            ]

    def close(self) -> None:
        """Close the audit trail."""
        self._trail.close()

    def _count_failures(self, judged: Sequence[Judged]) -> None:
        if any(result.outcome is not Outcome.FAILED for result in judged):
            self._failed_in_a_row = 0
        else:
            self._failed_in_a_row += sum(result.may_concern_all for result in judged)
        self._is_over = self._is_over or self._failed_in_a_row >= _HOPELESS

    @tracing.traced("streammeta.reconcile.batch")
    def _process_batch(self, batch: Sequence[Candidate]) -> list[Judged]:
        """Process a batch. Throttled keys are retried, with all checks, after a pause."""
        judged = self._attempt(batch)
        for pause_s in _PAUSES_S:
            busy = [result.candidate for result in judged if result.is_busy]
            if not busy or self._is_over:
                self._pacer.speed_up()
                break
            self._pacer.slow_down()
            self._signals.send_busy()
            self._sleep(pause_s)
            judged = [result for result in judged if not result.is_busy] + self._attempt(busy)

        judged = self._credit_attempts(judged)
        tracing.note(Counter(str(result.outcome) for result in judged))
        return judged

    def _attempt(self, batch: Sequence[Candidate]) -> list[Judged]:
        try:
            if self._claimed_below is None:  # once per task, before the first call to the leader
                self._claimed_below = identity.check_bucket(self._store, self._order.identity)
            judged = self._sift(batch)
            free = [result.candidate for result in judged if result.outcome is Outcome.WOULD_DELETE]
            if not free or not self._order.delete:
                return judged
            # The order matters: every record is durable before the first change.
            self._pacer.wait_for(len(free))
            lease.check_held(self._store, self._order.identity.namespace, self._order.run)
            self._write_undo(free)
            # The second question. A commit may have arrived while the content was read.
            free, known = self._announce(free)
            self._trail.begin(free)
        except (errors.StorageError, OSError) as error:
            self._is_over = True
            return [
                Judged(candidate, Outcome.FAILED, f"nothing deleted: {error}")
                for candidate in batch
            ]

        kept = [result for result in judged if result.outcome is not Outcome.WOULD_DELETE]
        return kept + known + self._remove(free)

    def _sift(self, batch: Sequence[Candidate]) -> list[Judged]:
        """Check every candidate. A candidate that may be deleted is `WOULD_DELETE`."""
        judged: list[Judged] = []
        asked: list[Candidate] = []
        for candidate in batch:
            object_id = candidate.object_id
            if candidate.key == key_for(object_id, self._order.identity.namespace):
                asked.append(candidate)
            else:
                judged.append(Judged(candidate, Outcome.REFUSED, f"not the key of {object_id}"))

        # From the cheapest check to the most expensive one, on fewer candidates each time.
        forgotten, known = self._find_forgotten(asked)
        looked_up = self._look_up(forgotten)
        present = [
            result.candidate for result in looked_up if result.outcome is Outcome.WOULD_DELETE
        ]
        others = [result for result in looked_up if result.outcome is not Outcome.WOULD_DELETE]
        contents = judge_contents(self._store, self._leader, present, self._order.next_stream_id)
        return judged + known + others + list(contents)

    def _announce(self, free: Sequence[Candidate]) -> tuple[list[Candidate], list[Judged]]:
        """Let the leader record the next deletions. Returns these, and the kept candidates.

        Sends few at a time, so that the leader's audit log lists every id.
        """
        forgotten: list[Candidate] = []
        known: list[Judged] = []
        for first in range(0, len(free), _ANNOUNCED_AT_ONCE):
            part = self._find_forgotten(free[first : first + _ANNOUNCED_AT_ONCE], deleting=True)
            forgotten += part[0]
            known += part[1]
        return forgotten, known

    def _find_forgotten(
        self, asked: Sequence[Candidate], *, deleting: bool = False
    ) -> tuple[list[Candidate], list[Judged]]:
        """Return the candidates that the metadata has forgotten, and the outcomes of the others."""
        forgotten: list[Candidate] = []
        known: list[Judged] = []
        for candidate, state in zip(asked, self._states(asked, deleting=deleting), strict=True):
            if state == common_pb2.OBJECT_STATE_REMOVED:
                forgotten.append(candidate)
            else:
                detail = f"the metadata says {controller_client.state_name(state)}"
                known.append(Judged(candidate, Outcome.KEPT, detail))
        return forgotten, known

    def _states(self, asked: Sequence[Candidate], *, deleting: bool) -> Sequence[int]:
        if not asked:
            return ()
        ids = [candidate.object_id for candidate in asked]
        standing = self._leader.check_objects(ids, deleting=deleting)
        identity.check_standing(
            standing,
            self._order.identity,
            claimed_below=self._claimed_below or 0,
            next_object_id=self._order.next_object_id,
        )
        return standing.states

    def _look_up(self, candidates: Sequence[Candidate]) -> list[Judged]:
        """Compare candidates with the current objects in the bucket.

        No other live object can have the key, because ids are never issued twice. The comparison
        keeps objects that a person put there, and finds deleted ones.
        """
        # Neighbours in key order are found by one page of a listing.
        in_order = sorted(candidates, key=lambda candidate: candidate.key)
        try:
            keys = [candidate.key for candidate in in_order]
            found, settled = find_by_listing(self._store, keys)
        except errors.StoreUnavailableError as error:
            return [failed(candidate, "not deleted", error) for candidate in in_order]

        by_listing = [
            self._compare(candidate, found.get(candidate.key)) for candidate in in_order[:settled]
        ]
        with ThreadPoolExecutor(_HEADS_AT_ONCE) as pool:
            return by_listing + list(pool.map(self._head, in_order[settled:]))

    def _head(self, candidate: Candidate) -> Judged:
        try:
            return self._compare(candidate, self._store.head(candidate.key))
        except errors.ObjectNotFoundError:
            return Judged(candidate, Outcome.GONE)
        except errors.StoreUnavailableError as error:
            return failed(candidate, "not deleted", error)

    def _compare(self, candidate: Candidate, info: ObjectInfo | None) -> Judged:
        if info is None:
            return Judged(candidate, Outcome.GONE)
        # HEAD and listings may report times with different precision, so compare whole seconds.
        same_time = info.last_modified_ms // 1000 == candidate.modified_ms // 1000
        if same_time and (info.size, info.etag) == (candidate.size, candidate.etag):
            return Judged(candidate, Outcome.WOULD_DELETE)
        return Judged(candidate, Outcome.CHANGED, "size, time or etag differs from the plan")

    def _credit_attempts(self, judged: Sequence[Judged]) -> list[Judged]:
        """Return the outcomes. An absent key that this run deleted counts as deleted."""
        if any(result.outcome is Outcome.GONE for result in judged):
            self._others.look()
        return [
            self._credit(result) if result.outcome is Outcome.GONE else result for result in judged
        ]

    def _credit(self, gone: Judged) -> Judged:
        candidate = gone.candidate
        if candidate.key in self._asked_for:
            return Judged(candidate, self._done, "the request that failed had deleted it")
        # An attempt that tags deletes nothing, so an absent key is not its work.
        if self._others.has_begun(candidate.key) and not self._order.tag:
            return Judged(candidate, self._done, "another attempt of this task had deleted it")
        return gone

    def _write_undo(self, free: Sequence[Candidate]) -> None:
        """Write the undo records of a batch durably, one JSON object per line."""
        number = self._undo_files
        self._undo_files += 1
        folder = Path(self._order.undo_folder)
        folder.mkdir(parents=True, exist_ok=True)
        checked_ms = time.time_ns() // 1_000_000
        lines = (
            json.dumps(asdict(candidate) | {"checked_ms": checked_ms}) + "\n" for candidate in free
        )
        path = folder / f"{self._attempt_name}-{number:06d}.jsonl"
        durable_files.replace_file(durable_files.PosixFileSystem(), path, map(str.encode, lines))

    def _remove(self, free: Sequence[Candidate]) -> list[Judged]:
        """Tag candidates or delete them, with quarantine only after a successful copy."""
        if self._order.tag:
            with ThreadPoolExecutor(_HEADS_AT_ONCE) as pool:
                return list(pool.map(self._tag, free))
        unsaved: list[Judged] = []
        if self._order.quarantine:
            with ThreadPoolExecutor(_HEADS_AT_ONCE) as pool:
                saved = list(pool.map(self._save, free))
            unsaved = [result for result in saved if result.outcome is not self._done]
            free = [result.candidate for result in saved if result.outcome is self._done]
        return unsaved + (self._delete(free) if free else [])

    def _save(self, candidate: Candidate) -> Judged:
        """Copy an object to quarantine. Any error except its absence keeps it."""
        key = candidate.key
        place = quarantine.quarantined_key(key, self._order.identity.namespace)
        # The copy fails if the object changed after the check.
        expected = ObjectInfo(key, candidate.size, candidate.modified_ms, candidate.etag)
        try:
            self._store.copy(key, place, expected)
        except errors.ObjectNotFoundError:
            return Judged(candidate, Outcome.GONE)
        except errors.ObjectChangedError as error:
            return Judged(candidate, Outcome.CHANGED, str(error))
        except errors.StorageError as error:
            return failed(candidate, "not deleted, because it can't be copied", error)
        return Judged(candidate, self._done)

    def _tag(self, candidate: Candidate) -> Judged:
        try:
            self._store.add_tags(candidate.key, ORPHAN_TAG)
        except errors.ObjectNotFoundError:
            return Judged(candidate, Outcome.GONE)
        except (errors.StorageError, ValueError) as error:
            return failed(candidate, "not tagged", error)
        return Judged(candidate, self._done)

    def _delete(self, free: Sequence[Candidate]) -> list[Judged]:
        try:
            result = self._store.delete_many([candidate.key for candidate in free])
        except errors.StorageError as error:
            # After a throttled request the keys are tried again, and may be found absent.
            if isinstance(error, errors.StoreUnavailableError) and error.throttled:
                self._asked_for.update(candidate.key for candidate in free)
            else:
                self._is_over = True
            doubt = "deleting began and may have succeeded in part"
            return [failed(candidate, doubt, error) for candidate in free]

        return [
            Judged(
                candidate,
                Outcome.FAILED,
                f"the store kept it: {why}",
                is_busy=candidate.key in result.throttled,
                may_concern_all=candidate.key in result.throttled | result.denied,
            )
            if (why := result.failed.get(candidate.key)) is not None
            else Judged(candidate, self._done)
            for candidate in free
        ]


def carry_out(
    order: DeletionOrder, attempt: attempts.Attempt, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Carry out an order on a task's candidates, in one attempt.

    Yields the outcomes of each batch as soon as they are known.
    """
    candidates = (Candidate(**row) for batch in batches for row in batch.to_pylist())
    first = next(candidates, None)
    if first is None:
        return
    with (
        closing(open_object_store(order.store)) as store,
        controller_client.LeaderClient(order.connect, order.patience_s, order.tls) as leader,
        closing(Deleter(order, attempt, store, leader)) as work,
    ):
        for judged in work.run(itertools.chain([first], candidates)):
            yield _outcome_rows(judged)


def _outcome_rows(judged: Sequence[Judged]) -> pa.RecordBatch:
    values = {
        "key": [result.candidate.key for result in judged],
        "object_id": [result.candidate.object_id for result in judged],
        "size": [result.candidate.size for result in judged],
        "outcome": [str(result.outcome) for result in judged],
        "detail": [result.detail for result in judged],
    }
    return tables.record_batch(tables.OUTCOME_COLUMNS, values)
