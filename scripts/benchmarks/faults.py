"""What can befall one controller of a local cluster, and how it gets over it."""

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from typing import Literal, Protocol, TypeAlias, get_args

from scripts.benchmarks.bench_cluster import in_thread, restart_changed
from scripts.benchmarks.relays import Relays
from streammeta.cli.local_cluster import LocalCluster, free_ports

Kind: TypeAlias = Literal["crash", "pause", "partition", "restart"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Fault(Protocol):
    """One kind of fault; with `is_of_all` there is no other leader until it is mended."""

    is_of_all: bool

    def strike(self, node_id: int) -> None:
        """Let it happen, at once."""
        ...

    async def mend(self, node_id: int) -> None:
        """Let the controller take part again."""
        ...


class Crash:
    """The process is killed with `kill -9` and started again."""

    is_of_all = False

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    def strike(self, node_id: int) -> None:
        """Kill the process."""
        os.kill(self._cluster.children[node_id].pid, signal.SIGKILL)

    async def mend(self, node_id: int) -> None:
        """Start it again on its directory."""
        self._cluster.children[node_id].kill()  # reaps what is dead already
        await in_thread(self._cluster.start, node_id)


class Pause:
    """The process is stopped with SIGSTOP, keeping its connections, and goes on later."""

    is_of_all = False

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    def strike(self, node_id: int) -> None:
        """Stop the process."""
        os.kill(self._cluster.children[node_id].pid, signal.SIGSTOP)

    async def mend(self, node_id: int) -> None:
        """Let it go on."""
        os.kill(self._cluster.children[node_id].pid, signal.SIGCONT)


class Partition:
    """Nothing gets to the controller or away from it; no connection is reset."""

    is_of_all = False

    def __init__(self, relays: Relays) -> None:
        self._relays = relays

    def strike(self, node_id: int) -> None:
        """Cut it off."""
        self._relays.cut(node_id)

    async def mend(self, node_id: int) -> None:
        """Join it again."""
        del node_id
        self._relays.heal()


class Restart:
    """All processes are killed with `kill -9` and started again at once.

    Every connection is made anew meanwhile, over TLS with its handshake.
    """

    is_of_all = True

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    def strike(self, node_id: int) -> None:
        """Kill all processes."""
        del node_id
        for child in self._cluster.children.values():
            child.kill()

    async def mend(self, node_id: int) -> None:
        """Start all again on their directories."""
        del node_id
        await in_thread(self._cluster.start_all)


@contextlib.asynccontextmanager
async def prepared(kind: Kind, cluster: LocalCluster) -> AsyncIterator[Fault]:
    """Yield the fault; for a partition the cluster is restarted behind relays first."""
    match kind:
        case "crash":
            yield Crash(cluster)
        case "restart":
            yield Restart(cluster)
        case "pause":
            yield Pause(cluster)
        case "partition":
            relays = await _behind_relays(cluster)
            try:
                yield Partition(relays)
            finally:
                await relays.close()


async def _behind_relays(cluster: LocalCluster) -> Relays:
    """Move every controller to other ports and put relays in its old place."""
    count = len(cluster.children)
    fresh = free_ports(2 * count)
    behind = dict(
        zip(cluster.children, zip(fresh[:count], fresh[count:], strict=True), strict=True)
    )

    def change(node_id: int, command: list[str]) -> list[str]:
        for option, port in zip(("listen", "peer-listen"), behind[node_id], strict=True):
            place = command.index(f"--{option}") + 1
            known = (f"--{option.replace('listen', 'advertise')}", command[place])
            command = [*command[:place], f"127.0.0.1:{port}", *known, *command[place + 1 :]]
        return command

    await in_thread(restart_changed, cluster, change)
    relays = Relays({node_id: child.pid for node_id, child in cluster.children.items()})
    before = zip(cluster.ports, cluster.peer_ports, strict=True)
    for node_id, ports in zip(cluster.children, before, strict=True):
        for port, target_port in zip(ports, behind[node_id], strict=True):
            await relays.start(node_id, port, target_port)
    return relays
