"""Time from `kill -9` of a peer's leader to the next write that another server acknowledges.

Measured as in the failover of streammeta, with the peers' default timeouts: a client tries the
surviving servers in turn, on new connections, until one takes a write.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmarks.commit_load import committer_of
from scripts.benchmarks.committer import Load, LoadError
from scripts.benchmarks.figures import percentile
from scripts.benchmarks.peers.servers import PeerCluster, PeerError, running_peer

VOTERS = 3
WRITE_WITHIN_S = 60.0
ATTEMPT_S = 0.25
"""A server that neither answers nor hangs up is left for the next after so long."""
_PAUSE_S = 0.005


@dataclass(frozen=True, slots=True)
class Failover:
    """Seconds of every run."""

    system: str
    seconds: Sequence[float]

    def row(self) -> tuple[object, ...]:
        """Return p50, p90 and max after the name."""
        shares = [round(percentile(self.seconds, share), 3) for share in (0.5, 0.9)]
        return (self.system, *shares, round(max(self.seconds), 3), len(self.seconds))


async def measure_failover(
    place: Path, system: str, runs: int, progress: Callable[[str], None]
) -> Failover:
    """Kill the leader `runs` times, each time after the last one is back.

    Raises:
        PeerError: a server ended, or no write was taken in time.
    """
    seconds: list[float] = []
    with running_peer(system, place, VOTERS) as cluster:
        for run in range(runs):
            progress(f"peers: {system}, failover {run + 1} of {runs}")
            leader = await cluster.find_leader()
            await _write(cluster, [leader])
            survivors = [number for number in cluster.children if number != leader]
            for number in survivors:  # all have to be back, or the next leader lacks a majority
                await _write(cluster, [number])
            cluster.children[leader].kill()
            seconds.append(await _write(cluster, survivors))
            cluster.start(leader)
    return Failover(system, seconds)


async def _write(cluster: PeerCluster, numbers: Sequence[int]) -> float:
    """Write to the first of these servers that takes it; return the seconds it took."""
    began = time.monotonic()
    for number in itertools.cycle(numbers):
        if time.monotonic() - began > WRITE_WITHIN_S:
            break
        load = Load(endpoint=cluster.endpoints[number], ranges=1, in_flight=1)
        committer = committer_of(cluster.system, load)
        try:
            async with asyncio.timeout(ATTEMPT_S):
                await committer.open()  # creates a stream: a write
                await committer.close()
            return time.monotonic() - began
        except (OSError, LoadError, TimeoutError):
            await asyncio.sleep(_PAUSE_S)
    raise PeerError(f"{cluster.system} took no write within {WRITE_WITHIN_S:.0f} s")
