"""Compaction of stream set objects: many small objects of a node become a few large ones.

Owns a cycle: list, select, plan, execute, commit, group after group. It also owns the state for the
next cycle: indexes, outputs whose commit is unknown, objects set aside. A fault of one object or
group is reported and does not stop the others, except errors that fence the node. A process that
dies leaves only prepared ids and their objects, which the controllers delete when the ids expire.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import replace

from streammeta.client import errors
from streammeta.client.compaction.commit import Replacement, commit
from streammeta.client.compaction.config import CompactionConfig, CompactionTarget
from streammeta.client.compaction.listing import NodeListing
from streammeta.client.compaction.output_writer import OutputJournal
from streammeta.client.compaction.report import CompactionReport, GroupReport, SourceError
from streammeta.client.compaction.runner import FENCED, Compactor, repeat, wall_ms
from streammeta.client.compaction.sso_planning import GroupPlanner, PlannedGroup, SetAside
from streammeta.client.compaction.sso_run import CommitRun, RunContext
from streammeta.client.compaction.sso_sources import SourceIndexes
from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.model import NodeIdentity
from streammeta.client.resources.resources import give_back
from streammeta.storage.compaction.selection import Group, Selection, select_stream_set_objects
from streammeta.storage.compaction.verification import CoverageError
from streammeta.storage.errors import StorageError
from streammeta.storage.object_store.protocol.base import ObjectStore
from streammeta.v1.common_pb2 import ERROR_CODE_OFFSET_NOT_MATCHED

_log = logging.getLogger(__name__)


class NodePlan:
    """The compaction of a node as it would be done now."""

    def __init__(self, planner: GroupPlanner, listing: NodeListing, selection: Selection) -> None:
        self._planner = planner
        self.listing = listing
        self.selection = selection
        self.left_out: dict[int, str] = {}
        """Objects of the planned groups that cannot be compacted, with the reason."""

    async def groups(self) -> AsyncGenerator[PlannedGroup, None]:
        """Plan the groups one by one, in the order of execution."""
        for group in self.selection.groups:
            planned = await self._planner.plan(group, self.listing)
            self.left_out |= planned.left_out
            yield planned


class SetObjectCompactor(Compactor):
    """Compacts stream set objects of any node of a cluster, one node at a time.

    `now_ms` returns the time for ages of objects, in ms since 1970. See `Compactor` for the rest.
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
        now_ms: Callable[[], int] = wall_ms,
    ) -> None:
        super().__init__(client, writer, namespace, store, config, is_busy=is_busy)
        self._now_ms = now_ms
        self._set_aside = SetAside()
        self._journal = OutputJournal()
        self._listed: frozenset[int] = frozenset()
        # Cycles share memory, indexes and the journal.
        self._turn = asyncio.Lock()
        self._indexes = SourceIndexes(
            self._calls, self._listing, self._key_of, self._config.index_cache_bytes
        )
        self._planner = GroupPlanner(
            self._config, self._listing, self._indexes, self._set_aside, self._calls
        )
        self._context = RunContext(
            self._config, self._calls, client, writer, self._key_of, self._journal
        )

    async def plan(self, target: CompactionTarget, *, force_split: bool = False) -> NodePlan:
        """Return the current plan of a node, changing nothing.

        Raises errors of listing the node, and `streammeta.storage.errors.WrongBucketError`.
        """
        await self._bucket.require()
        listing = await self._listing.set_objects(target)
        policy = self._config.group_limits
        if target.failover:
            # A departed node adds no objects, so waiting for more of them is pointless.
            policy = replace(policy, growth=1)
        if force_split:
            policy = replace(policy, split_after_s=0, split_along_s=0)
        aside = self._set_aside.reasons()
        selection = select_stream_set_objects(
            listing.objects, policy, self._now_ms(), set_aside=aside
        )
        return NodePlan(self._planner, listing, selection)

    async def compact(
        self, target: CompactionTarget, *, force_split: bool = False
    ) -> AsyncGenerator[GroupReport, None]:
        """Compact the due groups of a node and yield a report after each group.

        With `force_split` every stream gets stream objects, and no stream set object is left.
        Closing the generator stops the compaction. A cycle ends early when the store or the
        controllers do not answer. Raises `NodeFencedError` or `NodeNotRegisteredError` when another
        process replaces the target or the writer, and errors of listing the node.
        """
        async with self._turn:
            plan = await self.plan(target, force_split=force_split)
            # Reports mention only set-aside objects that still exist.
            self._listed = frozenset(plan.listing.objects.object_id.tolist())
            for group in plan.selection.groups:
                started = time.monotonic()
                report = GroupReport(group.kind)
                may_continue = await self._compact_group(target, group, plan.listing, report)
                # Each group frees a large part of the budget, which the next group needs.
                give_back()
                report.seconds = time.monotonic() - started
                yield report
                if not may_continue:
                    return

    async def run_once(
        self, target: CompactionTarget, *, force_split: bool = False
    ) -> CompactionReport:
        """Run one cycle to its end. Raises as `compact`."""
        started = time.monotonic()
        groups = [report async for report in self.compact(target, force_split=force_split)]
        reasons = self._set_aside.reasons()
        aside = {key: reason for key, reason in reasons.items() if key in self._listed}
        return CompactionReport(target.node_id, tuple(groups), aside, time.monotonic() - started)

    async def run(
        self,
        targets: Callable[[], Iterable[CompactionTarget]],
        interval_s: float,
        on_report: Callable[[CompactionReport], None] = lambda _: None,
    ) -> None:
        """Run cycles until cancelled: every `interval_s` seconds one for each of `targets()`.

        The process's own node has no `failover`. Raises `NodeFencedError` or
        `NodeNotRegisteredError` when another process replaces it. For a departed node these errors
        only mean that it is back.
        """

        async def cycle(_now_s: float) -> None:
            for target in targets():
                try:
                    on_report(await self.run_once(target))
                except FENCED as error:
                    if not target.failover:
                        raise
                    _log.info("compaction of %s stopped, the node is back: %s", target, error)
                except (errors.BrokerClientError, StorageError) as error:
                    _log.warning("compaction of %s failed, retrying later: %s", target, error)

        await repeat(interval_s, cycle)

    # -- one group: each step returns whether the cycle continues

    async def _compact_group(
        self, target: CompactionTarget, group: Group, listing: NodeListing, report: GroupReport
    ) -> bool:
        reads, bytes_read = self._indexes.reads, self._indexes.bytes_read
        try:
            planned = await self._planner.plan(group, listing)
        except FENCED:
            raise
        except errors.BrokerClientError as error:
            report.fail(error)
            return False
        except Exception as error:  # noqa: BLE001 - a fault of one group must not stop the others
            self._give_up(group.object_ids, error, report)
            return True

        report.left_out.update(planned.left_out)
        report.figures.add_reads(self._indexes.reads - reads, self._indexes.bytes_read - bytes_read)
        expired = planned.expired_ids
        if expired and not planned.plan.commits:
            return await self._commit(Replacement(target, expired), report)

        for commit_plan in planned.plan.commits:
            run = CommitRun(
                self._context,
                target,
                commit_plan,
                expired,
                listing.time_bounds,
                report.figures,
                planned.checksums,
                planned.bases,
            )
            if not await self._execute(run, commit_plan.source_ids, report):
                return False
            # Expired sources go with the first commit.
            expired = ()
        return True

    async def _execute(
        self, run: CommitRun, source_ids: Sequence[int], report: GroupReport
    ) -> bool:
        try:
            replacement = await run.run()
        except SourceError as error:
            report.left_out[error.object_id] = error.reason
            report.fail(error, f"{error}. The rest of its group is compacted in the next cycle")
            self._set_aside.add(error.object_id, error.reason, passing=error.passing)
            return not error.passing
        except FENCED:
            raise
        except CoverageError as error:
            self._give_up(source_ids, error, report)
        except (StorageError, errors.BrokerClientError) as error:
            report.fail(error)
            return False
        except Exception as error:  # noqa: BLE001 - a fault of one group must not stop the others
            self._give_up(source_ids, error, report)
        else:
            return await self._commit(replacement, report)

        return True

    def _give_up(self, object_ids: Iterable[int], error: Exception, report: GroupReport) -> None:
        """Set objects aside after an unexpected error."""
        reason = f"{type(error).__name__}: {error}"
        _log.error("objects %s could not be compacted", object_ids, exc_info=error)
        report.fail(error, reason)
        for object_id in object_ids:
            report.left_out[object_id] = reason
            self._set_aside.add(object_id, reason)

    async def _commit(self, replacement: Replacement, report: GroupReport) -> bool:
        """Commit, and decide what a rejection means for the next cycle."""
        outputs = replacement.outputs
        try:
            await commit(self._client, replacement, self._config.commit_deadline_s)
        except FENCED:
            raise
        except errors.OutcomeUnknownError as error:
            # After a commit the sources are not listed; otherwise the outputs are used again.
            report.fail(error, f"{error.__cause__}. The next cycle checks the outcome")
            return False
        except errors.RejectedError as error:
            self._journal.drop(output.object_id for output in outputs)
            report.fail(error, " ".join([str(error), *getattr(error, "__notes__", ())]))
            if not isinstance(
                error, errors.CompactedObjectsNotFoundError | errors.ObjectExpiredError
            ):
                self._distrust(replacement, error)
        else:
            report.figures.commits += 1
            report.source_ids.extend(replacement.source_ids)
            report.made.extend(outputs)
            self._journal.drop(output.object_id for output in outputs)
            for source_id in replacement.source_ids:
                self._indexes.cache.forget(source_id)

        return True

    def _distrust(self, replacement: Replacement, error: errors.RejectedError) -> None:
        """Compare the sources with the metadata in the next cycle. After that, set them aside."""
        if error.code == ERROR_CODE_OFFSET_NOT_MATCHED and self._indexes.suspect(
            replacement.source_ids
        ):
            return
        for source_id in replacement.source_ids:
            self._set_aside.add(source_id, f"the commit of its compaction was rejected: {error}")
