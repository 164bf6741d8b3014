"""The client process of the commit benchmarks: many commits in flight at one system.

    python -m scripts.benchmarks.commit_load --system zookeeper --endpoint HOST:PORT \
        --ranges 100 --in-flight 64 --seconds 5

Each of the commits in flight belongs to a slot, which has streams of its own, and is followed by
the next of that slot when its answer comes; so commits never conflict. It is the same process
whatever the system; how one is spoken to is in the modules that `committer_of` names. Prints
`ready measuring` when the time begins to count, `ready measured` when it ends, and one JSON object.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from scripts.benchmarks.committer import Committer, Load, LoadError
from scripts.benchmarks.figures import percentile

if TYPE_CHECKING:  # earlier commits, as baselines, have no such module
    from streammeta.rpc.tls import TlsFiles

WARM_UP_S = 1.0
SYSTEMS = ("unary", "pipelined", "product", "put", "zookeeper", "etcd", "postgresql")
"""The first four are ways to speak to streammeta."""


@dataclass(slots=True)
class Window:
    """What was acknowledged while the time counted."""

    began: float = float("inf")
    ends: float = float("inf")
    latencies_s: list[float] = field(default_factory=list)
    times_s: list[tuple[float, float]] = field(default_factory=list)
    """When each was asked for and answered, by CLOCK_MONOTONIC."""
    commits_in_all: int = 0

    def take(self, asked: float, answered: float) -> None:
        """Count a commit; its latency if it was answered within the window."""
        self.commits_in_all += 1
        if self.began <= answered < self.ends:
            self.latencies_s.append(answered - asked)
            self.times_s.append((asked, answered))


def committer_of(system: str, load: Load) -> Committer:
    """Return the load that commits to `system`."""
    # Only the system's own client is imported: an earlier commit lacks parts of the contract.
    match system:
        case "zookeeper":
            from scripts.benchmarks.peers.zookeeper_client import ZookeeperCommitter

            return ZookeeperCommitter(load)
        case "etcd":
            from scripts.benchmarks.peers.etcd_client import EtcdCommitter

            return EtcdCommitter(load)
        case "postgresql":
            from scripts.benchmarks.peers.postgresql_client import PostgresqlCommitter

            return PostgresqlCommitter(load)
        case "product":
            from scripts.benchmarks.product_client import ProductCommitter

            return ProductCommitter(load)
        case "floor-pipelined" | "floor-unary":
            from scripts.benchmarks.floor_client import PipelinedFloor, UnaryFloor

            return (PipelinedFloor if system == "floor-pipelined" else UnaryFloor)(load)
        case "streammeta-reads" | "etcd-reads" | "zookeeper-reads":
            from scripts.benchmarks import ten_reads

            readers: dict[str, Callable[[Load], Committer]] = {
                "streammeta-reads": ten_reads.StreammetaReads,
                "etcd-reads": ten_reads.EtcdReads,
                "zookeeper-reads": ten_reads.ZookeeperReads,
            }
            return readers[system](load)
    from scripts.benchmarks import streammeta_client

    ways: dict[str, Callable[[Load], Committer]] = {
        "unary": streammeta_client.UnaryCommitter,
        "pipelined": streammeta_client.PipelinedCommitter,
        "put": streammeta_client.Putter,
    }
    return ways[system](load)


async def _commit_until_end(committer: Committer, slot: int, window: Window) -> None:
    while time.monotonic() < window.ends:
        asked = time.monotonic()
        await committer.commit(slot)
        window.take(asked, time.monotonic())


async def run(
    committer: Committer, in_flight: int, seconds: float, window: Window
) -> dict[str, object]:
    """Drive the load, fill `window` and return its figures."""
    await committer.open()
    try:
        async with asyncio.TaskGroup() as group:
            for slot in range(in_flight):
                group.create_task(_commit_until_end(committer, slot, window))
            await asyncio.sleep(WARM_UP_S)
            cpu = time.process_time()
            window.began = time.monotonic()
            window.ends = window.began + seconds
            print("ready measuring", flush=True)
            await asyncio.sleep(seconds)
            cpu = time.process_time() - cpu
            print("ready measured", flush=True)
    finally:
        await committer.close()
    return _figures(window, cpu, seconds)


def _figures(window: Window, cpu_s: float, seconds: float) -> dict[str, object]:
    if not window.latencies_s:
        raise LoadError(f"no commit was acknowledged within {seconds:.0f} s")
    return {
        "commits": len(window.latencies_s),
        "commits_in_all": window.commits_in_all,
        "commits_per_s": round(len(window.latencies_s) / seconds, 1),
        "p50_ms": round(percentile(window.latencies_s, 0.5) * 1000, 3),
        "p99_ms": round(percentile(window.latencies_s, 0.99) * 1000, 3),
        "max_ms": round(max(window.latencies_s) * 1000, 3),
        "client_cpu_s": round(cpu_s, 3),
    }


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Keep the collector's pauses out of the latencies; a run is short."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _files(arguments: argparse.Namespace) -> "TlsFiles | None":
    if arguments.tls_cert is None:
        return None
    from streammeta.rpc.tls import TlsFiles

    return TlsFiles(arguments.tls_ca, arguments.tls_cert, arguments.tls_key)


def main() -> None:
    """Run the load named on the command line and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", choices=SYSTEMS, required=True)
    parser.add_argument("--endpoint", required=True, help="of the leader")
    parser.add_argument("--ranges", type=int, default=1)
    parser.add_argument("--in-flight", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--objects", type=int, default=20_000, help="prepared beforehand")
    for name in ("--tls-ca", "--tls-cert", "--tls-key"):
        parser.add_argument(name, type=Path, help="of the caller; without, plain text")
    parser.add_argument("--times", type=Path, help="file for the times of every commit")
    arguments = parser.parse_args()
    load = Load(
        endpoint=arguments.endpoint,
        ranges=arguments.ranges,
        in_flight=arguments.in_flight,
        objects=arguments.objects,
        tls=_files(arguments),
    )
    committer = committer_of(arguments.system, load)
    with _no_collections():
        window = Window()
        figures = uvloop.run(run(committer, arguments.in_flight, arguments.seconds, window))
    if arguments.times is not None:
        arguments.times.write_text(json.dumps(window.times_s))
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
