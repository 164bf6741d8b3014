"""Broker processes of the demo and their events.

Each broker has a thread that reads its JSON lines into one queue. The demo's main thread reads
events from the queue, so that it acts on them in order.
"""

import json
import queue
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.demonstration.callers import Callers
from streammeta.cli.local.local_cluster import Child, ChildFailedError, start_child

FIRST_NODE_ID = 1_001
"""Brokers' ids start above the controllers'."""


@dataclass(frozen=True, slots=True)
class Event:
    """Line of one broker. `name` is "ended" when its process has closed its output."""

    broker: int
    name: str
    facts: Mapping[str, Any]


def node_id_of(broker: int) -> int:
    """Return the node id of the broker of share `broker`."""
    return FIRST_NODE_ID + broker


@dataclass(slots=True)
class BrokerFleet:
    """Brokers, each with one share of the streams and its certificate."""

    root: Path
    common_options: Sequence[str]
    env: Mapping[str, str]
    callers: Callers
    share_count: int
    children: dict[int, Child] = field(default_factory=dict)
    events: "queue.Queue[Event]" = field(default_factory=queue.Queue)
    _epochs: dict[int, int] = field(default_factory=dict)
    _killed: set[int] = field(default_factory=set)

    def start(self, broker: int, *options: str) -> None:
        """Start the broker of share `broker`, or restart it with a larger node epoch."""
        epoch = self._epochs[broker] = self._epochs.get(broker, 0) + 1
        node_id = node_id_of(broker)
        child = start_child(
            f"broker {broker}",
            [
                *(sys.executable, "-m", "scripts.demonstration.broker", *self.common_options),
                *("--node-id", str(node_id), "--node-epoch", str(epoch)),
                *self.callers.broker(node_id).words,
                *("--share", f"{broker}/{self.share_count}", *options),
            ],
            self.root / f"broker-{broker}.log",
            self.env,
        )
        self.children[broker] = child
        threading.Thread(target=self._read, args=(broker, child), daemon=True).start()

    def epoch_of(self, broker: int) -> int:
        """Return the node epoch of the broker's last start."""
        return self._epochs[broker]

    def kill(self, broker: int) -> None:
        """End a broker as `kill -9` does, on purpose."""
        self._killed.add(self.children[broker].pid)
        self.children[broker].kill()

    def stop_all(self) -> None:
        """End every broker that still runs."""
        for child in self.children.values():
            child.kill()

    def next_event(self, timeout_s: float) -> Event | None:
        """Return the next event, or None after `timeout_s`.

        Raises:
            ChildFailedError: a broker ended by itself with an error.
        """
        try:
            event = self.events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if event.name == "ended":
            self._check_ended(event.broker, event.facts["pid"])
        return event

    def _check_ended(self, broker: int, pid: int) -> None:
        child = self.children[broker]
        if pid in self._killed or child.pid != pid:
            return
        code = child.process.wait()
        if code != 0:
            raise ChildFailedError(
                f"broker {broker} ended with exit code {code}; the end of its log "
                f"{child.log_path}:\n{child.log_tail()}"
            )

    def _read(self, broker: int, child: Child) -> None:
        while line := child.read_line():
            facts = json.loads(line)
            self.events.put(Event(broker, facts["event"], facts))
        self.events.put(Event(broker, "ended", {"pid": child.pid}))
