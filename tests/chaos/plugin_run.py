"""One run of brokers with plug-ins over one faulty bucket, and every check.

The brokers are stock ones, which tests in Java (`FaultRun`) start, kill, write to and read from as
this module tells them. The bucket is moto's, behind a proxy that breaks requests. A run is named by
its seed: the accidents repeat, the timing of real processes does not.
"""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

from moto.s3.models import s3_backends

from streammeta.cli.local.local_cluster import Child, LocalCluster, free_ports, start_child
from streammeta.controller.features import SUPPORTED
from tests.chaos.chaos_run import ChaosFailedError
from tests.chaos.shapes_peer import ShapesPeer
from tests.kit.real_cluster import FAST, leader_of, raise_level
from tests.kit.reconciled_bucket import Orphans, reconcile
from tests.storage.s3_fault_proxy import Fault, FaultProxy, running_fault_proxy, seeded
from tests.storage.s3_servers import running_moto

MODULES = {
    "kafka": "streammeta-kafka-tiered",
    "rocketmq": "streammeta-rocketmq-tiered",
    "pulsar": "streammeta-pulsar-offloader",
    "automq": "streammeta-automq",
}
"""Modules of clients/java, by plug-in."""

SHAPES = "shapes"
"""Brokers in Python and a client, which are no plug-ins, and share the bucket."""

_FAULTS = (Fault.FORBIDDEN, Fault.SLOW_DOWN, Fault.DONE_BUT_FAILED, Fault.DONE_BUT_RESET)
_JAVA = Path(__file__).parents[2] / "scripts" / "java"
_BUCKET = "faults"
_OPTIONS = (*FAST, "--fetch-timeout-ms", "2500")
"""Leaders are replaced soon, but not because the brokers keep the machine busy."""
_AGE = timedelta(hours=2)
"""Above the default grace of reconciliation."""
_ORPHANS = 3
_BUILD_S = 1200.0
_END_S = 90.0
_ANSWER_S = 1200.0


@dataclass(frozen=True, slots=True)
class PluginReport:
    """What a run did."""

    seed: int
    messages: dict[str, int]
    accidents: dict[str, int]
    broken_requests: int
    rounds: int
    deleted_orphans: int
    keys: dict[str, int]
    """Keys by verdict of the last reconciliation."""

    def __str__(self) -> str:
        groups = (self.messages, self.accidents, self.keys)
        messages, accidents, keys = (
            ", ".join(f"{name} {count}" for name, count in group.items()) for group in groups
        )
        return (
            f"seed {self.seed}: read back {messages}; {accidents}, {self.broken_requests} requests"
            f" to the store broken; {self.deleted_orphans} orphans deleted in {self.rounds} rounds,"
            f" left: {keys}"
        )


class Peer:
    """A broker's side of the run, in another process."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_ANSWER_S)
        self._lines = connection.makefile("rw")
        self.name = self._lines.readline().strip()

    def ask(self, command: str) -> int:
        """Have a command done; return the number of messages acknowledged so far."""
        self._lines.write(f"{command}\n")
        self._lines.flush()
        status, _, text = self._lines.readline().strip().partition(" ")
        assert status == "ok", f"{self.name} can't {command}: {text or 'it has ended'}"
        return int(text)

    def close(self) -> None:
        self._lines.close()


def run_plugins(root: Path, seed: int, plugins: Sequence[str], seconds: float) -> PluginReport:
    """Run faults for `seconds` seconds and check everything; raises `ChaosFailedError`."""
    with contextlib.ExitStack() as exits:
        moto = exits.enter_context(running_moto())
        moto.create_bucket(_BUCKET)
        proxy = exits.enter_context(running_fault_proxy(moto))
        store_uri = proxy.endpoint.uri(_BUCKET)
        cluster = LocalCluster(root, "faults", store_uri, free_ports(3), _OPTIONS)
        exits.callback(cluster.stop_all)
        try:
            cluster.start_all()
            raise_level(cluster, SUPPORTED.highest)
            stock = [plugin for plugin in plugins if plugin in MODULES]
            peers: list[Peer | ShapesPeer] = []
            peers += exits.enter_context(_running_peers(cluster, stock)) if stock else []
            if SHAPES in plugins:
                # Their faults are tested elsewhere: they reach the store past the proxy.
                direct = replace(cluster, root=root / SHAPES, store_uri=moto.uri(_BUCKET))
                peers.append(exits.enter_context(contextlib.closing(ShapesPeer(direct))))
            return _PluginRun(cluster, proxy, peers, seed).run(seconds)
        except Exception as error:
            raise ChaosFailedError(
                f"seed {seed}: {traceback.format_exc()}\nlogs and data: {root}"
            ) from error


@contextlib.contextmanager
def _running_peers(cluster: LocalCluster, plugins: Sequence[str]) -> Iterator[list[Peer]]:
    """Build the plug-ins, and start a broker with each."""
    with contextlib.ExitStack() as exits:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.settimeout(_BUILD_S)
        port = listener.getsockname()[1]
        modules = ",".join(MODULES[plugin] for plugin in plugins)
        build = start_child(
            "scripts/java",
            [
                *("sh", "-c", 'exec "$@" 1>&2', "sh", str(_JAVA)),
                *(
                    "--stock",
                    "-q",
                    f"-T{len(plugins)}",
                    "-am",
                    "-pl",
                    modules,
                    "-Dtest=FaultRunTest",
                ),
                *(
                    "-Dsurefire.failIfNoSpecifiedTests=false",
                    f"-Dstreammeta.faults=127.0.0.1:{port}",
                ),
            ],
            cluster.root / "brokers.log",
        )
        exits.callback(_end, build)
        exits.enter_context(listener)
        peers: list[Peer] = []
        for _ in plugins:
            peers.append(Peer(listener.accept()[0]))
            exits.callback(peers[-1].close)
        for peer in peers:
            peer.ask(f"{cluster.connect} {cluster.store_uri} {cluster.root}")
        yield peers


def _end(build: Child) -> None:
    """Wait for the brokers to end, as they do once nobody tells them anything."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        build.process.wait(_END_S)
    build.stop()


@dataclass
class _PluginRun:
    """The accidents of one run, drawn from its seed."""

    cluster: LocalCluster
    proxy: FaultProxy
    peers: Sequence[Peer | ShapesPeer]
    seed: int
    accidents: Counter[str] = field(default_factory=Counter)
    keys: dict[str, int] = field(default_factory=dict)
    broken_requests: int = 0
    rounds: int = 0
    deleted: int = 0

    def run(self, seconds: float) -> PluginReport:
        """Break things while the brokers write; then check that nothing is lost."""
        self._tell_all("write")
        self._break_things(time.monotonic() + seconds)
        messages = self._tell_all("stop")
        self._tell_all("settle")
        self._tell_all("read")

        self._reconcile_twice()
        assert self._tell_all("read") == messages
        assert all(messages.values()), f"nothing was written: {messages}"
        return PluginReport(
            *(self.seed, messages, dict(self.accidents), self.broken_requests),
            *(self.rounds, self.deleted, self.keys),
        )

    def _tell_all(self, command: str) -> dict[str, int]:
        return {peer.name: peer.ask(command) for peer in self.peers}

    def _break_things(self, end: float) -> None:
        rng = random.Random(self.seed)
        accidents: list[Callable[[random.Random], None]]
        accidents = [self._kill_brokers, self._kill_leader, self._wait, self._reconcile_once]
        while time.monotonic() < end:
            for accident in rng.sample(accidents, len(accidents)):
                self.accidents[accident.__name__.strip("_")] += 1
                accident(rng)
                time.sleep(rng.uniform(0.0, 2.0))

    @contextlib.contextmanager
    def _faulty_store(self, rng: random.Random) -> Iterator[None]:
        """Break none, some or all requests to the store during the block and for seconds more."""
        self.proxy.start_anew()
        self.proxy.plan = seeded(rng.randrange(1 << 31), rng.choice((0.0, 0.2, 0.5, 1.0)), _FAULTS)
        time.sleep(rng.uniform(0.5, 3.0))
        yield
        time.sleep(rng.uniform(0.5, 3.0))
        self.broken_requests += self.proxy.broken.total()
        self.proxy.start_anew()

    def _wait(self, rng: random.Random) -> None:
        with self._faulty_store(rng):
            time.sleep(rng.uniform(0.0, 5.0))

    def _kill_brokers(self, rng: random.Random) -> None:
        with self._faulty_store(rng):
            self._tell_all("kill")
        self._tell_all("start")

    def _kill_leader(self, rng: random.Random) -> None:
        with self._faulty_store(rng):
            leader = leader_of(self.cluster)
            self.cluster.children[leader].kill()
        self.cluster.start(leader)

    def _reconcile_once(self, _: random.Random) -> None:
        """Delete the orphans of now, while brokers write."""
        orphans = Orphans(self.cluster, _ORPHANS)
        orphans.plant(_ORPHANS)
        self._reconcile()
        assert not orphans.left()

    def _reconcile_twice(self) -> None:
        """Delete orphans, of which young ones stay in the first round, and none in the second."""
        orphans = Orphans(self.cluster, 2 * _ORPHANS)
        orphans.plant(_ORPHANS)
        _age_bucket()
        orphans.plant(_ORPHANS)
        verdicts, deleted = reconcile(self.cluster)
        assert verdicts.get("too_young") == _ORPHANS, verdicts
        assert orphans.left() == orphans.planted[_ORPHANS:]
        self.deleted += deleted

        self._reconcile()
        assert not orphans.left()
        self.keys, deleted = reconcile(self.cluster)
        assert not deleted
        assert not {"orphan", "too_young", "missing", "size_mismatch"} & self.keys.keys(), self.keys

    def _reconcile(self) -> None:
        _age_bucket()
        self.keys, deleted = reconcile(self.cluster)
        self.rounds += 1
        self.deleted += deleted


def _age_bucket() -> None:
    """Make every object look old: no grace period protects it."""
    for key in list(s3_backends["123456789012"]["aws"].buckets[_BUCKET].keys.values()):
        key.last_modified -= _AGE
