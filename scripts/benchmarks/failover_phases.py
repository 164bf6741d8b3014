"""Reads from the controllers' logs which controller took over when."""

import datetime
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Takeover:
    """The first leadership claimed after a fault; times in seconds since the fault."""

    node_id: int
    epoch: int
    elected_s: float
    """Detection, pre-votes and votes are over: the new leader has a majority."""
    claimed_s: float
    """The leader's first batch is committed and all before it is replayed: it serves."""


def find_takeover(logs: Mapping[int, Path], fault_at: float, old_leader: int) -> Takeover | None:
    """Return the first claim of leadership after `fault_at` (Unix time) by another controller."""
    claims = [
        (at, node_id, epoch)
        for node_id, path in logs.items()
        for at, event, epoch in _events(path)
        if event == "leadership_claimed" and at > fault_at and node_id != old_leader
    ]
    if not claims:
        return None
    claimed_at, node_id, epoch = min(claims)
    elected_at = max(
        (
            at
            for at, event, elected_epoch in _events(logs[node_id])
            if event == "leader_elected" and elected_epoch == epoch
        ),
        default=claimed_at,
    )
    return Takeover(
        node_id=node_id,
        epoch=epoch,
        elected_s=elected_at - fault_at,
        claimed_s=claimed_at - fault_at,
    )


def _events(path: Path) -> Iterator[tuple[float, str, int]]:
    """Yield Unix time, name and epoch of every event that has an epoch."""
    for line in path.read_text(errors="replace").splitlines():
        try:
            event: dict[str, Any] = json.loads(line)
            at = datetime.datetime.fromisoformat(event["timestamp"])
            yield at.timestamp(), event["event"], event["epoch"]
        except (ValueError, KeyError, TypeError):
            continue  # a warning of a library, or an event without an epoch
