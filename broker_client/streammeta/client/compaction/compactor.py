"""Compaction of stream set objects: many small objects of a node become few large ones.

Owns a cycle: list, choose, plan, carry out, commit, group after group; and what one cycle leaves to
the next: indexes, outputs that are not known to be committed, objects that can't be compacted. A
fault of one object, or of one group, is reported and does not stop the others; only what bars the
node does. A process that dies leaves nothing but prepared ids and their objects, which the
controllers delete when their time is over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from streammeta.client.bucket_check import BucketCheck
from streammeta.client.compaction.commit import Replacement, commit
from streammeta.client.compaction.commit_run import CommitRun, SourceFailedError, Workshop
from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.group_planning import GroupPlanner, PlannedGroup, SetAside
from streammeta.client.compaction.node_map import NodeListing, NodeMap
from streammeta.client.compaction.report import CompactionReport, Figures, GroupReport
from streammeta.client.compaction.resume import OutputJournal
from streammeta.client.compaction.source_indexes import SourceIndexes
from streammeta.client.compaction.store_calls import StoreCalls
from streammeta.client.compaction.target import CompactionTarget
from streammeta.client.controller_client import ControllerClient
from streammeta.client.errors import (
    BrokerClientError,
    CompactedObjectsNotFoundError,
    NodeFencedError,
    NodeNotRegisteredError,
    ObjectExpiredError,
    OutcomeUnknownError,
    RefusedError,
)
from streammeta.client.resources import give_back
from streammeta.storage.compaction.selection import (
    Group,
    GroupKind,
    Selection,
    SetObjects,
    select_set_objects,
)
from streammeta.storage.compaction.verification import CoverageError
from streammeta.storage.errors import StorageError
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.base import ObjectStore
from streammeta.v1.common_pb2 import ERROR_CODE_OFFSET_NOT_MATCHED, NodeIdentity

_BARRED = (NodeFencedError, NodeNotRegisteredError)

_log = logging.getLogger(__name__)


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


class NodePlan:
    """What would be done for a node now. Nothing is changed by asking."""

    def __init__(self, planner: GroupPlanner, listing: NodeListing, selection: Selection) -> None:
        self._planner = planner
        self.listing = listing
        self.selection = selection
        self._left_out: dict[int, str] = {}

    @property
    def objects(self) -> SetObjects:
        """All set objects of the node."""
        return self.listing.objects

    @property
    def waiting(self) -> tuple[int, ...]:
        """Those that are in no group: their time has not come."""
        return self.selection.waiting

    @property
    def left_out(self) -> dict[int, str]:
        """Objects of the groups planned so far that can't be compacted, and why."""
        return dict(self._left_out)

    async def groups(self) -> AsyncGenerator[PlannedGroup, None]:
        """Plan one group after the other, in the order in which they would be worked off."""
        for group in self.selection.groups:
            planned = await self._planner.plan(group, self.listing)
            self._left_out |= planned.left_out
            yield planned


@dataclass(slots=True)
class _Progress:
    """What became of a group so far."""

    kind: GroupKind
    source_ids: list[int] = field(default_factory=list)
    set_object_ids: list[int] = field(default_factory=list)
    stream_object_ids: list[int] = field(default_factory=list)
    left_out: dict[int, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    figures: Figures = field(default_factory=Figures)
    goes_on: bool = True

    def committed(self, replacement: Replacement) -> None:
        """Count a commit that was made."""
        self.figures.commits += 1
        self.source_ids.extend(replacement.source_ids)
        if replacement.set_object is not None:
            self.set_object_ids.append(replacement.set_object.written.object_id)
        self.stream_object_ids.extend(one.written.object_id for one in replacement.stream_objects)

    def report(self, seconds: float) -> GroupReport:
        """Return it as it is told."""
        return GroupReport(
            self.kind,
            tuple(self.source_ids),
            tuple(self.set_object_ids),
            tuple(self.stream_object_ids),
            self.left_out,
            "; ".join(self.failures),
            self.figures,
            seconds,
        )


class SetObjectCompactor:
    """Compacts set objects of any node of a cluster, one node at a time.

    `writer` is the process that does it: ids are prepared in its name. `is_busy` tells whether
    others want the store now, which compaction gives way to; without it, it gives way to others'
    calls of the same `store`. `now_ms` is the time that ages are told by, in ms since 1970.
    """

    def __init__(
        self,
        client: ControllerClient,
        writer: NodeIdentity,
        namespace: str,
        store: ObjectStore,
        config: CompactionConfig | None = None,
        *,
        is_busy: Callable[[], bool] | None = None,
        now_ms: Callable[[], int] = _wall_ms,
    ) -> None:
        self._client = client
        self._config = config or CompactionConfig()
        self._now_ms = now_ms
        self._bucket = BucketCheck(client, store, namespace)
        self._calls = StoreCalls(store, self._config, is_busy)
        self._map = NodeMap(client)
        self._set_aside = SetAside()
        self._journal = OutputJournal()
        self._listed: frozenset[int] = frozenset()
        self._turn = asyncio.Lock()

        def key_of(object_id: int) -> str:
            return key_for(object_id, namespace)

        self._indexes = SourceIndexes(
            self._calls, self._map, key_of, self._config.index_cache_bytes
        )
        self._planner = GroupPlanner(
            self._config, self._map, self._indexes, self._set_aside, self._calls
        )
        self._shop = Workshop(self._config, self._calls, self._map, writer, key_of, self._journal)

    def close(self) -> None:
        """Give up the threads; nothing may be under way."""
        self._calls.close()

    async def plan(self, target: CompactionTarget, *, force_split: bool = False) -> NodePlan:
        """Find out what would be done now.

        Raises what bars listing the node, and `streammeta.storage.errors.WrongBucketError`.
        """
        await self._bucket.passed()
        listing = await self._map.set_objects(target)
        policy = self._config.group_limits
        if target.failover:
            # Nothing comes after what a node that is gone has left: there is nothing to wait for.
            policy = replace(policy, growth=1)
        if force_split:
            policy = replace(policy, split_after_ms=0, split_along_ms=0)
        aside = self._set_aside.reasons()
        selection = select_set_objects(listing.objects, policy, self._now_ms(), set_aside=aside)
        return NodePlan(self._planner, listing, selection)

    async def compact(
        self, target: CompactionTarget, *, force_split: bool = False
    ) -> AsyncGenerator[GroupReport, None]:
        """Compact what is due of a node; tell of each group when it is done with.

        With `force_split` every stream gets stream objects, and no set object is left. Who stops
        asking stops the compaction. A cycle ends early when the store or the controllers do not
        answer. Raises `NodeFencedError` or `NodeNotRegisteredError` when the target, or the writer,
        has been taken over; and what bars listing the node.
        """
        async with self._turn:
            plan = await self.plan(target, force_split=force_split)
            self._listed = frozenset(plan.objects.object_id.tolist())
            for group in plan.selection.groups:
                started = time.monotonic()
                progress = _Progress(group.kind)
                await self._compact_group(target, group, plan.listing, progress)
                give_back()
                yield progress.report(time.monotonic() - started)
                if not progress.goes_on:
                    return

    async def run_once(
        self, target: CompactionTarget, *, force_split: bool = False
    ) -> CompactionReport:
        """Run one cycle to its end. Raises as `compact`."""
        started = time.monotonic()
        groups = [one async for one in self.compact(target, force_split=force_split)]
        reasons = self._set_aside.reasons()
        aside = {one: reason for one, reason in reasons.items() if one in self._listed}
        return CompactionReport(target.node_id, tuple(groups), aside, time.monotonic() - started)

    async def run(
        self,
        targets: Callable[[], Iterable[CompactionTarget]],
        interval: float,
        on_report: Callable[[CompactionReport], None] = lambda _: None,
    ) -> None:
        """Run cycles until cancelled: every `interval` seconds one for each of `targets()`.

        The process's own node comes without `failover`. Raises `NodeFencedError` or
        `NodeNotRegisteredError` when it has been taken over; for a node that was gone they only
        mean that it is back.
        """
        while True:
            started = time.monotonic()
            for target in targets():
                try:
                    on_report(await self.run_once(target))
                except _BARRED as error:
                    if not target.failover:
                        raise
                    _log.info("%s is not compacted any more: %s", target, error)
                except (BrokerClientError, StorageError) as error:
                    _log.warning("%s could not be compacted: %s", target, error)
            await asyncio.sleep(max(0.0, interval - (time.monotonic() - started)))

    # -- one group

    async def _compact_group(
        self, target: CompactionTarget, group: Group, listing: NodeListing, progress: _Progress
    ) -> None:
        reads, bytes_read = self._indexes.reads, self._indexes.bytes_read
        try:
            planned = await self._planner.plan(group, listing)
        except _BARRED:
            raise
        except BrokerClientError as error:
            progress.failures.append(str(error))
            progress.goes_on = False
            return
        except Exception as error:  # noqa: BLE001 - what one group meets must not stop the others
            self._give_up(group.object_ids, error, progress)
            return
        progress.left_out.update(planned.left_out)
        progress.figures.gets += self._indexes.reads - reads
        progress.figures.bytes_read += self._indexes.bytes_read - bytes_read
        expired = planned.expired_ids
        if expired and not planned.plan.commits:
            await self._commit(Replacement(target, expired, None, ()), progress)
        for commit_plan in planned.plan.commits:
            run = CommitRun(
                self._shop,
                target,
                commit_plan,
                expired,
                listing.time_bounds,
                progress.figures,
                planned.checksums,
            )
            await self._carry_out(run, commit_plan.source_ids, progress)
            expired = ()
            if not progress.goes_on:
                return

    async def _carry_out(
        self, run: CommitRun, source_ids: Sequence[int], progress: _Progress
    ) -> None:
        try:
            replacement = await run.run()
        except SourceFailedError as error:
            progress.left_out[error.object_id] = error.reason
            progress.failures.append(
                f"{error}; the rest of its group is compacted in the next cycle"
            )
            self._set_aside.add(error.object_id, error.reason, passing=error.passing)
            progress.goes_on = not error.passing
        except _BARRED:
            raise
        except CoverageError as error:
            self._give_up(source_ids, error, progress)
        except (StorageError, BrokerClientError) as error:
            progress.failures.append(str(error))
            progress.goes_on = False
        except Exception as error:  # noqa: BLE001 - what one group meets must not stop the others
            self._give_up(source_ids, error, progress)
        else:
            await self._commit(replacement, progress)

    def _give_up(self, object_ids: Iterable[int], error: Exception, progress: _Progress) -> None:
        """Set objects aside that met what should not happen."""
        reason = f"{type(error).__name__}: {error}"
        _log.error("objects %s could not be compacted", object_ids, exc_info=error)
        progress.failures.append(reason)
        for object_id in object_ids:
            progress.left_out[object_id] = reason
            self._set_aside.add(object_id, reason)

    async def _commit(self, replacement: Replacement, progress: _Progress) -> None:
        """Commit, and decide what a refusal means for the next cycle."""
        try:
            await commit(self._client, replacement, self._config.commit_deadline_s)
        except _BARRED:
            raise
        except OutcomeUnknownError as error:
            # If it was made its sources are not listed any more; else its outputs are used again.
            progress.failures.append(f"{error.__cause__}; the next cycle finds out")
            progress.goes_on = False
        except RefusedError as error:
            self._journal.drop(replacement.output_ids)
            progress.failures.append(" ".join([str(error), *getattr(error, "__notes__", ())]))
            if not isinstance(error, CompactedObjectsNotFoundError | ObjectExpiredError):
                self._distrust(replacement, error)
        else:
            progress.committed(replacement)
            self._journal.drop(replacement.output_ids)
            for source_id in replacement.source_ids:
                self._indexes.forget(source_id)

    def _distrust(self, replacement: Replacement, error: RefusedError) -> None:
        """Hold sources against the map the next time; if that was done, leave them alone."""
        if error.code == ERROR_CODE_OFFSET_NOT_MATCHED and self._indexes.suspect(
            replacement.source_ids
        ):
            return
        for source_id in replacement.source_ids:
            self._set_aside.add(source_id, f"the commit of its compaction was refused: {error}")
