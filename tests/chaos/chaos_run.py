"""One run: a cluster, clients, a schedule of faults, the end of them all, and every check.

Owns the order of these and the report. A run is named by its seed: the schedule and the clients'
choices repeat, the timing of real processes does not, so a failed run leaves its histories, logs
and data directories behind.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import uvloop

from streammeta.v1 import quorum_pb2
from tests.chaos.chaos_checks import check_healed, check_histories, longest_gap_s
from tests.chaos.chaos_cluster import FAST, ChaosCluster, wait_in_many_threads
from tests.chaos.chaos_watch import LeaderWatch, replace_voter
from tests.chaos.nemesis import Nemesis, make_schedule
from tests.chaos.workload import Workload

_EXPECTED_IN_LOGS = ("disk_full", "majority_full", "checkpoint_put_off")
"""What a controller rightly complains of when its disk is full."""
_MANY_SNAPSHOTS = ("--snapshot-log-bytes", "6000")
"""So that those who were away for long must load one."""
_WATCH_S = 0.1
_REPLACED_S = 60.0
_SERVED_S = 30.0
_SERVED_OPERATIONS = 100


class ChaosFailedError(AssertionError):
    """A run found something; the message says what, the seed, and where everything was left."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a run did. `gap_s`: longest time without an acknowledgement, in seconds."""

    seed: int
    faults: dict[str, int]
    acknowledged: int
    ambiguous: int
    failed: int
    gap_s: float

    def __str__(self) -> str:
        faults = ", ".join(f"{kind} {count}" for kind, count in sorted(self.faults.items()))
        return (
            f"seed {self.seed}: {self.acknowledged} acknowledged, {self.ambiguous} ambiguous, "
            f"{self.failed} failed, longest gap {self.gap_s:.2f} s; {faults}"
        )


def run_chaos(
    root: Path,
    seed: int,
    controllers: int,
    seconds: float,
    modules: Mapping[int, str] = MappingProxyType({}),
) -> RunReport:
    """Run faults for `seconds` seconds and check everything; raises `ChaosFailedError`.

    `modules` are other versions of the product's command, by id of their controllers.
    """

    async def run() -> RunReport:
        wait_in_many_threads()
        return await _ChaosRun(root, seed, controllers, seconds, modules).run()

    return uvloop.run(run())


class _ChaosRun:
    """The parts of one run; to be made on its event loop."""

    def __init__(
        self,
        root: Path,
        seed: int,
        controllers: int,
        seconds: float,
        modules: Mapping[int, str],
    ) -> None:
        self._root = root
        self._seed = seed
        self._cluster = ChaosCluster(
            root,
            controllers,
            module="tests.chaos.small_segments",
            modules=modules,
            options=(*FAST, *_MANY_SNAPSHOTS),
        )
        self._patience_s = seconds / 2
        self._schedule = make_schedule(seed, self._cluster.members, seconds)
        self._watch = LeaderWatch(self._cluster.direct_endpoints)
        self._nemesis = Nemesis(
            self._cluster, lambda: self._watch.leader, self._watch.transfer, self._replace
        )
        self._workload: Workload | None = None

    async def run(self) -> RunReport:
        """Run once; whatever ends the run early, the seed and the schedule are told."""
        watching = asyncio.create_task(self._watch.watch(_WATCH_S))
        try:
            await self._cluster.start()
            # Clients connect through the network, whose ports are known once it is started.
            self._workload = Workload(self._cluster.client_endpoints, self._seed)
            await self._go_through(self._workload)
            return self._report(self._workload)
        except Exception as error:
            raise self._failure(error) from error
        finally:
            watching.cancel()
            await self._nemesis.close()
            if self._workload is not None:
                await self._workload.close()
            await self._watch.close()
            await self._cluster.close()

    async def _go_through(self, workload: Workload) -> None:
        await workload.prepare()
        workload.start()
        await self._nemesis.run(self._schedule, self._patience_s)
        await self._nemesis.recover()
        await self._wait_until_served(workload)
        await workload.stop()
        await workload.read_everything()
        check_histories(workload.kv.history(), workload.stream.history())
        await check_healed(self._cluster, _EXPECTED_IN_LOGS)

    async def _wait_until_served(self, workload: Workload) -> None:
        """Wait until a healed cluster has answered a good number of operations."""
        wanted = workload.counts["acknowledged"] + _SERVED_OPERATIONS
        deadline = time.monotonic() + _SERVED_S
        while workload.counts["acknowledged"] < wanted:
            workload.check_running()
            assert time.monotonic() < deadline, (
                f"all faults ended {_SERVED_S:.0f} s ago, and clients are not served"
            )
            await asyncio.sleep(0.02)

    async def _replace(self, node_id: int, directory_id: str) -> None:
        endpoint = self._cluster.peer_endpoints[node_id]
        key = quorum_pb2.ReplicaKey(node_id=node_id, directory_id=directory_id)
        voter = quorum_pb2.Voter(key=key, endpoint=endpoint)
        await replace_voter(self._watch, voter, _REPLACED_S)

    def _report(self, workload: Workload) -> RunReport:
        counts = workload.counts
        return RunReport(
            seed=self._seed,
            faults=dict(self._nemesis.counts),
            acknowledged=counts["acknowledged"],
            ambiguous=counts["ambiguous"],
            failed=counts["failed"],
            gap_s=longest_gap_s([workload.kv.history(), workload.stream.history()]),
        )

    def _failure(self, error: Exception) -> ChaosFailedError:
        """Keep the histories beside the data directories and say how to repeat the run."""
        if self._workload is not None:
            self._workload.dump(self._root)
        planned = "\n".join(map(str, self._schedule))
        done = "\n".join(self._nemesis.done)
        return ChaosFailedError(
            f"seed {self._seed}, {len(self._cluster.members)} controllers: "
            f"{type(error).__name__}: {error}\n"
            f"schedule:\n{planned}\ndone:\n{done}\n"
            f"histories, logs and data directories: {self._root}"
        )
