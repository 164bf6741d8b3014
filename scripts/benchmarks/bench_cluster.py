"""Controllers to be measured: child processes with the product's defaults, in a directory of ours.

Everything about starting a controller is left to `LocalCluster`; where a benchmark needs another
command line, the one that `LocalCluster` used is taken and changed.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import psutil

from streammeta.cli.local_cluster import LocalCluster, free_ports, start_child
from streammeta.rpc.connections import client_channel
from streammeta.v1 import quorum_pb2, quorum_pb2_grpc

if TYPE_CHECKING:  # earlier commits, as baselines, have no such module
    from streammeta.rpc.tls import TlsFiles

HEALTHY_WITHIN_S = 30.0
_POLL_S = 0.05
_CAUGHT_UP_WITHIN_MS = 1_000


class UnhealthyError(Exception):
    """The cluster was not in order when it should have been."""


@contextlib.contextmanager
def running_cluster(
    root: Path, count: int, options: Sequence[str] = (), *, over_tls: bool = False
) -> Iterator[LocalCluster]:
    """Run `count` controllers over `root`/bucket, all defaults but `options`; end them at last."""
    bucket = root / "bucket"
    bucket.mkdir(parents=True)
    cluster = LocalCluster(root, "bench", f"file://{bucket}", free_ports(count), options)
    if over_tls:
        from streammeta.cli.local_certificates import LocalCertificates

        cluster.tls = LocalCertificates(root, cluster.cluster_id).controllers(cluster.node_ids)
    try:
        cluster.start_all()
        yield cluster
    finally:
        cluster.stop_all()


def caller_of(cluster: LocalCluster) -> "TlsFiles | None":
    """Return the files of the broker that loads a cluster; None if it speaks plain text."""
    if not getattr(cluster, "tls", None):  # earlier commits, as baselines, know of none
        return None
    from scripts.benchmarks.streammeta_client import NODE_ID
    from streammeta.cli.local_certificates import LocalCertificates
    from streammeta.rpc.identity import Role

    return LocalCertificates(cluster.root, cluster.cluster_id).of(Role.BROKER, NODE_ID)


def restart_changed(
    cluster: LocalCluster, change: Callable[[int, list[str]], Sequence[str]]
) -> None:
    """Stop all controllers and start each with what `change` makes of its id and command line."""
    commands = {
        node_id: psutil.Process(child.pid).cmdline() for node_id, child in cluster.children.items()
    }
    cluster.stop_all()
    for node_id, command in commands.items():
        child = cluster.children[node_id]
        cluster.children[node_id] = start_child(
            child.name, change(node_id, command), child.log_path, cluster.env
        )
    for child in cluster.children.values():
        child.wait_ready()


@dataclass(frozen=True, slots=True)
class Leader:
    """The leader, and its epoch."""

    node_id: int
    epoch: int


async def in_thread(function: Callable[..., object], *arguments: object) -> None:
    """Run `function` in a thread, to its end even if the caller is cancelled.

    What it starts is then known to the caller's clean-up.
    """
    running = asyncio.create_task(asyncio.to_thread(function, *arguments))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


class QuorumWatch:
    """Asks every controller how it sees the quorum; to be made on the event loop that uses it."""

    def __init__(self, endpoints: Sequence[str], tls: "TlsFiles | None" = None) -> None:
        options = () if tls is None else (tls,)
        self._channels = [client_channel(endpoint, *options) for endpoint in endpoints]

    async def close(self) -> None:
        """Release the connections."""
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def wait_healthy(self, timeout_s: float = HEALTHY_WITHIN_S) -> Leader:
        """Return the leader once all agree on it and every voter has caught up.

        Raises:
            UnhealthyError: that took longer than `timeout_s`; says what was seen last.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            seen = await asyncio.gather(*map(self._describe, self._channels))
            leader = _agreed_leader(seen)
            if leader is not None:
                return leader
            if time.monotonic() > deadline:
                raise UnhealthyError(
                    f"the controllers did not agree on a leader with every voter caught up within "
                    f"{timeout_s:.0f} s; seen last: {'; '.join(map(_short, seen))}"
                )
            await asyncio.sleep(_POLL_S)

    async def _describe(self, channel: grpc.aio.Channel) -> quorum_pb2.DescribeQuorumResponse | str:
        stub: quorum_pb2_grpc.QuorumServiceAsyncStub = quorum_pb2_grpc.QuorumServiceStub(channel)
        try:
            return await stub.DescribeQuorum(quorum_pb2.DescribeQuorumRequest(), timeout=1.0)
        except grpc.aio.AioRpcError as error:
            return error.code().name


@contextlib.asynccontextmanager
async def watching(
    endpoints: Sequence[str], tls: "TlsFiles | None" = None
) -> AsyncIterator[QuorumWatch]:
    """Yield a watch over `endpoints`."""
    watch = QuorumWatch(endpoints, tls)
    try:
        yield watch
    finally:
        await watch.close()


def _agreed_leader(seen: Sequence[quorum_pb2.DescribeQuorumResponse | str]) -> Leader | None:
    answers = [answer for answer in seen if not isinstance(answer, str)]
    leaders = [answer for answer in answers if answer.role == "leader"]
    if len(answers) < len(seen) or len(leaders) != 1:
        return None
    (leader,) = leaders
    is_agreed = all(
        (answer.leader_id, answer.epoch) == (leader.node_id, leader.epoch) for answer in answers
    )
    is_caught_up = len(leader.voters) == len(seen) and all(
        voter.HasField("last_caught_up_age_ms")
        and voter.last_caught_up_age_ms <= _CAUGHT_UP_WITHIN_MS
        for voter in leader.voters
    )
    return Leader(leader.node_id, leader.epoch) if is_agreed and is_caught_up else None


def _short(answer: quorum_pb2.DescribeQuorumResponse | str) -> str:
    if isinstance(answer, str):
        return answer
    ages = [voter.last_caught_up_age_ms for voter in answer.voters]
    return (
        f"node {answer.node_id} is {answer.role} in epoch {answer.epoch}, leader "
        f"{answer.leader_id}, voters caught up {ages} ms ago"
    )
