"""Controllers under measurement: children with the product's defaults, in a temporary directory."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import grpc

from scripts.benchmarks.figures import BenchmarkError
from scripts.benchmarks.streammeta_client import NODE_ID
from streammeta.cli.local.dev_command import LocalCertificates
from streammeta.cli.local.local_cluster import (
    PROGRAM,
    Child,
    LocalCluster,
    Starter,
    free_ports,
    start_child,
)
from streammeta.rpc.connections import client_channel
from streammeta.tls.files import TlsFiles
from streammeta.tls.identity import Role
from streammeta.v1 import quorum_pb2, quorum_pb2_grpc

HEALTHY_WITHIN_S = 30.0
VOTERS = 3
PATIENT = ("--fetch-timeout-ms", "10000")
"""Options of controllers that keep their leader although other work makes the machine slow."""
_POLL_S = 0.05
_CAUGHT_UP_WITHIN_MS = 1_000

Change: TypeAlias = Callable[[int, list[str]], Sequence[str]]
"""Returns the command of a controller, from its id and its usual command."""


class UnhealthyError(BenchmarkError):
    """The controllers did not agree on a leader in time."""


@contextlib.contextmanager
def running_cluster(
    root: Path,
    count: int = VOTERS,
    options: Sequence[str] = (),
    own_options: Mapping[int, Sequence[str]] | None = None,
    *,
    over_tls: bool = False,
    change: Change | None = None,
    store_uri: str | None = None,
) -> Iterator[LocalCluster]:
    """Run `count` controllers, by default with a bucket in `root`, until the block ends.

    All get `options`, each its `own_options`. `change` changes their commands.
    """
    bucket = root / "bucket"
    bucket.mkdir(parents=True)
    uri = store_uri or f"file://{bucket}"
    cluster = LocalCluster(root, "bench", uri, free_ports(count), options)
    cluster.own_options = own_options or {}
    if change is not None:
        cluster.starter = _start_changed(change)
    if over_tls:
        cluster.tls = LocalCertificates(root, cluster.cluster_id).controllers(cluster.node_ids)
    try:
        cluster.start_all()
        yield cluster
    finally:
        cluster.stop_all()


def wrapped(wrapper: Callable[[int], Sequence[str]]) -> Change:
    """Return the change that runs a controller in a module of these scripts.

    `wrapper` returns the module and its first words, by the controller's id.
    """

    def change(node_id: int, command: list[str]) -> Sequence[str]:
        module, *words = wrapper(node_id)
        product = command.index(PROGRAM[-1])
        # -P would keep this tree off the path, where the wrapper is.
        interpreter = [word for word in command[:product] if word != "-P"]
        return [*interpreter, f"scripts.benchmarks.{module}", *words, *command[product + 1 :]]

    return change


def counters_path(place: Path, node_id: int) -> Path:
    """Return the file of a controller's counters."""
    return place / f"controller-{node_id}.counters"


def observed(place: Path, profile: Callable[[Path, int], Path] | None = None) -> Change:
    """Return the change that observes controllers, and profiles them into `profile` if given."""

    def wrapper(node_id: int) -> Sequence[str]:
        profiled = "-" if profile is None else str(profile(place, node_id))
        return ["observed_controller", str(counters_path(place, node_id)), profiled]

    return wrapped(wrapper)


def _start_changed(change: Change) -> Starter:
    def start(
        name: str, command: Sequence[str], log_path: Path, env: Mapping[str, str] | None = None
    ) -> Child:
        node_id = int(name.rpartition(" ")[2])
        return start_child(name, change(node_id, [*command]), log_path, env)

    return start


def audit_options(root: Path, count: int = VOTERS) -> Mapping[int, Sequence[str]]:
    """Return the options by which each controller writes an audit log."""
    return {n: ("--audit-log", str(root / f"audit-{n}.log")) for n in range(1, count + 1)}


def http_options(count: int = VOTERS) -> tuple[dict[int, int], Mapping[int, Sequence[str]]]:
    """Return ports for pages and metrics by controller, and the options that open them."""
    ports = dict(zip(range(1, count + 1), free_ports(count), strict=True))
    return ports, {n: ("--http-listen", f"127.0.0.1:{port}") for n, port in ports.items()}


def caller_of(cluster: LocalCluster) -> TlsFiles | None:
    """Return the TLS files of the broker that loads a cluster, or None for plain text."""
    if not cluster.tls:
        return None
    return LocalCertificates(cluster.root, cluster.cluster_id).of(Role.BROKER, NODE_ID)


def tls_paths(files: TlsFiles | None) -> list[str]:
    """Return the paths of authority, certificate and key, as a worker's arguments."""
    return [] if files is None else [str(files.ca), str(files.certificate), str(files.key)]


@dataclass(frozen=True, slots=True)
class Leader:
    """The leader, its epoch and its endpoint."""

    node_id: int
    epoch: int
    endpoint: str


async def in_thread(function: Callable[..., object], *arguments: object) -> None:
    """Run `function` in a thread, to its end even if the caller is cancelled.

    The caller's clean-up then knows everything that the function started.
    """
    running = asyncio.create_task(asyncio.to_thread(function, *arguments))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


class QuorumWatch:
    """Asks every controller how it sees the quorum. Bound to the event loop that makes it."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._endpoints = cluster.endpoints
        self._channels = [client_channel(at, caller_of(cluster)) for at in cluster.endpoints]

    async def close(self) -> None:
        """Release the connections."""
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def wait_healthy(self, timeout_s: float = HEALTHY_WITHIN_S) -> Leader:
        """Return the leader once all agree on it and every voter has caught up.

        Raises:
            UnhealthyError: that took longer than `timeout_s`. The message has the last answers.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            seen = await asyncio.gather(*map(self._describe, self._channels))
            leader = _agreed_leader(seen)
            if leader is not None:
                endpoint = self._endpoints[leader.node_id - 1]
                return Leader(leader.node_id, leader.epoch, endpoint)
            if time.monotonic() > deadline:
                raise UnhealthyError(
                    f"the controllers did not agree on a leader with every voter caught up within "
                    f"{timeout_s:.0f} s; last answers: {'; '.join(map(_shorten, seen))}"
                )
            await asyncio.sleep(_POLL_S)

    async def _describe(self, channel: grpc.aio.Channel) -> quorum_pb2.DescribeQuorumResponse | str:
        stub: quorum_pb2_grpc.QuorumServiceAsyncStub = quorum_pb2_grpc.QuorumServiceStub(channel)
        try:
            return await stub.DescribeQuorum(quorum_pb2.DescribeQuorumRequest(), timeout=1.0)
        except grpc.aio.AioRpcError as error:
            return error.code().name


@contextlib.asynccontextmanager
async def watching(cluster: LocalCluster) -> AsyncIterator[QuorumWatch]:
    """Yield a watch over the controllers of a cluster."""
    watch = QuorumWatch(cluster)
    try:
        yield watch
    finally:
        await watch.close()


async def find_leader(cluster: LocalCluster) -> Leader:
    """Return the leader once every voter has caught up."""
    async with watching(cluster) as watch:
        return await watch.wait_healthy()


def _agreed_leader(
    seen: Sequence[quorum_pb2.DescribeQuorumResponse | str],
) -> quorum_pb2.DescribeQuorumResponse | None:
    answers = [answer for answer in seen if not isinstance(answer, str)]
    leaders = [answer for answer in answers if answer.role == "leader"]
    if len(answers) < len(seen) or len(leaders) != 1:
        return None

    (leader,) = leaders
    is_agreed = all(
        (answer.leader_id, answer.epoch) == (leader.node_id, leader.epoch) for answer in answers
    )
    # A voter that lags could not take over, so a fault now would measure the lag.
    is_caught_up = len(leader.voters) == len(seen) and all(
        voter.HasField("last_caught_up_age_ms")
        and voter.last_caught_up_age_ms <= _CAUGHT_UP_WITHIN_MS
        for voter in leader.voters
    )
    return leader if is_agreed and is_caught_up else None


def _shorten(answer: quorum_pb2.DescribeQuorumResponse | str) -> str:
    if isinstance(answer, str):
        return answer
    ages = [voter.last_caught_up_age_ms for voter in answer.voters]
    return (
        f"node {answer.node_id} is {answer.role} in epoch {answer.epoch}, leader "
        f"{answer.leader_id}, voters caught up {ages} ms ago"
    )
