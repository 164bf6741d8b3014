"""Kinds of weather for the simulator: what goes wrong, and how often."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Profile:
    """Rates are probabilities for each message, or events in each simulated second."""

    duration_ms: int = 3000
    drop: float = 0.02
    duplicate: float = 0.02
    delay: float = 0.03
    """Share of messages that take up to `long_delay_ms`."""
    long_delay_ms: int = 400
    latency_ms: int = 4
    disk_ms: int = 6
    slow_disk: float = 0.02
    crashes: float = 0.7
    leader_crashes: float = 0.4
    partitions: float = 0.7
    one_way_cuts: float = 0.4
    replays: float = 2.0
    resignations: float = 0.1
    pauses: float = 0.2
    appends: float = 40.0
    reads: float = 15.0


CALM = Profile(
    drop=0,
    duplicate=0,
    delay=0,
    slow_disk=0,
    crashes=0,
    leader_crashes=0,
    partitions=0,
    one_way_cuts=0,
    replays=0,
    resignations=0,
    pauses=0,
)
MIXED = Profile()
CRASHY = replace(MIXED, crashes=2.5, leader_crashes=1.5, partitions=0.2, one_way_cuts=0.1)
SPLIT = replace(MIXED, crashes=0.1, leader_crashes=0.1, partitions=2.0, one_way_cuts=1.0)
NOISY = replace(
    MIXED, drop=0.12, duplicate=0.15, delay=0.15, long_delay_ms=900, replays=12.0, pauses=0.6
)
RESTLESS = replace(
    MIXED, crashes=0.8, leader_crashes=3.5, partitions=1.5, resignations=1.0, latency_ms=12
)

PROFILES = {
    "calm": CALM,
    "mixed": MIXED,
    "crashy": CRASHY,
    "split": SPLIT,
    "noisy": NOISY,
    "restless": RESTLESS,
}
"""By name; `swarm`, not listed, picks one by the seed and switches kinds of fault off at random."""


def profile_for(name: str, rng: random.Random) -> Profile:
    """Return the named profile, or for "swarm" one drawn with `rng`."""
    if name != "swarm":
        return PROFILES[name]
    profile = rng.choice([MIXED, CRASHY, SPLIT, NOISY, RESTLESS])
    for kind in ("drop", "duplicate", "delay", "crashes", "partitions", "one_way_cuts", "replays"):
        if rng.random() < 0.2:
            profile = replace(profile, **{kind: 0.0})  # type: ignore[arg-type]
    return profile
