"""One list of operations against `streammeta kafka` and Apache Kafka: stock clients see the same.

Apache Kafka is the oracle: what a client reports of it is what it has to report of this product.
Skipped where scripts/kafka_peer has not fetched it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks.peers.apache_kafka import class_path, missing, running_kafka
from streammeta.cli.local.local_cluster import start_child
from tests.brokers.kafka_operations import Operation, Operations
from tests.brokers.kafka_wire_script import Script
from tests.kit.kafka_brokers import CLIENTS, client_in_go, result_of, running_brokers
from tests.kit.kafka_wire import WireClient
from tests.kit.real_cluster import FAST
from tests.kit.tools import program

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(bool(missing()), reason=missing() or "it is there"),
    pytest.mark.timeout(180),
]

_HOUR_MS = 3_600_000
_OPTIONS = (*FAST, "--session-timeout-ms", "3000")

Run = Callable[[str, Path], Sequence[Any]]
"""Runs the operations of a file against an address; returns their results."""


def _by_java(address: str, asked: Path) -> Sequence[Any]:
    classes = asked.parent / "classes"
    if not classes.exists():
        source = str(CLIENTS / "OracleScript.java")
        compiler = ("javac", "-cp", class_path(), "-d", str(classes), source)
        subprocess.run(compiler, check=True, capture_output=True)
    machine = ("java", "-XX:TieredStopAtLevel=1", "-cp", f"{class_path()}:{classes}")
    return _run([*machine, "OracleScript", address, str(asked)], asked)


def _by_script(name: str) -> Run:
    script = str(CLIENTS / f"{name}_oracle.py")
    return lambda address, asked: _run([sys.executable, script, address, str(asked)], asked)


def _run(command: Sequence[str], asked: Path) -> Sequence[Any]:
    results: Sequence[Any] = result_of(start_child("client", command, asked.with_suffix(".log")))
    return results


def _by_franz_go(address: str, asked: Path) -> Sequence[Any]:
    return _run([client_in_go(), address, str(asked)], asked)


def _by_kcat(address: str, asked: Path) -> Sequence[Any]:
    found = program("kcat")
    if found is None:
        pytest.skip("kcat is not here: run ./scripts/fetch_tools")
    script = str(CLIENTS / "kcat_oracle.py")
    return _run([sys.executable, script, address, str(asked), found], asked)


_RUNS: dict[str, Run] = {
    "java": _by_java,
    "confluent": _by_script("confluent"),
    "franz_go": _by_franz_go,
    "kcat": _by_kcat,
}


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Addresses of a broker of this product, and of Apache Kafka."""
    root = tmp_path_factory.mktemp("compared")
    with running_kafka(root / "kafka") as (kafka, _), running_brokers(root, 1, _OPTIONS) as brokers:
        yield brokers.start(1), kafka


@pytest.mark.parametrize("client", _RUNS)
def test_client_sees_what_it_sees_of_apache_kafka(
    addresses: tuple[str, str], client: str, tmp_path: Path
) -> None:
    base_ms = (time.time_ns() // 1_000_000_000) * 1000 - _HOUR_MS
    operations = Operations(client, base_ms)
    asked = operations.of_a_simple_tool() if client == "kcat" else operations.all()
    place = tmp_path / "operations.json"
    place.write_text(json.dumps(asked))
    ours, kafkas = (_RUNS[client](address, place) for address in addresses)
    assert len(ours) == len(kafkas) == len(asked)
    differing = [
        f"{_shown(operation)}: here {mine}, Kafka {theirs}"
        for operation, mine, theirs in zip(asked, ours, kafkas, strict=True)
        if mine != theirs
    ]
    assert not differing, "\n".join(differing)
    failed = [_shown(one) for one, result in zip(asked, ours, strict=True) if _is_odd(one, result)]
    assert not failed, f"operations whose failure is not expected: {failed}"


def _shown(one: Operation) -> str:
    return str({name: value for name, value in one.items() if name != "records"})


def _is_odd(one: Operation, result: Any) -> bool:
    """Whether an operation fails though it should not, or the other way round."""
    has_failed = isinstance(result, dict) and "error" in result
    return has_failed is not one.get("fails", False)


def test_requests_are_answered_as_by_apache_kafka(addresses: tuple[str, str]) -> None:
    now_ms = time.time_ns() // 1_000_000 - _HOUR_MS
    found = []
    for address in addresses:
        with WireClient(address) as client:
            found.append(dict(Script(client, now_ms).observations()))
    ours, kafkas = found
    assert ours.keys() == kafkas.keys()
    differing = [
        f"{name}: here {ours[name]}, Kafka {kafkas[name]}"
        for name in ours
        if ours[name] != kafkas[name]
    ]
    assert not differing, "\n".join(differing)
