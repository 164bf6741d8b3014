"""Story of `demo --kafka`: stock clients, two brokers, one of them killed, and nothing lost.

Rows of the demo's data go through a topic of several partitions while a consumer group reads it.
"""

import json
import re
import sys
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from scripts.demonstration.stage import Stage
from streammeta.cli.local.local_cluster import PROGRAM, Child, start_child

BROKERS = (1, 2)
KILLED = 1
PARTITIONS = 8
ROWS = 100_000
KILL_SHARE = 0.3
"""Share of the rows that are acknowledged when a broker is killed."""
TOPIC = "flights"
SILENCE_MIN_S = 0.5
"""Silence of a partition that indicates a takeover: a session of 1.5 s has to end first."""


class KafkaDemo:
    """Run from an empty bucket to the summary."""

    OPTIONS = ("--session-timeout-ms", "1500")

    def __init__(self, arguments: Namespace, stage: Stage) -> None:
        self._rows = arguments.rows or ROWS
        self._stage = stage
        self._children: list[Child] = []

    def stop(self) -> None:
        """End brokers and clients."""
        for child in self._children:
            child.stop()

    def run(self) -> tuple[dict[str, object], list[str]]:
        """Play the whole story, and return its figures and the failed checks."""
        say = self._stage.narrator.step
        self._stage.start_controllers()
        brokers = {node_id: self._start_broker(node_id) for node_id in BROKERS}
        servers = ",".join(address for _, address in brokers.values())
        say(f"two brokers listen for Kafka's clients: {servers}")
        clients = self._start(
            "clients",
            [sys.executable, "-m", "scripts.demonstration.kafka_clients"],
            [servers, TOPIC, str(self._rows)],
        )
        say(f"confluent-kafka produces {self._rows:,} rows, and a group of two consumes them")
        self._wait_for(clients, "acknowledged", int(self._rows * KILL_SHARE))
        brokers[KILLED][0].kill()
        say(f"broker {KILLED} is killed; broker {BROKERS[-1]} takes over its partitions")
        done = self._wait_for(clients, "done", 0)
        silent_s = done["longest_wait_of_a_partition_s"]
        say(
            f"{done['consumed']:,} of {done['acknowledged']:,} acknowledged rows are consumed, "
            f"each stored once; a partition was silent for {silent_s} s"
        )
        return _summary(done)

    def _start_broker(self, node_id: int) -> tuple[Child, str]:
        place = (
            *self._stage.callers.broker(node_id).words,
            "--store",
            self._stage.endpoint.store_uri,
        )
        child = self._start(
            f"broker-{node_id}",
            [*PROGRAM, "kafka", *place],
            [
                *("--node-id", str(node_id), "--listen", "127.0.0.1:0"),
                *("--partitions", str(PARTITIONS)),
            ],
        )
        found = re.search(r"bootstrap\.servers=(\S+)", child.wait_ready())
        assert found is not None
        return child, found[1]

    def _start(self, name: str, program: list[str], words: list[str]) -> Child:
        log = self._stage.root / f"{name}.log"
        child = start_child(name, [*program, *words], log, self._stage.endpoint.env)
        self._children.append(child)
        return child

    def _wait_for(self, clients: Child, name: str, count: int) -> Mapping[str, Any]:
        """Read events until one has this name and at least this count."""
        while line := clients.read_line():
            event: dict[str, Any] = json.loads(line)
            if event["event"] == name and event.get("count", 0) >= count:
                return event
        raise RuntimeError(f"the clients ended before they were done:\n{clients.log_tail()}")


def _summary(done: Mapping[str, Any]) -> tuple[dict[str, object], list[str]]:
    checks = {
        "every row was acknowledged": done["acknowledged"] == done["rows"],
        f"no row was rejected: {done['failures']}": not done["failures"],
        "every row was consumed": done["consumed"] == done["rows"],
        "no row was stored twice": done["stored_twice"] == 0,
        "rows of a key are in their order": done["out_of_order"] == 0,
        "a partition waited for its next leader": (
            done["longest_wait_of_a_partition_s"] > SILENCE_MIN_S
        ),
    }
    failed = [check for check, holds in checks.items() if not holds]
    figures = {name: value for name, value in done.items() if name not in ("event", "failures")}
    return {**figures, "brokers_killed": 1, "ok": not failed}, failed
