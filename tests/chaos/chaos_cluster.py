"""Controllers as real processes whose every connection goes through a network that can be broken.

Owns processes, ports, data directories and logs of one cluster. Does what it is told to them and
keeps apart ends that were asked for from those that were not; decides on no fault.
"""

import asyncio
import concurrent.futures
import contextlib
import resource
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from streammeta.cli.local.local_cluster import Child, ChildFailedError, free_ports
from streammeta.controller.ids import ClusterId, NodeId
from streammeta.controller.journal.directory import format_directory
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from tests.chaos.fault_proxy import FaultNetwork
from tests.kit.warm_start import start_warm

CLUSTER_ID = "chaos"
FAST = (
    *("--election-timeout-ms", "400", "--fetch-timeout-ms", "1000"),
    *("--lifecycle-interval-ms", "200", "--delete-delay-ms", "200"),
)
READY_S = 60.0
"""A start takes a second or two, on a machine that does nothing else."""
_ROOT = str(Path(__file__).resolve().parents[2])
_WAITING_THREADS = 64
_PRINTED_BYTES = 2048
"""Below the ports that Linux gives to outgoing connections: while a controller is down, one of
those could take its port, and could even connect to itself there."""


def wait_in_many_threads() -> None:
    """Give the running event loop threads enough to wait for every process at once."""
    threads = concurrent.futures.ThreadPoolExecutor(_WAITING_THREADS, "waits-for-process")
    asyncio.get_running_loop().set_default_executor(threads)


class ProcessState(Enum):
    """What was done to a controller's process."""

    RUNNING = auto()
    PAUSED = auto()
    DOWN = auto()


@dataclass(slots=True)
class ChaosCluster:
    """Controllers 1..`count` under `root`, each on its own two ports behind `network`.

    The first `first_voters` of them, by default all, are started as voters; the others are there
    to join.
    """

    root: Path
    count: int
    first_voters: int = 0
    module: str = "streammeta.cli.main"
    """What is started as the product's command."""
    modules: Mapping[int, str] = field(default_factory=dict)
    """What is started instead of `module`, by id."""
    options: Sequence[str] = FAST
    node_options: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """What some controllers are told besides, after `options`, which it thus overrides."""
    ports: dict[int, int] = field(default_factory=dict)
    """Those for clients, by id."""
    peer_ports: dict[int, int] = field(default_factory=dict)
    """Those for the other controllers, by id."""
    children: dict[int, Child] = field(default_factory=dict)
    states: dict[int, ProcessState] = field(default_factory=dict)
    without_disk: set[int] = field(default_factory=set)
    """Those whose disk is lost: the fault that lost it starts them again, and nothing else does."""
    surprises: list[str] = field(default_factory=list)
    """Ends of processes that were not asked for."""
    network: FaultNetwork = field(init=False)

    def __post_init__(self) -> None:
        # Not from the run's seed: two runs of one seed may go on at the same time.
        ports = free_ports(2 * self.count)
        self.ports = dict(enumerate(ports[: self.count], start=1))
        self.peer_ports = dict(enumerate(ports[self.count :], start=1))
        self.network = FaultNetwork(self.ports, self.peer_ports)

    @property
    def members(self) -> tuple[int, ...]:
        """Every controller's id, whether it was ever started or not."""
        return tuple(self.ports)

    @property
    def voters_at_first(self) -> tuple[int, ...]:
        """The ids of those that form the cluster."""
        return self.members[: self.first_voters or self.count]

    @property
    def running(self) -> list[int]:
        """The ids of those that run, and are not busy with the loss of their disk."""
        return [
            node
            for node, state in self.states.items()
            if state is ProcessState.RUNNING and node not in self.without_disk
        ]

    @property
    def client_endpoints(self) -> dict[int, str]:
        """Where clients reach each controller, by its id."""
        return {node: self.network.endpoint(FaultNetwork.CLIENTS, node) for node in self.members}

    @property
    def direct_endpoints(self) -> dict[int, str]:
        """Where each controller listens for clients, past all faults of the network, by its id."""
        return {node: f"127.0.0.1:{port}" for node, port in self.ports.items()}

    @property
    def peer_endpoints(self) -> dict[int, str]:
        """Where each controller listens for the others, past all faults, by its id."""
        return {node: f"127.0.0.1:{port}" for node, port in self.peer_ports.items()}

    @property
    def log_paths(self) -> list[Path]:
        """What controllers' processes, one after the other, wrote to standard error."""
        return [self.log_path(node) for node in self.states]

    def data_dir(self, node_id: int) -> Path:
        return self.root / f"controller-{node_id}"

    def log_path(self, node_id: int) -> Path:
        """See `log_paths`."""
        return self.root / f"controller-{node_id}.log"

    async def start(self) -> None:
        """Start the network and the first voters, and wait until each one is ready."""
        (self.root / "bucket").mkdir(parents=True, exist_ok=True)
        await self.network.start()
        voters = VoterSet(
            tuple(
                Voter(ReplicaKey(NodeId(node)), self.peer_endpoints[node])
                for node in self.voters_at_first
            )
        )
        for node in self.voters_at_first:
            format_directory(
                self.data_dir(node),
                cluster_id=ClusterId(CLUSTER_ID),
                node_id=NodeId(node),
                bootstrap_voters=voters,
            )
        await asyncio.gather(*(self.start_node(node) for node in self.voters_at_first))

    async def start_node(self, node_id: int) -> None:
        """Start a controller that is down; return when it is ready, or was killed meanwhile.

        Raises:
            ChildFailedError: it ended by itself before.
            TimeoutError: it was not ready within `READY_S`.
        """
        # On the event loop, short as it is: a cancelled wait must not lose sight of a process.
        child = start_warm(
            f"controller {node_id}",
            self.command(node_id),
            self.log_path(node_id),
            {"PYTHONPATH": _ROOT},
        )
        self.children[node_id] = child
        self.states[node_id] = ProcessState.RUNNING
        try:
            await asyncio.wait_for(asyncio.to_thread(child.wait_ready), READY_S)
        except TimeoutError:
            self.states[node_id] = ProcessState.DOWN
            child.kill()
            raise TimeoutError(
                f"controller {node_id} was not ready within {READY_S:.0f} s"
            ) from None
        except ChildFailedError:
            was_killed = self.children[node_id] is not child
            if not was_killed and self.states[node_id] is not ProcessState.DOWN:
                self.states[node_id] = ProcessState.DOWN
                raise

    async def kill(self, node_id: int) -> None:
        """End a controller as `kill -9` does."""
        self.note_surprises()
        self.states[node_id] = ProcessState.DOWN
        await asyncio.to_thread(self.children[node_id].kill)

    async def terminate(self, node_id: int) -> int:
        """Ask a controller to end in good order; return its exit code."""
        self.note_surprises()
        self.states[node_id] = ProcessState.DOWN
        return await asyncio.to_thread(self.children[node_id].stop)

    def pause(self, node_id: int) -> None:
        """Stop a controller where it is, until `resume`."""
        self.children[node_id].process.send_signal(signal.SIGSTOP)
        self.states[node_id] = ProcessState.PAUSED

    def resume(self, node_id: int) -> None:
        if self.states[node_id] is ProcessState.PAUSED:
            self.children[node_id].process.send_signal(signal.SIGCONT)
            self.states[node_id] = ProcessState.RUNNING

    def fill_disk(self, node_id: int, room: int) -> None:
        """Make writes to a controller's log fail once it is `room` bytes longer than now.

        A limit of file sizes is the nearest thing to a full disk that needs no privileges; the
        system call fails with EFBIG. What the process prints goes to another disk, so to say.
        """
        logs = sorted(self.data_dir(node_id).glob("*.log"))
        filled = logs[-1].stat().st_size if logs else 0
        printed = self.log_path(node_id).stat().st_size + _PRINTED_BYTES
        self._limit_file_size(node_id, max(filled + room, printed))

    def fill_every_disk(self, node_id: int) -> None:
        """Make every write of a controller fail, of what it prints too."""
        self._limit_file_size(node_id, 1)

    def free_disk(self, node_id: int) -> None:
        """End `fill_disk` and `fill_every_disk`."""
        self._limit_file_size(node_id, resource.RLIM_INFINITY)

    def _limit_file_size(self, node_id: int, limit: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and its limit with it
            resource.prlimit(
                self.children[node_id].pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY)
            )

    def wipe(self, node_id: int) -> None:
        """Delete the data directory of a controller that is down."""
        assert self.states[node_id] is ProcessState.DOWN
        self.without_disk.add(node_id)
        shutil.rmtree(self.data_dir(node_id))

    async def join(self, node_id: int) -> str:
        """Start a controller on a new disk, as an observer; return its directory id."""
        identity = format_directory(
            self.data_dir(node_id), cluster_id=ClusterId(CLUSTER_ID), node_id=NodeId(node_id)
        )
        await self.start_node(node_id)
        self.without_disk.discard(node_id)
        return identity.directory_id

    def note_surprises(self) -> None:
        """Take note of processes that ended without being asked to."""
        for node_id, child in self.children.items():
            if self.states[node_id] is not ProcessState.DOWN and not child.is_running:
                self.states[node_id] = ProcessState.DOWN
                self.surprises.append(
                    f"controller {node_id} ended by itself, exit code {child.process.returncode}: "
                    f"{child.log_tail(3)}"
                )

    async def heal(self) -> None:
        """End every fault: network whole, processes going on, dead ones started again."""
        self.note_surprises()
        self.network.heal_all()
        for node_id in self.states:
            self.resume(node_id)
            if self.states[node_id] is ProcessState.RUNNING:
                self.free_disk(node_id)
        down = [
            node
            for node, state in self.states.items()
            if state is ProcessState.DOWN and node not in self.without_disk
        ]
        await asyncio.gather(*(self.start_node(node) for node in down))

    async def close(self) -> None:
        """End everything at once; data directories and logs stay."""
        for child in self.children.values():
            await asyncio.to_thread(child.kill)
        await self.network.close()

    def command(self, node_id: int) -> list[str]:
        return [
            *(sys.executable, "-m", self.modules.get(node_id, self.module), "controller"),
            *("--node-id", str(node_id), "--cluster-id", CLUSTER_ID),
            *("--listen", self.direct_endpoints[node_id]),
            *("--peer-listen", self.peer_endpoints[node_id]),
            *self.peer_options(node_id),
            *("--data-dir", str(self.data_dir(node_id))),
            *("--store", f"file://{self.root / 'bucket'}"),
            *self.options,
            *self.node_options.get(node_id, ()),
        ]

    def peer_options(self, node_id: int) -> list[str]:
        """Tell a controller of the others, and that it reaches them through the network alone."""
        seeds = ",".join(f"{node}@{where}" for node, where in self.peer_endpoints.items())
        overrides = ",".join(
            f"{other}@{self.network.endpoint(node_id, other)}"
            for other in self.members
            if other != node_id
        )
        return ["--seeds", seeds, "--peer-override", overrides]
