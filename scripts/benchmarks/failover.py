"""How long writes stop when the leader dies, hangs or is cut off, or when all are restarted.

Three controllers with the product's timeouts run under a steady load. Again and again the leader is
struck; measured is the time to the next write that another controller acknowledged, or any one if
all were struck. The client's own search for the leader is part of that time; the controllers' part
is told by their logs.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.benchmarks import faults
from scripts.benchmarks.bench_cluster import QuorumWatch, caller_of, running_cluster, watching
from scripts.benchmarks.failover_phases import find_takeover
from scripts.benchmarks.figures import Outcome, Table, median, spread
from scripts.benchmarks.steady_load import WRITES_A_SECOND, SteadyLoad, steady_load
from streammeta.cli.local_cluster import LocalCluster

CONTROLLERS = 3
NO_CONTROLLER = -1
LATE_ANSWERS_S = 0.1
"""Time for which answers of processes that were killed may still be read, in seconds."""
ACKNOWLEDGED_WITHIN_S = 30.0
SETTLE_S = (0.2, 0.7)
"""Drawn between two runs, so that faults do not keep step with the controllers' timers."""
_WHOLE = "fault to next acknowledged write"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One fault; times in seconds since it."""

    old_leader: int
    new_leader: int
    epochs: int
    """From the old leader's epoch to the new one's; more than 1 means an election was lost."""
    elected_s: float
    claimed_s: float
    acknowledged_s: float


class FailoverError(Exception):
    """No controller took over."""


@dataclass(frozen=True, slots=True)
class _Stage:
    cluster: LocalCluster
    fault: faults.Fault
    watch: QuorumWatch
    load: SteadyLoad


async def measure(
    root: Path,
    kind: faults.Kind,
    runs: int,
    seed: int,
    progress: Callable[[str], None],
    *,
    over_tls: bool = False,
) -> Outcome:
    """Strike the leader `runs` times and return what was seen.

    Raises:
        FailoverError: no controller acknowledged a write within `ACKNOWLEDGED_WITHIN_S`.
        UnhealthyError: the cluster did not recover between two runs.
    """
    rng = random.Random(seed)
    results: list[Run] = []
    shown = f"{kind} over TLS" if over_tls else kind
    with running_cluster(root, CONTROLLERS, over_tls=over_tls) as cluster:
        caller = caller_of(cluster)
        async with (
            faults.prepared(kind, cluster) as fault,
            watching(cluster.endpoints, caller) as watch,
            steady_load(cluster.endpoints, caller) as load,
        ):
            stage = _Stage(cluster, fault, watch, load)
            for number in range(1, runs + 1):
                progress(f"failover by {shown}: run {number} of {runs}")
                await watch.wait_healthy()
                await asyncio.sleep(rng.uniform(*SETTLE_S))
                results.append(await _strike(stage))
    return _outcome(kind, seed, results, over_tls=over_tls)


async def _strike(stage: _Stage) -> Run:
    old = await stage.watch.wait_healthy()
    is_of_all = stage.fault.is_of_all
    endpoint = "" if is_of_all else stage.cluster.endpoints[old.node_id - 1]
    struck_at, struck_wall = time.monotonic(), time.time()
    acknowledged = stage.load.next_acknowledged(endpoint, struck_at)
    stage.fault.strike(old.node_id)
    mending = asyncio.create_task(stage.fault.mend(old.node_id)) if is_of_all else None
    if is_of_all:
        await asyncio.sleep(LATE_ANSWERS_S)
        acknowledged = stage.load.next_acknowledged(endpoint, time.monotonic())
    try:
        async with asyncio.timeout(ACKNOWLEDGED_WITHIN_S):
            acknowledged_at = await acknowledged
    except TimeoutError:
        raise FailoverError(
            f"no write was acknowledged within {ACKNOWLEDGED_WITHIN_S:.0f} s after controller "
            f"{old.node_id}, the leader, was struck"
        ) from None
    await (mending or stage.fault.mend(old.node_id))
    logs = {node_id: child.log_path for node_id, child in stage.cluster.children.items()}
    takeover = find_takeover(logs, struck_wall, NO_CONTROLLER if is_of_all else old.node_id)
    if takeover is None:
        raise FailoverError("a write was acknowledged, and no controller logged that it leads")
    return Run(
        old_leader=old.node_id,
        new_leader=takeover.node_id,
        epochs=takeover.epoch - old.epoch,
        elected_s=round(takeover.elected_s, 4),
        claimed_s=round(takeover.claimed_s, 4),
        acknowledged_s=round(acknowledged_at - struck_at, 4),
    )


def _outcome(kind: faults.Kind, seed: int, results: Sequence[Run], *, over_tls: bool) -> Outcome:
    name = f"failover_{kind}{'_tls' * over_tls}"
    phases = {
        "fault to majority of votes": [run.elected_s for run in results],
        "votes to serving": [run.claimed_s - run.elected_s for run in results],
        "serving to client's answer": [run.acknowledged_s - run.claimed_s for run in results],
        _WHOLE: [run.acknowledged_s for run in results],
    }
    rows = tuple(
        (name, *(f"{value:.3f}" for value in spread("", "", values).values()))
        for name, values in phases.items()
    )
    return Outcome(
        benchmark=name.replace("_", "-"),
        settings={
            "kind": kind,
            "over_tls": over_tls,
            "runs": len(results),
            "controllers": CONTROLLERS,
            "writes_a_second": WRITES_A_SECOND,
            "seed": seed,
        },
        figures={
            **spread(name, "s", [run.acknowledged_s for run in results]),
            f"{name}_serving_p50_s": round(median([run.claimed_s for run in results]), 4),
        },
        details={
            "lost_elections": sum(run.epochs - 1 for run in results),
            "runs": [asdict(run) for run in results],
        },
        tables=(
            Table(
                title=f"Leader lost by {kind}, {len(results)} runs{' over TLS' * over_tls}, s",
                columns=("phase", "p50", "p90", "max"),
                rows=rows,
            ),
            Table(
                title="Each run, sorted",
                columns=("fault to next acknowledged write, seconds",),
                rows=((" ".join(f"{run:.3f}" for run in sorted(phases[_WHOLE])),),),
            ),
        ),
    )
