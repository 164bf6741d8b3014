"""One call of `streammeta compact`: find the nodes, plan or compact each, show the result.

Owns the selection of nodes, the order of work, and its end by a signal. The failure of one node
does not stop the others. The command registers and fences no node: commits carry the epoch that the
node's own process registered. A live node prepares the object ids, because controllers reject those
of a departed node.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, closing, suppress
from dataclasses import dataclass

import grpc

from streammeta.cli.brokers import compaction_view
from streammeta.cli.brokers.compaction_request import CompactionRequest
from streammeta.cli.framework.client import call_error
from streammeta.cli.framework.output import CommandError, Output, explain
from streammeta.client import errors
from streammeta.client.compaction.config import CompactionConfig, CompactionTarget
from streammeta.client.compaction.report import GroupReport
from streammeta.client.compaction.sso_compactor import SetObjectCompactor
from streammeta.client.compaction.sso_planning import PlannedGroup
from streammeta.client.compaction.stream_object_compactor import StreamObjectCompactor
from streammeta.client.controllers import bucket_check, controller_client, methods
from streammeta.client.model import NodeIdentity
from streammeta.rpc.advice import advice
from streammeta.rpc.failures import RpcFailure, read_failure
from streammeta.storage.compaction.entries import EntryTable
from streammeta.storage.compaction.plan import CommitPlan
from streammeta.storage.errors import StorageError, WrongBucketError
from streammeta.storage.object_store.protocol.base import ObjectStore
from streammeta.tls.files import TlsFiles
from streammeta.v1 import nodes_pb2


@dataclass(frozen=True, slots=True)
class Targets:
    """Nodes with stream set objects, and the live node that prepares ids.

    `writer` is None exactly if there is nothing to compact.
    """

    targets: tuple[CompactionTarget, ...]
    writer: NodeIdentity | None


async def find_targets(
    client: controller_client.ControllerClient, node_ids: Sequence[int] = (), *, gone: bool = False
) -> Targets:
    """Look up the nodes with these ids, or all (`gone`: all gone) nodes with stream set objects.

    Raises `CommandError` if a named node has not registered, or no node is live.
    """
    # Describe all nodes, because the writer may be one that the user did not select.
    pages = client.pages(methods.GET_NODES, nodes_pb2.GetNodesRequest())
    known = {node.node_id: node async for page in pages for node in page.nodes}
    unknown = [node_id for node_id in node_ids if node_id not in known]

    if unknown:
        raise CommandError(
            "NODE_EPOCH_NOT_EXIST",
            f"node {unknown[0]} has not registered",
            "`streammeta node list` shows the registered nodes",
        )

    # dict.fromkeys drops repeated ids and keeps the user's order.
    chosen = [known[node_id] for node_id in dict.fromkeys(node_ids)] or [
        node
        for node in known.values()
        if node.stream_set_object_count and (is_gone(node) or not gone)
    ]
    # With failover the compactor does not wait for more objects: a node without a process adds
    # none.
    targets = tuple(
        CompactionTarget(node.node_id, node.node_epoch, failover=is_gone(node)) for node in chosen
    )
    return Targets(targets, _writer(list(known.values()), chosen) if targets else None)


def is_gone(node: nodes_pb2.NodeDescription) -> bool:
    """Return whether the node has no process that could compact by itself."""
    return _is_barred(node) or node.state == nodes_pb2.NODE_STATE_FENCED


def _is_barred(node: nodes_pb2.NodeDescription) -> bool:
    """Return whether the controllers reject requests of the node's own process."""
    return node.departed or node.failover


def _writer(
    nodes: Sequence[nodes_pb2.NodeDescription], chosen: Sequence[nodes_pb2.NodeDescription]
) -> NodeIdentity:
    """Return a node that may prepare ids, preferably a selected one, and one with heartbeats."""
    able = [node for node in (*chosen, *nodes) if not _is_barred(node)]
    # The sort is stable. Fenced nodes go last, and selected nodes stay first among their kind.
    able.sort(key=is_gone)
    if not able:
        raise CommandError(
            "NO_LIVE_NODE",
            "no live node can prepare object ids",
            "start a broker, or register a node, and repeat",
        )
    return NodeIdentity(node_id=able[0].node_id, node_epoch=able[0].node_epoch)


_WAITS = "it is too young. It will be merged with more objects of its size, or once it is old"


async def plan(request: CompactionRequest, output: Output) -> None:
    """Show the plan of each selected node. Raises `CommandError` if one can't be planned."""
    async with _open_work(request) as work:
        found = await work.targets()
        try:
            # Without targets no writer is known, and none is needed.
            plans = [await work.plan(found, target) for target in found.targets]
        except errors.BrokerClientError as error:
            raise _command_error(error, request.tls) from error
    compaction_view.show_plan(output, plans)


async def run(
    request: CompactionRequest,
    interval_ms: int | None,
    output: Output,
    *,
    stream_objects: bool = False,
) -> None:
    """Compact for each selected node, once or repeatedly, and show the result at the end.

    The first signal ends the run after the current work, a second one at once. Raises
    `CommandError` if a node failed in the last pass.
    """
    # Handlers come before any work, so that a signal never breaks off a commit.
    stopping = _stopped_by_signals()
    totals = compaction_view.Totals()

    # One compactor serves all passes, so that indexes read in one pass are cached for the next.
    async with _open_work(request) as work:
        while True:
            try:
                found = await work.targets()
                await work.compact_all(found, totals, stopping, stream_objects=stream_objects)
            except CommandError as error:
                # Wrong options and an unreachable cluster should fail at once. Later passes outlast
                # a failover.
                if totals.passes == 1:
                    raise
                totals.failures[-1] = str(error)  # it may pass until the next repetition
            # A signal ends the pause too.
            if interval_ms is None or await _is_set(stopping, interval_ms / 1000):
                break
            totals.begin_pass()

    # After a signal, unfinished work is what the user asked for.
    if totals.failures and not stopping.is_set():
        raise CommandError(
            "INCOMPLETE",
            "; ".join(totals.failures.values()),
            "committed work is kept. Correct this and repeat the command",
            details=totals.summary(),
        )

    compaction_view.show_totals(output, totals)


@dataclass(slots=True)
class CompactionWork:
    """Cluster, bucket, and a compactor that is kept while its writer is the same."""

    client: controller_client.ControllerClient
    store: ObjectStore
    namespace: str
    request: CompactionRequest
    config: CompactionConfig
    _compactor: SetObjectCompactor | None = None
    _writer: NodeIdentity | None = None

    def close(self) -> None:
        """Release the threads."""
        if self._compactor is not None:
            self._compactor.close()

    async def targets(self) -> Targets:
        """Find the requested nodes. Raises `CommandError`."""
        try:
            request = self.request
            return await find_targets(self.client, request.node_ids, gone=request.gone)
        except errors.BrokerClientError as error:
            raise _command_error(error, request.tls) from error

    async def plan(self, found: Targets, target: CompactionTarget) -> compaction_view.NodePlan:
        """Plan for one of the nodes found."""
        planned = await self._compactor_of(found).plan(target, force_split=self.request.force_split)
        listed = compaction_view.listed_objects(planned.listing.objects)
        commits: list[compaction_view.CommitFigures] = []
        left_out = dict.fromkeys(planned.selection.waiting, _WAITS)
        # Close the generator here and not whenever the garbage collector finds it.
        async with aclosing(planned.groups()) as groups:
            async for group in groups:
                commits.extend(self._figures(group, listed))
                left_out |= dict.fromkeys(group.plan.left_alone, _SHARES_NOTHING)
        return compaction_view.NodePlan(target.node_id, tuple(commits), left_out | planned.left_out)

    def _figures(
        self, group: PlannedGroup, listed: dict[int, compaction_view.ListedObject]
    ) -> list[compaction_view.CommitFigures]:
        """Return the figures of each commit of a group. The first one includes expired objects."""
        plans = [(commit, commit.source_ids) for commit in group.plan.commits]
        # Expired objects have no live data. They join the first commit, or form a commit without
        # outputs.
        if group.expired_ids:
            first, ids = plans[0] if plans else (_NOTHING, ())
            plans[:1] = [(first, (*ids, *group.expired_ids))]
        return [
            compaction_view.commit_figures(
                commit, [listed[key] for key in ids], self.config, group.kind
            )
            for commit, ids in plans
        ]

    async def compact_all(
        self,
        found: Targets,
        totals: compaction_view.Totals,
        stopping: asyncio.Event,
        *,
        stream_objects: bool,
    ) -> None:
        """Compact the due objects of every node found, until `stopping` is set."""
        for target in found.targets:
            # A signal between two nodes: nothing has begun for this one.
            if stopping.is_set():
                return
            try:
                compactor = self._compactor_of(found)
                reports = compactor.compact(target, force_split=self.request.force_split)
                await _add(reports, target, totals, stopping)
                # Stream objects are committed as the node that owns the streams, so it must be
                # live.
                if stream_objects and not target.failover and not stopping.is_set():
                    with closing(self._stream_object_compactor(target.identity)) as of_streams:
                        await _add(of_streams.compact_node(), target, totals, stopping)
            except (errors.BrokerClientError, StorageError) as error:
                totals.failures[target.node_id] = f"node {target.node_id}: {error}"
        # Nodes without stream set objects are not targets, but have a part of the shared streams.
        is_whole_cluster = not self.request.node_ids and not self.request.gone
        if stream_objects and is_whole_cluster and found.writer is not None:
            await self._compact_shared(found.writer, totals, stopping)

    async def _compact_shared(
        self, writer: NodeIdentity, totals: compaction_view.Totals, stopping: asyncio.Event
    ) -> None:
        """Compact all shared streams in the name of `writer`."""
        if stopping.is_set():
            return
        try:
            with closing(self._stream_object_compactor(writer)) as of_streams:
                await _add(of_streams.compact_shared(), writer, totals, stopping)
        except (errors.BrokerClientError, StorageError) as error:
            totals.failures.setdefault(writer.node_id, f"node {writer.node_id}: {error}")

    def _stream_object_compactor(self, writer: NodeIdentity) -> StreamObjectCompactor:
        return StreamObjectCompactor(self.client, writer, self.namespace, self.store, self.config)

    def _compactor_of(self, found: Targets) -> SetObjectCompactor:
        """Return the compactor of the selected writer."""
        assert found.writer is not None, "a target has a writer"
        # The writer may depart between two passes. Then another node prepares the ids.
        if self._compactor is None or self._writer != found.writer:
            if self._compactor is not None:
                self._compactor.close()
            self._writer = found.writer
            self._compactor = SetObjectCompactor(
                self.client, found.writer, self.namespace, self.store, self.config
            )
        return self._compactor


async def _add(
    work: AsyncGenerator[GroupReport],
    target: CompactionTarget | NodeIdentity,
    totals: compaction_view.Totals,
    stopping: asyncio.Event,
) -> None:
    """Add the reports of work as they arrive, until `stopping` is set."""
    # Closing the generator stops the compaction: reads and uploads in flight end before the store
    # closes.
    async with aclosing(work) as reports:
        async for report in reports:
            totals.add(target.node_id, report)
            if stopping.is_set():
                return


_SHARES_NOTHING = "rewriting it would change nothing"
_NOTHING = CommitPlan((), EntryTable.of_rows(()), ())


@asynccontextmanager
async def _open_work(request: CompactionRequest) -> AsyncIterator[CompactionWork]:
    """Open cluster and bucket for one call of the command."""
    config = request.config()

    with closing(request.open_store()) as store:
        async with controller_client.ControllerClient(
            request.connect, deadline_s=request.timeout_s, tls=request.tls
        ) as client:
            try:
                # Keys are valid in the bucket of this cluster only. Check it before anything is
                # read or replaced.
                namespace = await client.object_namespace()
                await bucket_check.BucketCheck(client, store, namespace).require()
            except errors.BrokerClientError as error:
                raise _command_error(error, request.tls) from error
            except WrongBucketError as error:
                raise CommandError("WRONG_BUCKET", str(error)) from error
            with closing(CompactionWork(client, store, namespace, request, config)) as work:
                yield work


def _command_error(error: errors.BrokerClientError, tls: TlsFiles | None) -> CommandError:
    """Return the failure as the command reports it. Its message names the next step."""
    over_tls = tls is not None
    if isinstance(error, errors.ControllerUnavailableError):
        # Without a connection there is no status. The advice needs one.
        failure = RpcFailure(grpc.StatusCode.UNAVAILABLE, str(error))
        return CommandError("NO_CONTROLLER", str(error), advice(failure, over_tls=over_tls))
    # The controller's own message names the missing role. Keep it and its advice.
    if isinstance(error, errors.PermissionDeniedError) and isinstance(
        error.__cause__, grpc.RpcError
    ):
        failure = read_failure(error.__cause__)
        return explain(call_error(failure, "a controller", over_tls=over_tls))
    # Other errors of the client have no code of the contract.
    code = error.code if isinstance(error, errors.RejectedError) else None
    return CommandError("REFUSED" if code is None else errors.code_name(code), str(error))


def _stopped_by_signals() -> asyncio.Event:
    """Return an event that the first SIGTERM or Ctrl-C sets. A second one cancels the task."""
    stopping = asyncio.Event()
    task = asyncio.current_task()

    def on_signal() -> None:
        if stopping.is_set() and task is not None:
            task.cancel()
        stopping.set()

    # Handlers of the loop run between two steps of tasks, where cancelling a task is safe.
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stopping


async def _is_set(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for `event`, at most `timeout_s` seconds. Return whether it is set."""
    # wait_for cancels only its own waiter. The event can be awaited again.
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
    return event.is_set()
