"""Faults of the leader of a local cluster, and their repair."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import psutil

from scripts.benchmarks.cluster import VOTERS, in_thread, running_cluster
from streammeta.cli.local.local_cluster import LocalCluster, free_ports

Kind: TypeAlias = Literal["crash", "pause", "partition", "restart"]
"""`kill -9`, SIGSTOP, silent links to one controller, or `kill -9` of all."""


_CHUNK_BYTES = 64 * 1024


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
        for option, port in zip(("listen", "peer-listen"), behind[node_id], strict=True):
            place = command.index(f"--{option}") + 1
            known = (f"--{option.replace('listen', 'advertise')}", command[place])
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
