"""Undo: brings the candidates of a plan back from quarantine, and changes nothing else.

An object is copied back, then its copy in quarantine is deleted; a run that was killed in between
is finished by the next one. What lies under the key meanwhile is never replaced: if its bytes are
others than those in quarantine, both stay.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from streammeta.reconcile.cluster.identity import check_bucket, open_store
from streammeta.reconcile.cluster.lease import check_held, held_lease, new_run
from streammeta.reconcile.plans import plan_folder
from streammeta.reconcile.plans.plan_folder import check_store, read_plan_file
from streammeta.reconcile.vocabulary.quarantine import quarantine_prefix, quarantined_key
from streammeta.reconcile.vocabulary.tables import CANDIDATE_COLUMNS, Tally, read_batches
from streammeta.storage.errors import ObjectNotFoundError, StorageError
from streammeta.storage.object_store.protocol.base import ObjectInfo, ObjectStore

_COPIES_AT_ONCE = 8
_BATCH = 500
_COMPARED_AT_ONCE = 8 * 1024 * 1024
_PROBLEMS = 10


class Restored(enum.StrEnum):
    """Outcome of one object in quarantine."""

    RESTORED = "restored"
    OCCUPIED = "occupied"  # another object lies under its key; both are kept
    FAILED = "failed"  # an error; it is still in quarantine


@dataclass(frozen=True, slots=True)
class UndoResult:
    """Outcomes of the objects that were in quarantine; distinct reasons of failures, a few.

    `left` is the number of candidates without one, of which at least one is in quarantine, if the
    run was to end before; else 0.
    """

    outcomes: Mapping[Restored, Tally]
    problems: tuple[str, ...]
    left: int = 0

    @property
    def complete(self) -> bool:
        """Whether all of them are back."""
        return not self.left and set(self.outcomes) <= {Restored.RESTORED}


@dataclass(frozen=True, slots=True)
class _Judged:
    key: str
    size: int
    outcome: Restored
    detail: str = ""


def undo(
    folder: Path,
    store_uri: str | None = None,
    progress: Callable[[str], None] = lambda _line: None,
    is_ending: Callable[[], bool] = lambda: False,
) -> UndoResult:
    """Bring all candidates of the plan in `folder` that are in quarantine back to their keys.

    A plan of any age is undone. `store_uri` None means the plan's. Once `is_ending` is true no
    further batch is begun.

    Raises:
        PlanError: there is no such plan, or it is of another bucket.
        LeaseError: another run is at work in the bucket.
        StorageError: the bucket can't be reached, or has no marker of the plan's cluster. What was
            brought back until then stays.
    """
    plan = read_plan_file(folder)
    uri = store_uri or plan.store
    check_store(uri, plan)
    namespace, run = plan.identity.namespace, new_run("undo")
    counts: Counter[Restored] = Counter()
    sizes: Counter[Restored] = Counter()
    problems: dict[str, None] = {}
    left = 0

    with closing(open_store(uri)) as store:
        check_bucket(store, plan.identity)
        with held_lease(store, namespace, run):
            candidates = _candidates(folder)
            found = _in_quarantine(store, namespace, candidates)
            while batch := list(itertools.islice(found, _BATCH)):
                if is_ending():
                    left = len(candidates) - counts.total()
                    break
                check_held(store, namespace, run)
                for one in _bring_back(store, namespace, batch):
                    counts[one.outcome] += 1
                    sizes[one.outcome] += one.size
                    if one.detail and len(problems) < _PROBLEMS:
                        problems[one.detail] = None
                progress(f"brought {counts[Restored.RESTORED]} objects back")

    outcomes = {outcome: Tally(counts[outcome], sizes[outcome]) for outcome in counts}
    return UndoResult(outcomes, tuple(problems), left)


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


def _bring_back(
    store: ObjectStore, namespace: str, batch: Iterable[tuple[str, ObjectInfo]]
) -> list[_Judged]:
    def settle(found: tuple[str, ObjectInfo]) -> _Judged:
        key, info = found
        try:
            return _settled(store, key, info)
        except StorageError as error:
            return _Judged(key, info.size, Restored.FAILED, f"{key}: {error}")

    with ThreadPoolExecutor(_COPIES_AT_ONCE) as pool:
        judged = list(pool.map(settle, batch))
    back = [one.key for one in judged if one.outcome is Restored.RESTORED]
    failed = store.delete_many([quarantined_key(key, namespace) for key in back]).failed
    return [
        _Judged(one.key, one.size, Restored.FAILED, f"it is back, but its copy stays: {why}")
        if (why := failed.get(quarantined_key(one.key, namespace))) is not None
        else one
        for one in judged
    ]


def _settled(store: ObjectStore, key: str, copy: ObjectInfo) -> _Judged:
    try:
        there = store.head(key)
    except ObjectNotFoundError:
        store.copy(copy.key, key, copy)
        return _Judged(key, copy.size, Restored.RESTORED)
    if there.size == copy.size and _are_equal(store, key, copy):
        return _Judged(key, copy.size, Restored.RESTORED)
    return _Judged(
        key, copy.size, Restored.OCCUPIED, f"another object lies at {key}; move it, then repeat"
    )


def _are_equal(store: ObjectStore, key: str, copy: ObjectInfo) -> bool:
    """Compare bytes: etags of equal objects may differ, as of those that were made of parts."""
    return all(
        store.get_range(key, at, at + _COMPARED_AT_ONCE)
        == store.get_range(copy.key, at, at + _COMPARED_AT_ONCE)
        for at in range(0, copy.size, _COMPARED_AT_ONCE)
    )
