"""Client process of the commit benchmarks: many commits in flight at one system.

Each commit in flight belongs to a slot with its own streams. The slot's next commit follows when
the answer comes, so commits never conflict. The process is the same for every system, and only the
committer differs.
"""

import asyncio
import gc
import importlib
import time
from collections.abc import Mapping
from typing import Any

from scripts.benchmarks.committer import Committer, Load, LoadError
from scripts.benchmarks.figures import latencies

WARM_UP_S = 1.0
_COMMITTERS: Mapping[str, tuple[str, str]] = {
    "unary": ("streammeta_client", "UnaryCommitter"),
    "pipelined": ("streammeta_client", "PipelinedCommitter"),
    "put": ("streammeta_client", "Putter"),
    "product": ("streammeta_client", "ProductCommitter"),
    "zookeeper": ("peers.zookeeper_client", "ZookeeperCommitter"),
    "etcd": ("peers.etcd_client", "EtcdCommitter"),
    "floor-pipelined": ("floor", "PipelinedFloor"),
    "floor-unary": ("floor", "UnaryFloor"),
    "streammeta-reads": ("ten_reads", "StreammetaReads"),
    "etcd-reads": ("ten_reads", "EtcdReads"),
    "zookeeper-reads": ("ten_reads", "ZookeeperReads"),
}
"""Module and class of each kind of load. The first four are ways to call streammeta."""


def committer_of(system: str, load: Load) -> Committer:
    """Return the committer of a system. Only its module is imported: others may need an extra."""
    module, name = _COMMITTERS[system]
    committer: Committer = getattr(importlib.import_module(f"scripts.benchmarks.{module}"), name)(
        load
    )
    return committer


async def load_commits(*, system: str, seconds: float, **load: Any) -> dict[str, object]:
    """Commit for `seconds` after a warm-up and return figures.

    `load` are the fields of `Load`. Prints `ready measuring` and `ready measured` around the time
    that counts.
    """
    # The collector's pauses are no latencies of a server, and a run is short.
    gc.disable()
    wanted = Load(**load)
    committer = committer_of(system, wanted)
    began = ends = float("inf")
    answered: list[tuple[float, float]] = []

    async def commit_until_end(slot: int) -> None:
        asked = time.monotonic()
        while asked < ends:
            await committer.commit(slot)
            now = time.monotonic()
            answered.append((asked, now))
            asked = now

    await committer.open()
    try:
        async with asyncio.TaskGroup() as group:
            for slot in range(wanted.in_flight):
                group.create_task(commit_until_end(slot))
            # The first commits wait for connections and caches, so they do not count.
            await asyncio.sleep(WARM_UP_S)
            cpu_s, began = time.process_time(), time.monotonic()
            ends = began + seconds
            print("ready measuring", flush=True)
            await asyncio.sleep(seconds)
            cpu_s = time.process_time() - cpu_s
            print("ready measured", flush=True)
    finally:
        await committer.close()

    counted = [(asked, at) for asked, at in answered if began <= at < ends]
    if not counted:
        raise LoadError(f"no commit was acknowledged within {seconds:.0f} s")
    return {
        "commits": len(counted),
        "commits_in_all": len(answered),
        "commits_per_s": round(len(counted) / seconds, 1),
        **latencies([at - asked for asked, at in counted]),
        "client_cpu_s": round(cpu_s, 3),
    }
