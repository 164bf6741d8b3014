"""Records through three brokers while brokers and the leading controller are killed.

The long form has a million of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest

from streammeta.cli.local.local_cluster import Child
from tests.kit.kafka_brokers import KafkaBrokers, result_of, running_brokers
from tests.kit.real_cluster import leader_of

pytestmark = [pytest.mark.process, pytest.mark.timeout(880)]

_RESTARTED_AFTER = 0.3
"""What was killed starts again after this share of the records between two kills."""


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[KafkaBrokers]:
    with running_brokers(tmp_path, 3) as found:
        yield found


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
    assert leader_of(brokers.cluster) != leader
    brokers.cluster.start(leader)


@pytest.mark.parametrize(
    ("records", "killed_every"),
    [(60_000, 10_000), pytest.param(1_000_000, 100_000, marks=pytest.mark.slow)],
)
def test_every_acknowledged_record_is_stored_once_in_order(
    brokers: KafkaBrokers, records: int, killed_every: int
) -> None:
    addresses = [brokers.start(node_id, "--partitions", "8") for node_id in (1, 2, 3)]
    client = brokers.run("marathon_script.py", ",".join(addresses), "far", str(records))
    victims = cycle((1, 2, 3))
    kills = range(killed_every, records, killed_every)
    leaders = 0
    for number, count in enumerate(kills):
        _wait_for(client, count)
        restarted_at = count + int(_RESTARTED_AFTER * killed_every)
        if number % 2:
            _kill_the_leader(brokers, client, restarted_at)
            leaders += 1
        else:
            _kill_a_broker(brokers, next(victims), client, restarted_at)
    assert leaders >= 2
    assert result_of(client) == {
        "failed": [],
        "acknowledged": records,
        "stored": records,
        "numbers": records,
        "out_of_order": 0,
    }
