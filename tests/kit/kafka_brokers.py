"""Kafka-shaped brokers as processes over a cluster of controllers, and scripts of stock clients."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from streammeta.cli.local.local_cluster import PROGRAM, Child, LocalCluster, free_ports, start_child
from tests.kit.real_cluster import FAST, running_cluster
from tests.kit.warm_start import start_warm

CLIENTS = Path(__file__).parents[1] / "brokers" / "clients"
"""Folder of the scripts."""
_FRANZ_GO = Path(__file__).parents[2] / ".go" / "kafka"


class KafkaBrokers:
    """Brokers by node id over one cluster of controllers."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.children: dict[int, Child] = {}
        self.addresses: dict[int, str] = {}
        self.http: dict[int, str] = {}
        self._ports: dict[int, int] = {}

    def start(self, node_id: int, *options: str) -> str:
        """Start a broker with further options; return its address, and keep that of its metrics.

        A broker that starts again has the address of before, since clients know no other, unless
        the one of before still runs.
        """
        former = self.children.get(node_id)
        if former is None or former.is_running:
            (self._ports[node_id],) = free_ports(1)
        child = start_warm(
            f"kafka {node_id}",
            [
                *PROGRAM,
                "kafka",
                *("--connect", self.cluster.connect, "--store", self.cluster.store_uri),
                *("--node-id", str(node_id), "--listen", f"127.0.0.1:{self._ports[node_id]}"),
                *("--linger", "5ms", "--partitions", "4", *options),
            ],
            self.cluster.root / f"kafka-{node_id}.log",
        )
        self.children[node_id] = child
        found = re.search(
            r"bootstrap\.servers=(\S+) node_id=\d+(?: http=(\S+))?", child.wait_ready()
        )
        assert found is not None
        self.http[node_id] = found[2] or ""
        self.addresses[node_id] = found[1]
        return found[1]

    def run(self, script: str, *words: str) -> Child:
        """Start a script of a stock client."""
        command = [sys.executable, str(CLIENTS / script), *words]
        return start_child(script, command, self.cluster.root / f"{script}.log")

    def stop(self) -> None:
        """Stop every broker."""
        for child in self.children.values():
            child.stop()


@contextmanager
def running_brokers(
    root: Path, voters: int = 1, options: Sequence[str] = FAST
) -> Iterator[KafkaBrokers]:
    """Run controllers, and stop the brokers that are started over them in the end."""
    with running_cluster(root, voters, options) as cluster:
        brokers = KafkaBrokers(cluster)
        try:
            yield brokers
        finally:
            brokers.stop()


def client_in_go() -> str:
    """Return the program that scripts/fetch_peers builds of franz-go; skip the test without it."""
    if not _FRANZ_GO.exists():
        pytest.skip("the client in Go is not built: run ./scripts/fetch_peers, with Go on PATH")
    return str(_FRANZ_GO)


def result_of(script: Child) -> Any:
    """Return the JSON value that a script prints last; its exit code has to be 0."""
    last = ""
    while line := script.read_line():
        last = line
    code = script.stop()
    assert code == 0, script.log_tail()
    return json.loads(last)
