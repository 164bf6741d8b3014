"""A million records through three brokers while brokers and the leading controller are killed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest

from streammeta.cli.local_cluster import Child
from tests.kit.kafka_brokers import KafkaBrokers, result_of
from tests.kit.real_cluster import FAST, leader_of, running_cluster

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(880)]

_RECORDS = 1_000_000
_KILLED_EVERY = 100_000
"""Acknowledged records between two kills."""
_RESTARTED_AFTER = 30_000
_OPTIONS = (*FAST, "--session-timeout-ms", "2000")


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[KafkaBrokers]:
    with running_cluster(tmp_path, 3, _OPTIONS) as cluster:
        found = KafkaBrokers(cluster)
        try:
            yield found
        finally:
            found.stop()


def _wait_for(client: Child, count: int) -> None:
    """Read lines until so many records are acknowledged."""
    while line := client.read_line():
        if line.startswith("acknowledged ") and int(line.split()[1]) >= count:
            return
    raise AssertionError(f"the client ended:\n{client.log_tail()}")


def _kill_a_broker(brokers: KafkaBrokers, node_id: int, client: Child, count: int) -> None:
    brokers.children[node_id].kill()
    _wait_for(client, count)
    brokers.start(node_id)


def _kill_the_leader(brokers: KafkaBrokers, client: Child, count: int) -> None:
    leader = leader_of(brokers.cluster)
    brokers.cluster.children[leader].kill()
    _wait_for(client, count)
    brokers.cluster.start(leader)


def test_every_acknowledged_record_is_stored_once_in_order(brokers: KafkaBrokers) -> None:
    addresses = [brokers.start(node_id, "--partitions", "8") for node_id in (1, 2, 3)]
    client = brokers.run("marathon_script.py", ",".join(addresses), "far", str(_RECORDS))
    victims = cycle((1, 2, 3))
    kills = range(_KILLED_EVERY, _RECORDS, _KILLED_EVERY)
    for number, count in enumerate(kills):
        _wait_for(client, count)
        if number % 2:
            _kill_the_leader(brokers, client, count + _RESTARTED_AFTER)
        else:
            _kill_a_broker(brokers, next(victims), client, count + _RESTARTED_AFTER)
    assert result_of(client) == {
        "failed": [],
        "acknowledged": _RECORDS,
        "stored": _RECORDS,
        "numbers": _RECORDS,
        "out_of_order": 0,
    }
