"""Kinds of weather for the simulator: what goes wrong, and how often."""

import random
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True)
class Profile:
    """Shares are of messages or calls; other rates are events in each simulated second."""

    duration_ms: int = 1500
    # network
    drop: float = 0.02
    lose_answer: float = 0.02
    duplicate: float = 0.02
    delay: float = 0.03
    """Share of messages that take up to `long_delay_ms`."""
    long_delay_ms: int = 400
    latency_ms: int = 4
    partitions: float = 0.7
    one_way_cuts: float = 0.4
    slow_links: float = 0.2
    replays: float = 3.0
    false_alarms: float = 0.5
    """Connections reported lost that were not."""
    # processes and time
    crashes: float = 0.8
    leader_crashes: float = 0.5
    pauses: float = 0.3
    drift: int = 30
    """Clocks show up to this much more or less in a thousand milliseconds."""
    resignations: float = 0.1
    takeovers: float = 0.15
    """Share of elections after which acknowledgements are late, other voters take their leader for
    gone, and every leader is asked for reads."""
    # disks
    disk_ms: int = 6
    slow_disk: float = 0.02
    """Share of disk operations that take up to 300 ms."""
    sync_errors: float = 0.1
    full_disks: float = 0.15
    rot: float = 0.2
    wipes: float = 0.12
    disks_return: float = 0.4
    """Share of the wiped nodes that get their old disk back later."""
    bad_starts: float = 0.1
    """Share of starts that are cut short at one of their first disk calls."""
    # membership
    moves: float = 0.1
    """Share of starts at another address than before."""
    voter_changes: float = 0.8
    transfers: float = 0.3
    spare_nodes: int = 2
    """Nodes at most that begin as observers."""
    # load
    clients: int = 3
    think_ms: int = 25
    probes: float = 50.0
    """Moments at which a leader may be asked for a read."""
    offsets_between_snapshots: int = 12
    """0 for no snapshots."""
    backups: float = 0.0
    """Above 0 the log is backed up, to a bucket that fails and goes away."""
    wrong_clocks: float = 0.0
    """Share of each node's time in which its wall clock is up to 400 days off."""
    restores: float = 0.0
    """Above 0 another cluster is restored over this one, which loses sight of the bucket."""
    # the end
    full_for_long: float = 0.05
    """Share of runs in which the disks of a majority, at least, then fill and stay full."""
    majorities_lost: float = 0
    """Share of runs in which the disks of a majority are lost at once after the storm."""
    core_first: float = 0.3
    """Share of runs that first heal a core of the quorum only, with all else broken for good."""

    @property
    def is_noisy(self) -> bool:
        """Whether any message can be harmed."""
        return bool(self.drop or self.lose_answer or self.duplicate or self.delay)


_KEPT = {
    *("duration_ms", "long_delay_ms", "latency_ms", "disk_ms", "clients", "think_ms"),
    *("disks_return", "spare_nodes", "probes", "full_for_long", "core_first", "backups"),
    *("restores", "wrong_clocks"),
    "majorities_lost",
    "offsets_between_snapshots",
}
_SWITCHES = tuple(field.name for field in fields(Profile) if field.name not in _KEPT)
"""Kinds of fault that `swarm` switches off at random, in the order of its draws."""
_NO_FAULTS = [*_SWITCHES, "spare_nodes", "probes", "full_for_long", "core_first"]
CALM = replace(Profile(), **dict.fromkeys(_NO_FAULTS, 0))
MIXED = Profile()
_QUIET_DISKS = replace(MIXED, sync_errors=0, full_disks=0, rot=0, wipes=0)
_STEADY = replace(_QUIET_DISKS, voter_changes=0, transfers=0, spare_nodes=0, moves=0)
PROFILES = {
    "calm": CALM,
    "mixed": MIXED,
    "crashy": replace(
        _QUIET_DISKS,
        crashes=3.0,
        leader_crashes=2.0,
        partitions=0.2,
        one_way_cuts=0.1,
        sync_errors=0.5,
        bad_starts=0.3,
    ),
    "split": replace(_STEADY, crashes=0.1, leader_crashes=0.1, partitions=2.5, one_way_cuts=1.5),
    "noisy": replace(
        _STEADY,
        drop=0.12,
        lose_answer=0.12,
        duplicate=0.15,
        delay=0.15,
        long_delay_ms=900,
        replays=15.0,
        pauses=0.6,
        false_alarms=3.0,
    ),
    "restless": replace(
        MIXED, crashes=0.8, leader_crashes=3.5, partitions=1.5, resignations=1.0, latency_ms=12
    ),
    "rotten": replace(MIXED, rot=2.5, wipes=0.6, crashes=1.5, offsets_between_snapshots=8),
    "full": replace(
        MIXED, full_disks=1.5, crashes=1.0, rot=0, offsets_between_snapshots=8, full_for_long=0.6
    ),
    "reconfig": replace(
        MIXED, voter_changes=6.0, transfers=1.5, spare_nodes=4, leader_crashes=1.0, core_first=0.6
    ),
    "snapshots": replace(
        _STEADY,
        spare_nodes=2,
        crashes=1.5,
        slow_links=1.5,
        partitions=1.2,
        offsets_between_snapshots=3,
        core_first=0.5,
    ),
    # Fast voters: another leader commits before the news of it has reached the one before.
    "takeover": replace(
        _STEADY,
        takeovers=1.0,
        leader_crashes=0.5,
        transfers=1.5,
        resignations=1.0,
        crashes=0.3,
        partitions=0.2,
        one_way_cuts=0.1,
        latency_ms=2,
        disk_ms=3,
        slow_disk=0,
    ),
    "lost": replace(MIXED, majorities_lost=1.0, duration_ms=800, full_for_long=0),
    "backup": replace(
        MIXED, backups=1.0, leader_crashes=1.5, partitions=1.0, offsets_between_snapshots=4
    ),
    # Leaders change often, and with them the clock that stamps the log.
    "clocks": replace(
        MIXED,
        wrong_clocks=0.5,
        backups=1.0,
        leader_crashes=2.0,
        resignations=1.0,
        offsets_between_snapshots=4,
    ),
    # Few crashes: the old cluster is to be alive, and to acknowledge as long as it may.
    "fenced": replace(
        _STEADY,
        restores=1.0,
        pauses=2.0,
        slow_disk=0.1,
        crashes=0.2,
        leader_crashes=0.3,
        partitions=0.3,
        one_way_cuts=0.2,
        transfers=0.5,
    ),
    "liveness": replace(MIXED, core_first=1.0, duration_ms=800, partitions=1.5, one_way_cuts=1.0),
}
"""By name; `swarm`, not listed, picks one but `_APART` by the seed and switches some faults off."""

_APART = ("calm", "backup", "clocks", "fenced", "lost")


def profile_for(name: str, rng: random.Random) -> Profile:
    """Return the named profile, or for "swarm" one drawn with `rng`."""
    if name != "swarm":
        return PROFILES[name]
    profile = PROFILES[rng.choice([known for known in PROFILES if known not in _APART])]
    changes: dict[str, float | int] = {}
    for kind in _SWITCHES:
        drawn = rng.random()
        if drawn < 0.25:
            changes[kind] = 0
        elif drawn < 0.4:
            rate = getattr(profile, kind)
            changes[kind] = rate * 2 if isinstance(rate, int) else min(rate * 3, 0.3 + rate)
    changes["offsets_between_snapshots"] = rng.choice([0, 3, 8, 12, 30])
    changes["think_ms"] = rng.choice([8, 20, 40])
    changes["disk_ms"] = rng.choice([3, 6, 20])
    changes["clients"] = rng.choice([2, 3, 5])
    changes["latency_ms"] = rng.choice([2, 4, 12])
    return replace(profile, **changes)  # type: ignore[arg-type]
