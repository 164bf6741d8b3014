"""Faults of the leader of a local cluster, and their repair."""

import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from scripts.benchmarks.cluster import VOTERS, in_thread, running_cluster
from scripts.benchmarks.relays import Relays
from streammeta.cli.local.local_cluster import LocalCluster, free_ports

Kind: TypeAlias = Literal["crash", "pause", "partition", "restart"]
"""`kill -9`, SIGSTOP, silent links to one controller, or `kill -9` of all."""


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
    """Run controllers on ports of their own, with relays on the ports that they advertise."""
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
