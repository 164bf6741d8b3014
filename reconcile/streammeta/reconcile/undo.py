"""Undo: restore the candidates of a plan from quarantine, and change nothing else.

An object is copied back, then its copy in quarantine is deleted. The next run completes the work of
a killed one. Undo never replaces an object: if the key now has other bytes, both objects stay.
"""

from __future__ import annotations

import enum
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from streammeta.reconcile.cluster import identity, lease
from streammeta.reconcile.plans import plan_folder
from streammeta.reconcile.vocabulary.quarantine import quarantine_prefix, quarantined_key
from streammeta.reconcile.vocabulary.tables import CANDIDATE_COLUMNS, Tally, read_batches
from streammeta.storage.errors import ObjectNotFoundError, StorageError
from streammeta.storage.object_store.protocol.address import StoreAddress
from streammeta.storage.object_store.protocol.base import ObjectInfo, ObjectStore

# The store copies the bytes, so threads only wait for it.
_COPIES_AT_ONCE = 8
_BATCH = 500
# Two pieces of this size per thread are in memory.
_COMPARED_AT_ONCE = 8 * 1024 * 1024
_PROBLEMS = 10


class Restored(enum.StrEnum):
    """Outcome of one object in quarantine."""

    RESTORED = "restored"
    OCCUPIED = "occupied"  # its key has another object, both stay
    FAILED = "failed"  # an error occurred, it is still in quarantine


@dataclass(frozen=True, slots=True)
class UndoResult:
    """Outcomes of the objects in quarantine, and a few distinct reasons of failures.

    `left` is the number of candidates without an outcome if the run ended early, at least one of
    them in quarantine, otherwise 0.
    """

    outcomes: Mapping[Restored, Tally]
    problems: tuple[str, ...]
    left: int = 0

    @property
    def complete(self) -> bool:
        """Whether all objects were restored."""
        return not self.left and set(self.outcomes) <= {Restored.RESTORED}


@dataclass(frozen=True, slots=True)
class _Settled:
    key: str
    size: int
    outcome: Restored
    detail: str = ""


def undo(
    folder: Path,
    address: StoreAddress | None = None,
    progress: Callable[[str], None] = lambda _line: None,
    is_ending: Callable[[], bool] = lambda: False,
) -> UndoResult:
    """Restore all candidates of the plan in `folder` from quarantine to their keys.

    The plan may have any age. `address` None means the plan's store. No further batch starts once
    `is_ending` returns true.

    Raises:
        PlanError: the plan does not exist, or is for another bucket.
        LeaseError: another run works in the bucket.
        StorageError: the bucket can't be reached, or has no marker of the plan's cluster. Objects
            restored until then stay.
    """
    plan = plan_folder.read_plan_file(folder)
    address = address or identity.parse_store(plan.store)
    plan_folder.check_store(address, plan)
    namespace, run = plan.identity.namespace, lease.new_run("undo")
    outcomes: defaultdict[Restored, Tally] = defaultdict(Tally)
    problems: dict[str, None] = {}
    left = 0

    with closing(identity.open_store(address)) as store:
        identity.check_bucket(store, plan.identity)
        with lease.held_lease(store, namespace, run):
            candidates = _candidates(folder)
            found = _in_quarantine(store, namespace, candidates)
            while batch := list(itertools.islice(found, _BATCH)):
                if is_ending():
                    # An upper bound: some candidates may not be in quarantine.
                    left = len(candidates) - sum(tally.keys for tally in outcomes.values())
                    break
                # Per batch: after a lost lease another run may delete the objects that undo
                # restores.
                lease.check_held(store, namespace, run)
                for restored in _restore_batch(store, namespace, batch):
                    outcomes[restored.outcome] += Tally(1, restored.size)
                    if restored.detail and len(problems) < _PROBLEMS:
                        problems[restored.detail] = None
                progress(f"restored {outcomes[Restored.RESTORED].keys} objects")

    return UndoResult(
        {outcome: tally for outcome, tally in outcomes.items() if tally.keys}, tuple(problems), left
    )


def _candidates(folder: Path) -> set[str]:
    batches = read_batches(folder / plan_folder.CANDIDATES, CANDIDATE_COLUMNS)
    return {key for batch in batches for key in batch.column("key").to_pylist()}


def _in_quarantine(
    store: ObjectStore, namespace: str, candidates: set[str]
) -> Iterator[tuple[str, ObjectInfo]]:
    prefix = quarantine_prefix(namespace)
    for info in store.list_objects(prefix):
        key = info.key.removeprefix(prefix)
        if key in candidates:
            yield key, info


def _restore_batch(
    store: ObjectStore, namespace: str, batch: Iterable[tuple[str, ObjectInfo]]
) -> list[_Settled]:
    def settle(found: tuple[str, ObjectInfo]) -> _Settled:
        key, info = found
        try:
            return _restore_object(store, key, info)
        except StorageError as error:
            return _Settled(key, info.size, Restored.FAILED, f"{key}: {error}")

    with ThreadPoolExecutor(_COPIES_AT_ONCE) as pool:
        settled = list(pool.map(settle, batch))

    # Copies are deleted only after all objects of the batch are back.
    restored = [item.key for item in settled if item.outcome is Restored.RESTORED]
    failed = store.delete_many([quarantined_key(key, namespace) for key in restored]).failed
    return [
        _Settled(item.key, item.size, Restored.FAILED, f"object is back, but its copy stays: {why}")
        if (why := failed.get(quarantined_key(item.key, namespace))) is not None
        else item
        for item in settled
    ]


def _restore_object(store: ObjectStore, key: str, copy: ObjectInfo) -> _Settled:
    try:
        # Ids are never reused, so another object under the key came from outside the cluster.
        there = store.head(key)
    except ObjectNotFoundError:
        store.copy(copy.key, key, copy)
        return _Settled(key, copy.size, Restored.RESTORED)
    # An earlier undo was killed after the copy and before the deletion.
    if there.size == copy.size and _are_equal(store, key, copy):
        return _Settled(key, copy.size, Restored.RESTORED)
    return _Settled(
        key, copy.size, Restored.OCCUPIED, f"{key} has another object. Move it, then repeat"
    )


def _are_equal(store: ObjectStore, key: str, copy: ObjectInfo) -> bool:
    """Compare bytes, because etags of equal objects may differ after multipart uploads."""
    return all(
        store.get_range(key, at, at + _COMPARED_AT_ONCE)
        == store.get_range(copy.key, at, at + _COMPARED_AT_ONCE)
        for at in range(0, copy.size, _COMPARED_AT_ONCE)
    )
