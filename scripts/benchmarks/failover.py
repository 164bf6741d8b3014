"""Duration without writes when the leader dies, hangs or is cut off, or when all are restarted.

Three controllers with the product's timeouts run under a steady load. A run strikes the leader and
measures the time to the next write that another controller acknowledges, or any controller if all
were struck. The client's own search for the leader is part of that time. The controllers' part
comes from their logs.
"""

import asyncio
import contextlib
import datetime
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import psutil

from scripts.benchmarks.cluster import (
    VOTERS,
    QuorumWatch,
    caller_of,
    in_thread,
    running_cluster,
    watching,
)
from scripts.benchmarks.figures import BenchmarkError, Outcome, Progress, Table, median, spread
from scripts.benchmarks.options import option
from streammeta.cli.local.local_cluster import LocalCluster, free_ports
from streammeta.client.controllers.methods import PUT_KVS
from streammeta.client.errors import BrokerClientError
from streammeta.client.parts import ControllerClient
from streammeta.v1 import kv_pb2

Kind: TypeAlias = Literal["crash", "pause", "partition", "restart"]
"""`kill -9`, SIGSTOP, silent links to one controller, or `kill -9` of all."""
LATE_ANSWERS_S = 0.1
"""Time for which answers of killed processes may still arrive, in seconds."""
ACKNOWLEDGED_WITHIN_S = 30.0
SETTLE_S = (0.2, 0.7)
"""Bounds of the random pause between two runs, so that faults do not keep step with timers."""
SLOW_RUNS = 10
"""Most runs of faults that only a timeout detects, where several kinds are measured."""
WRITERS = 8
WRITES_A_SECOND = 200
VALUE_BYTES = 100
_CHUNK_BYTES = 64 * 1024
_WHOLE = "fault to next acknowledged write"


class Relays:
    """Network that can be cut: one TCP relay before each port of a controller.

    A cut link is silent, like a network that drops packets: nothing is reset, and data in flight
    arrives when the link heals. The process that owns a connection's other end identifies the peer,
    so controllers and clients use the same addresses. Bound to the event loop that makes it.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._pids = pids
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._cut: int | None = None
        self._whole = asyncio.Event()
        self._whole.set()

    async def start(self, node_id: int, port: int, target_port: int) -> None:
        """Forward connections to loopback `port` to the controller `node_id` on `target_port`."""

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.get_running_loop().create_task(
                self._carry(node_id, target_port, reader, writer)
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._servers.append(await asyncio.start_server(accept, "127.0.0.1", port))

    def cut(self, node_id: int) -> None:
        """Cut one controller off from all others."""
        self._cut = node_id
        self._whole.clear()

    def heal(self) -> None:
        """Reconnect the controller that was cut off."""
        self._cut = None
        self._whole.set()

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _carry(
        self,
        target: int,
        target_port: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        ends = frozenset({target, self._source(writer.get_extra_info("peername")[1])})
        upstream: asyncio.StreamWriter | None = None
        try:
            # A connection across a cut link is accepted here, but must stay silent.
            await self._link_up(ends)
            back, upstream = await asyncio.open_connection("127.0.0.1", target_port)
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(ends, reader, upstream))
                pumps.create_task(self._pump(ends, back, writer))
        except* OSError:
            await self._link_up(ends)  # the other end learns of the error when the link heals
        finally:
            for end in filter(None, (writer, upstream)):
                end.transport.abort()

    async def _pump(
        self, ends: frozenset[int | None], reader: asyncio.StreamReader, to: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            await self._link_up(ends)
            to.write(data)
            await to.drain()
        raise ConnectionResetError  # one side has closed, and the other must see it too

    async def _link_up(self, ends: frozenset[int | None]) -> None:
        while self._cut in ends and self._cut is not None:
            await self._whole.wait()

    def _source(self, port: int) -> int | None:
        for node_id, pid in self._pids.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                connections = psutil.Process(pid).net_connections("tcp")  # gRPC uses IPv6 sockets
                if any(connection.laddr.port == port for connection in connections):
                    return node_id
        return None


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault's strike, and its repair, by the id of the leader."""

    strike: Callable[[int], None]
    repair: Callable[[int], Coroutine[Any, Any, None]]
    is_of_all: bool = False
    """Whether it strikes all controllers, so that none leads until it is repaired."""


@contextlib.asynccontextmanager
async def running_target(
    root: Path, kind: Kind, *, over_tls: bool
) -> AsyncIterator[tuple[LocalCluster, Fault]]:
    """Run the controllers that a fault of this kind is to strike. Yield both."""
    if kind == "partition":
        async with _behind_relays(root, over_tls=over_tls) as (cluster, relays):
            yield cluster, _partition(relays)
        return
    faults = {"crash": _crash, "pause": _pause, "restart": _restart}
    with running_cluster(root, over_tls=over_tls) as cluster:
        yield cluster, faults[kind](cluster)


def _crash(cluster: LocalCluster) -> Fault:
    def strike(node_id: int) -> None:
        os.kill(cluster.children[node_id].pid, signal.SIGKILL)

    async def repair(node_id: int) -> None:
        cluster.children[node_id].kill()  # reaps the process
        await in_thread(cluster.start, node_id)

    return Fault(strike, repair)


def _pause(cluster: LocalCluster) -> Fault:
    def strike(node_id: int) -> None:
        os.kill(cluster.children[node_id].pid, signal.SIGSTOP)

    async def repair(node_id: int) -> None:
        os.kill(cluster.children[node_id].pid, signal.SIGCONT)

    return Fault(strike, repair)


def _partition(relays: Relays) -> Fault:
    async def repair(_node_id: int) -> None:
        relays.heal()

    return Fault(relays.cut, repair)


def _restart(cluster: LocalCluster) -> Fault:
    def strike(_node_id: int) -> None:
        for child in cluster.children.values():
            child.kill()

    async def repair(_node_id: int) -> None:
        await in_thread(cluster.start_all)

    return Fault(strike, repair, is_of_all=True)


@contextlib.asynccontextmanager
async def _behind_relays(
    root: Path, *, over_tls: bool
) -> AsyncIterator[tuple[LocalCluster, Relays]]:
    """Run controllers on separate ports, with relays on the ports that they advertise."""
    ports = free_ports(2 * VOTERS)
    behind = dict(enumerate(zip(ports[:VOTERS], ports[VOTERS:], strict=True), start=1))

    def change(node_id: int, command: list[str]) -> list[str]:
        for name, port in zip(("listen", "peer-listen"), behind[node_id], strict=True):
            place = command.index(f"--{name}") + 1
            known = (f"--{name.replace('listen', 'advertise')}", command[place])
            command = [*command[:place], f"127.0.0.1:{port}", *known, *command[place + 1 :]]
        return command

    with running_cluster(root, over_tls=over_tls, change=change) as cluster:
        relays = Relays({node_id: child.pid for node_id, child in cluster.children.items()})
        advertised = zip(cluster.ports, cluster.peer_ports, strict=True)
        try:
            for node_id, known_ports in zip(cluster.children, advertised, strict=True):
                for port, target_port in zip(known_ports, behind[node_id], strict=True):
                    await relays.start(node_id, port, target_port)
            yield cluster, relays
        finally:
            await relays.close()


@dataclass(slots=True)
class _Awaited:
    old_leader: str
    since: float
    acknowledged: asyncio.Future[float]


class SteadyLoad:
    """Writers that put a value, wait for the answer, pause, and put the next value."""

    def __init__(self, client: ControllerClient) -> None:
        self._client = client
        self._awaited: _Awaited | None = None
        self._failure: BrokerClientError | None = None

    def next_acknowledged(self, old_leader: str, since: float) -> asyncio.Future[float]:
        """Return the future time of the first answer after `since` that is not from `old_leader`.

        `old_leader` is an endpoint, and times are from `time.monotonic`. Replaces an earlier watch.
        The future fails with a `BrokerClientError` if a writer fails or has failed.
        """
        acknowledged: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        if self._failure is not None:
            acknowledged.set_exception(self._failure)
            return acknowledged
        self._awaited = _Awaited(old_leader, since, acknowledged)
        return acknowledged

    async def write_until_failure(self, writer: int) -> None:
        """Write as one of the writers."""
        item = kv_pb2.KVToPut(
            namespace="bench", key=f"writer-{writer}", value=bytes(VALUE_BYTES), overwrite=True
        )
        try:
            while True:
                await self._client.call(PUT_KVS, kv_pb2.PutKVsRequest(items=[item]))
                self._on_acknowledged(time.monotonic())
                await asyncio.sleep(WRITERS / WRITES_A_SECOND)
        except BrokerClientError as error:
            self._on_failed(error)

    def _on_acknowledged(self, now: float) -> None:
        # The client names the controller that answered last, and no other task ran in between.
        awaited = self._awaited
        if awaited is None or now <= awaited.since or self._client.leader == awaited.old_leader:
            return
        self._awaited = None
        if not awaited.acknowledged.done():
            awaited.acknowledged.set_result(now)

    def _on_failed(self, error: BrokerClientError) -> None:
        self._failure = error
        if self._awaited is not None and not self._awaited.acknowledged.done():
            self._awaited.acknowledged.set_exception(error)


@contextlib.asynccontextmanager
async def steady_load(cluster: LocalCluster) -> AsyncIterator[SteadyLoad]:
    """Run the load on a cluster until the block ends."""
    async with ControllerClient(cluster.endpoints, tls=caller_of(cluster)) as client:
        load = SteadyLoad(client)
        writers = [asyncio.create_task(load.write_until_failure(n)) for n in range(WRITERS)]
        try:
            yield load
        finally:
            for writer in writers:
                writer.cancel()
            await asyncio.gather(*writers, return_exceptions=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Kinds of faults and runs of each."""

    kind: tuple[Kind, ...] = option(("crash",), "fault, or several")
    runs: int = option(30, "faults of each kind")
    seed: int = option(1, "seed of the pauses between two runs", least=0)
    tls: bool = option(False, "measure the same over TLS too")


Run: TypeAlias = dict[str, float]
"""One fault, with times in seconds since it. More than one epoch means a lost election."""


@dataclass(frozen=True, slots=True)
class _Stage:
    cluster: LocalCluster
    fault: Fault
    watch: QuorumWatch
    load: SteadyLoad


async def measure(root: Path, settings: Settings, progress: Progress) -> list[Outcome]:
    """Strike the leader again and again."""
    outcomes: list[Outcome] = []
    for kind in settings.kind:
        is_limited = len(settings.kind) > 1 and kind in ("pause", "partition")
        runs = min(settings.runs, SLOW_RUNS) if is_limited else settings.runs
        for over_tls in (False, True) if settings.tls else (False,):
            shown = f"{kind} over TLS" if over_tls else kind
            rng = random.Random(settings.seed)
            results: list[Run] = []
            async with (
                running_target(root / shown.replace(" ", "-"), kind, over_tls=over_tls) as target,
                watching(target[0]) as watch,
                steady_load(target[0]) as load,
            ):
                for number in range(1, runs + 1):
                    progress(f"failover by {shown}: run {number} of {runs}")
                    await watch.wait_healthy()
                    await asyncio.sleep(rng.uniform(*SETTLE_S))
                    results.append(await _strike(_Stage(*target, watch, load)))
            outcomes.append(_outcome(kind, results, over_tls=over_tls))
    return outcomes


async def _strike(stage: _Stage) -> Run:
    # Leadership may have moved during the pause.
    old = await stage.watch.wait_healthy()
    is_of_all = stage.fault.is_of_all
    endpoint = "" if is_of_all else old.endpoint
    struck_at, struck_wall = time.monotonic(), time.time()
    acknowledged = stage.load.next_acknowledged(endpoint, struck_at)
    stage.fault.strike(old.node_id)

    # Without any controller nothing is acknowledged until the repair, so it has to begin now.
    repair = asyncio.create_task(stage.fault.repair(old.node_id)) if is_of_all else None
    if is_of_all:
        await asyncio.sleep(LATE_ANSWERS_S)
        acknowledged = stage.load.next_acknowledged(endpoint, time.monotonic())
    try:
        async with asyncio.timeout(ACKNOWLEDGED_WITHIN_S):
            acknowledged_at = await acknowledged
    except TimeoutError:
        raise BenchmarkError(
            f"no write was acknowledged within {ACKNOWLEDGED_WITHIN_S:.0f} s after controller "
            f"{old.node_id}, the leader, was struck"
        ) from None
    await (repair or stage.fault.repair(old.node_id))

    logs = {
        node_id: child.log_path
        for node_id, child in stage.cluster.children.items()
        if is_of_all or node_id != old.node_id
    }
    takeover = find_takeover(logs, struck_wall)
    return {
        "old_leader": old.node_id,
        "new_leader": takeover["node_id"],
        "epochs": takeover["epoch"] - old.epoch,
        "elected_s": round(takeover["elected_s"], 4),
        "claimed_s": round(takeover["claimed_s"], 4),
        "acknowledged_s": round(acknowledged_at - struck_at, 4),
    }


def find_takeover(logs: Mapping[int, Path], fault_at: float) -> dict[str, float]:
    """Return the first claim of leadership in `logs` after `fault_at`, which is Unix time.

    The seconds are those from the fault until the new leader has a majority (detection, pre-votes
    and votes), and until it serves (its first batch is committed and all before it is replayed).
    """
    claims = [
        (at, node_id, epoch)
        for node_id, path in logs.items()
        for at, event, epoch in _events(path)
        if event == "leadership_claimed" and at > fault_at
    ]
    if not claims:
        raise BenchmarkError("a write was acknowledged, but no controller logged that it leads")

    claimed_at, node_id, epoch = min(claims)
    elected = [
        at for at, event, of in _events(logs[node_id]) if (event, of) == ("leader_elected", epoch)
    ]
    return {
        "node_id": node_id,
        "epoch": epoch,
        "elected_s": max(elected, default=claimed_at) - fault_at,
        "claimed_s": claimed_at - fault_at,
    }


def _events(path: Path) -> Iterator[tuple[float, str, int]]:
    """Yield Unix time, name and epoch of every event with an epoch."""
    for line in path.read_text(errors="replace").splitlines():
        # Libraries write other lines, and some events have no epoch.
        try:
            event: dict[str, Any] = json.loads(line)
            at = datetime.datetime.fromisoformat(event["timestamp"])
            yield at.timestamp(), event["event"], event["epoch"]
        except (ValueError, KeyError, TypeError):
            continue


def _outcome(kind: Kind, results: Sequence[Run], *, over_tls: bool) -> Outcome:
    name = f"failover_{kind}{'_tls' * over_tls}"
    phases = {
        "fault to majority of votes": [run["elected_s"] for run in results],
        "votes to serving": [run["claimed_s"] - run["elected_s"] for run in results],
        "serving to client's answer": [run["acknowledged_s"] - run["claimed_s"] for run in results],
        _WHOLE: [run["acknowledged_s"] for run in results],
    }
    rows = tuple(
        (phase, *(f"{value:.3f}" for value in spread("", "", values).values()))
        for phase, values in phases.items()
    )
    each_run = " ".join(f"{seconds:.3f}" for seconds in sorted(phases[_WHOLE]))

    return Outcome(
        benchmark=name.replace("_", "-"),
        settings={
            "kind": kind,
            "over_tls": over_tls,
            "runs": len(results),
            "controllers": VOTERS,
            "writes_a_second": WRITES_A_SECOND,
        },
        figures={
            **spread(name, "s", phases[_WHOLE]),
            f"{name}_serving_p50_s": round(median([run["claimed_s"] for run in results]), 4),
        },
        details={
            "lost_elections": sum(run["epochs"] - 1 for run in results),
            "runs": results,
        },
        tables=[
            Table(
                title=f"Leader lost by {kind}, {len(results)} runs{' over TLS' * over_tls}, s",
                columns=("phase", "p50", "p90", "max"),
                rows=rows,
            ),
            Table(title="Each run, sorted", columns=(f"{_WHOLE}, seconds",), rows=((each_run,),)),
        ],
    )
