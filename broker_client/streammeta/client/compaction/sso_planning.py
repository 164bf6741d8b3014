"""Plans for groups of stream set objects, without faulty sources.

Owns the lookups for a plan, indexes of the objects and starts of their streams, and the objects set
aside. An object that cannot be compacted divides its group, because the policy grouped neighbours:
otherwise the rest would be compacted around a gap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from streammeta.client.compaction import sso_sources
from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.listing import Listing, NodeListing
from streammeta.client.compaction.report import SourceError
from streammeta.client.compaction.store_calls import StoreCalls
from streammeta.storage.compaction.bases import Bases
from streammeta.storage.compaction.entries import EntryTable, live_entries, objects_without_entries
from streammeta.storage.compaction.plan import CompactionLimits, CompactionPlan, ExclusionReason
from streammeta.storage.compaction.planner import plan_compaction, plan_force_split
from streammeta.storage.compaction.selection import Group, GroupKind
from streammeta.storage.compaction.verification import RecordedChecksum

SET_ASIDE_S = 3600.0
"""Time until an object that could not be compacted is retried, in seconds."""

SET_ASIDE_SHORTLY_S = 300.0
"""The same if the reason may pass."""

_FAULTS = (ExclusionReason.OVERSIZED_ENTRY, ExclusionReason.OVERLAP)


@dataclass(frozen=True, slots=True, eq=False)
class PlannedGroup:
    """A group, the live entries of its objects, and the plan for them.

    Objects in `expired_ids` have only trimmed offsets and are removed without a replacement.
    `left_out` has the objects that stay, with the reason. `checksums` has the known checksums,
    `bases` the bases of relative objects.
    """

    kind: GroupKind
    object_ids: tuple[int, ...]
    entries: EntryTable
    plan: CompactionPlan
    expired_ids: tuple[int, ...]
    left_out: dict[int, str] = field(default_factory=dict)
    checksums: dict[int, RecordedChecksum] = field(default_factory=dict)
    bases: dict[int, Bases] = field(default_factory=dict)


class SetAside:
    """Objects that could not be compacted recently, each with the time of its next attempt."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[int, tuple[float, str]] = {}

    def add(self, object_id: int, reason: str, *, passing: bool = False) -> None:
        """Skip an object for `SET_ASIDE_S`, or shortly if the reason may pass."""
        seconds = SET_ASIDE_SHORTLY_S if passing else SET_ASIDE_S
        self._until[object_id] = (self._clock() + seconds, reason)

    def reasons(self) -> dict[int, str]:
        """Return the objects with the reason."""
        now = self._clock()
        self._until = {key: kept for key, kept in self._until.items() if kept[0] > now}
        return {key: reason for key, (_, reason) in self._until.items()}


@dataclass(eq=False)
class GroupPlanner:
    """Plans groups of one node's objects, one at a time."""

    _config: CompactionConfig
    _listing: Listing
    _indexes: sso_sources.SourceIndexes
    _set_aside: SetAside
    _calls: StoreCalls

    async def plan(self, group: Group, listing: NodeListing) -> PlannedGroup:
        """Plan a group. Raises errors of the controllers."""
        left_out: dict[int, str] = {}
        sources = _sources(group.object_ids, listing)
        indexes = self._select_readable(await self._indexes.load(sources), left_out)
        # Before the starts are listed: objects left out here need no lookup.
        self._limit_entries(indexes, left_out)
        starts = await self._list_starts(indexes.values())

        def work() -> PlannedGroup:
            for object_id, index in list(indexes.items()):
                if not sso_sources.is_whole(index, starts):
                    self._leave_out(object_id, _NOT_WHOLE, left_out)
                    del indexes[object_id]
            live = {key: live_entries(index.entries, starts) for key, index in indexes.items()}
            return self._plan_group(group, live, left_out)

        # In a thread: a large group takes seconds of CPU time.
        planned = await self._calls.compute(work)
        for object_id, index in indexes.items():
            if (bases := index.bases) is not None:
                planned.bases[object_id] = bases
            crc32c = listing.checksums.get(object_id)
            if crc32c is not None:
                seen = (index.data_size, index.tail_size, index.tail_crc32c)
                planned.checksums[object_id] = RecordedChecksum(crc32c, *seen)
        return planned

    def _select_readable(
        self, loaded: dict[int, sso_sources.SourceIndex | SourceError], left_out: dict[int, str]
    ) -> dict[int, sso_sources.SourceIndex]:
        readable: dict[int, sso_sources.SourceIndex] = {}
        for object_id, result in loaded.items():
            if isinstance(result, sso_sources.SourceIndex):
                readable[object_id] = result
            elif result.passing:
                left_out[object_id] = result.reason
            else:
                self._leave_out(object_id, result.reason, left_out)
        return readable

    def _limit_entries(
        self, indexes: dict[int, sso_sources.SourceIndex], left_out: dict[int, str]
    ) -> None:
        """Leave out objects whose indexes do not fit in memory with those before them."""
        most, total = self._config.max_entries, 0
        is_full = False
        for object_id, index in list(indexes.items()):
            count = len(index.entries)
            if count > most:
                reason = (
                    f"its index has {count} entries, and memory is for {most}. Raise the budget"
                )
                self._leave_out(object_id, reason, left_out)
            elif is_full or total + count > most:
                is_full = True
                left_out[object_id] = "the indexes of earlier objects fill the memory for indexes"
            else:
                total += count
                continue

            del indexes[object_id]

    async def _list_starts(self, indexes: Iterable[sso_sources.SourceIndex]) -> dict[int, int]:
        streams = [index.entries.stream_id for index in indexes]
        # Sources share most streams, so each is looked up once.
        distinct = np.unique(np.concatenate(streams)) if streams else np.empty(0, dtype=np.int64)
        return await self._listing.stream_starts(distinct.tolist())

    def _plan_group(
        self, group: Group, live: dict[int, EntryTable], left_out: dict[int, str]
    ) -> PlannedGroup:
        """Plan each stretch of neighbours, and plan again without faulty objects."""
        while True:
            stretches = list(_stretches(group.object_ids, live))
            tables = [
                EntryTable.concatenate([live[key] for key in stretch]) for stretch in stretches
            ]
            plans = [self._plan_of(group, table) for table in tables if len(table)]
            excluded = [exclusion for plan in plans for exclusion in plan.excluded]
            faulty = [exclusion for exclusion in excluded if exclusion.reason in _FAULTS]
            for exclusion in faulty:
                self._leave_out(exclusion.object_id, exclusion.detail, left_out)
                del live[exclusion.object_id]
            if not faulty:
                break

        entries = EntryTable.concatenate(tables)
        left_out |= {exclusion.object_id: exclusion.detail for exclusion in excluded}
        return PlannedGroup(
            group.kind,
            group.object_ids,
            entries,
            CompactionPlan(
                tuple(commit for plan in plans for commit in plan.commits),
                tuple(excluded),
                tuple(object_id for plan in plans for object_id in plan.left_alone),
            ),
            objects_without_entries(live, entries),
            left_out,
        )

    def _plan_of(self, group: Group, table: EntryTable) -> CompactionPlan:
        config = self._config
        limits = CompactionLimits(
            # Indexes and blocks share the budget.
            memory_budget=config.block_bytes(len(table)),
            split_size=group.split_size,
            max_streams=config.max_streams,
            max_stream_objects=config.max_stream_objects,
        )
        if group.kind is GroupKind.SPLIT:
            return plan_force_split(table, limits)
        return plan_compaction(table, limits, sharing_only=False)

    def _leave_out(self, object_id: int, reason: str, left_out: dict[int, str]) -> None:
        left_out[object_id] = reason
        self._set_aside.add(object_id, reason)


_NOT_WHOLE = (
    "its index does not have all offsets that the metadata lists. Compare it with"
    " `streammeta object`, and keep it"
)


def _sources(object_ids: Collection[int], listing: NodeListing) -> list[sso_sources.Source]:
    """Return these objects as listed, in the given order."""
    objects = listing.objects
    rows = zip(
        objects.object_id.tolist(),
        objects.object_size.tolist(),
        objects.range_count.tolist(),
        strict=True,
    )
    listed = {row[0]: sso_sources.Source(*row) for row in rows}
    return [listed[object_id] for object_id in object_ids]


def _stretches(object_ids: Sequence[int], live: Collection[int]) -> Iterator[list[int]]:
    """Split neighbours where one is missing."""
    stretch: list[int] = []
    for object_id in object_ids:
        if object_id in live:
            stretch.append(object_id)
        elif stretch:
            yield stretch
            stretch = []
    if stretch:
        yield stretch
