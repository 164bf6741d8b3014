"""Faults: what can happen, when it happens in a run (drawn from the seed), and making it happen.

The schedule is a value that depends on nothing but the seed and the size of the cluster. Who leads
is known only when a fault begins, so a fault may name "the leader" as its target. Two faults may
overlap; when all have ended, `Nemesis.recover` makes good what is left.
"""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tests.chaos.chaos_cluster import ChaosCluster
from tests.chaos.fault_proxy import Behaviour, Cut, FaultNetwork, Mode

LEADER = 0
"""Stands for the leader when the fault begins."""


class Kind(StrEnum):
    """What can happen."""

    KILL = "kill"
    """kill -9 of some controllers, started again later."""
    TERMINATE = "terminate"
    """SIGTERM of one, started again later."""
    PAUSE = "pause"
    """SIGSTOP, SIGCONT later."""
    ISOLATE = "isolate"
    """No byte to or from some controllers, clients not included."""
    MUTE = "mute"
    """Nothing that one controller sends to the others arrives."""
    DEAFEN = "deafen"
    """Nothing that the others send arrives at one controller."""
    BRIDGE = "bridge"
    """Two controllers can't reach each other, all others can reach both."""
    RESET = "reset"
    """Every connection between controllers and with clients of one controller is reset."""
    SLOW = "slow"
    """All links of one controller are late and narrow."""
    FULL_DISK = "full disk"
    """Writes to one controller's log fail."""
    TRANSFER = "transfer"
    """The leader is asked to hand over, to any other; of no duration."""
    LOSE_DISK = "lose disk"
    """A controller is killed and its disk wiped; one with a new disk takes its place."""
    UNANSWERED = "unanswered"
    """Clients' requests reach one controller, its answers to them are lost."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: seconds after the start of the run, its targets, and its duration."""

    at_s: float
    kind: Kind
    targets: tuple[int, ...]
    duration_s: float
    holds: bool = False
    """Of a cut: bytes are held back and arrive late, rather than lost with their connection."""
    overlaps: bool = False
    """It begins while the one before goes on, and waits for nothing."""

    def __str__(self) -> str:
        who = ", ".join("leader" if node == LEADER else str(node) for node in self.targets)
        late = " (late)" if self.holds else ""
        return f"{self.at_s:5.1f} s: {self.kind}{late} {who} for {self.duration_s:.1f} s"


_ODDS = {
    Kind.KILL: (6, 0.0, 1.5),
    Kind.TERMINATE: (2, 0.0, 1.0),
    Kind.PAUSE: (4, 0.3, 2.5),
    Kind.ISOLATE: (4, 0.5, 2.5),
    Kind.MUTE: (2, 0.5, 2.5),
    Kind.DEAFEN: (2, 0.5, 2.5),
    Kind.BRIDGE: (2, 0.5, 2.5),
    Kind.RESET: (2, 0.1, 1.0),
    Kind.SLOW: (2, 0.5, 2.5),
    Kind.FULL_DISK: (2, 0.5, 2.5),
    Kind.TRANSFER: (2, 0.0, 0.0),
    Kind.LOSE_DISK: (2, 0.0, 1.0),
    Kind.UNANSWERED: (1, 0.3, 1.5),
}
"""Weight of a kind in the draw, and bounds of its duration in seconds."""
_LEADER_SHARE = 0.6
_ALL_SHARE = 0.1
_SEVERAL_SHARE = 0.2
_OVERLAPPING_SHARE = 0.25
_RECOVERY_S = 5.0
_ROOM_BYTES = 500
_GAP_S = (0.1, 1.3)


def make_schedule(seed: int, members: Sequence[int], seconds: float) -> tuple[Fault, ...]:
    """Return the faults of a run of `seconds` seconds; equal arguments give equal schedules."""
    rng = random.Random(f"schedule {seed}")
    kinds = list(_ODDS)
    weights = [weight for weight, _, _ in _ODDS.values()]
    faults: list[Fault] = []
    overlaps = False
    at_s = rng.uniform(*_GAP_S)
    while at_s < seconds:
        (kind,) = rng.choices(kinds, weights)
        _, shortest_s, longest_s = _ODDS[kind]
        fault = Fault(
            round(at_s, 2),
            kind,
            _draw_targets(rng, kind, members),
            round(rng.uniform(shortest_s, longest_s), 2),
            holds=rng.random() < 0.4,
            overlaps=overlaps,
        )
        faults.append(fault)
        overlaps = rng.random() < _OVERLAPPING_SHARE
        at_s += fault.duration_s * (0.3 if overlaps else 1.0) + rng.uniform(*_GAP_S)
    return tuple(faults)


def _draw_targets(rng: random.Random, kind: Kind, members: Sequence[int]) -> tuple[int, ...]:
    if kind is Kind.BRIDGE:
        return (LEADER, rng.choice(list(members)))
    if kind in (Kind.KILL, Kind.PAUSE, Kind.ISOLATE):
        chance = rng.random()
        if chance < _ALL_SHARE and kind is Kind.KILL:
            return tuple(members)
        if chance < _SEVERAL_SHARE:
            several = rng.randint(2, (len(members) + 1) // 2)
            return tuple(sorted(rng.sample(list(members), several)))
    if rng.random() < _LEADER_SHARE:
        return (LEADER,)
    return (rng.choice(list(members)),)


@dataclass(slots=True)
class Nemesis:
    """Carries out a schedule on a cluster and counts what it did."""

    cluster: ChaosCluster
    find_leader: Callable[[], int | None]
    """The leader as far as it is known; asked for when a fault names the leader."""
    transfer: Callable[[int], Awaitable[None]]
    """Asks a controller to hand over leadership; it may refuse."""
    replace: Callable[[int, str], Awaitable[None]]
    """Has a controller vote with the disk of this id instead of the one it had."""
    counts: Counter[str] = field(default_factory=Counter)
    done: list[str] = field(default_factory=list)
    """What was really done, with the time since the start."""
    _started: float = 0.0
    _last_leader: int = 1
    _replacing: asyncio.Task[None] | None = None
    _running: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, schedule: Iterable[Fault], patience_s: float) -> None:
        """Begin every fault at its time; return when the last one has ended.

        A fault that is to meet a working cluster waits for one, for a while; those after it come
        as much later. Once that adds up to `patience_s` seconds the rest is left out.
        """
        self._started = time.monotonic()
        late_s = 0.0
        for fault in schedule:
            begins = self._started + fault.at_s + late_s
            await asyncio.sleep(max(0.0, begins - time.monotonic()))
            if not fault.overlaps:
                late_s += await self._wait_until_well()
                if late_s > patience_s:
                    break
            for finished in [task for task in self._running if task.done()]:
                self._running.discard(finished)
                finished.result()
            self._running.add(asyncio.create_task(self._inflict(fault)))
        await asyncio.gather(*self._running)
        self._running.clear()

    async def _wait_until_well(self) -> float:
        """Wait until a majority has a leader, but not for long; return the seconds it took."""
        began = time.monotonic()
        while time.monotonic() < began + _RECOVERY_S:
            if self.find_leader() is not None and self._has_majority():
                break
            await asyncio.sleep(0.05)
        return time.monotonic() - began

    def _has_majority(self) -> bool:
        return 2 * len(self.cluster.running) > len(self.cluster.members)

    async def recover(self) -> None:
        """Heal the cluster, and see the replacement of a lost disk through to its end."""
        await self.cluster.heal()
        if self._replacing is not None:
            await self._replacing

    async def close(self) -> None:
        tasks = [*self._running, *filter(None, [self._replacing])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _inflict(self, fault: Fault) -> None:
        targets = self._resolve(fault)
        self._log(f"{fault.kind} {targets} begins" + (" (late)" if fault.holds else ""))
        match fault.kind:
            case Kind.KILL | Kind.TERMINATE | Kind.PAUSE:
                await self._hit_processes(fault, targets)
            case Kind.LOSE_DISK:
                await self._lose_disk(fault, targets[0])
            case Kind.FULL_DISK:
                await self._fill_disks(fault, targets)
            case Kind.TRANSFER:
                self.counts[fault.kind] += 1
                await self.transfer(targets[0])
            case _:
                await self._hit_network(fault, targets)
        self._log(f"{fault.kind} {targets} ended")

    def _resolve(self, fault: Fault) -> tuple[int, ...]:
        """Put a number in place of "the leader": who leads, or else who led last."""
        self._last_leader = leader = self.find_leader() or self._last_leader
        targets = [leader if node == LEADER else node for node in fault.targets]
        if fault.kind is Kind.BRIDGE and len(set(targets)) == 1:
            targets[1] = next(node for node in self.cluster.members if node != leader)
        return tuple(targets)

    async def _hit_processes(self, fault: Fault, targets: Sequence[int]) -> None:
        """Kill, end or pause those that run, unless most of the cluster is down already.

        Starts take long on a slow machine; a cluster that never serves would test little.
        """
        hit = [node for node in targets if node in self.cluster.running]
        if not hit or not self._has_majority():
            self.counts["skipped"] += 1
            return
        self.counts[fault.kind] += 1
        if fault.kind is Kind.PAUSE:
            for node in hit:
                self.cluster.pause(node)
        else:
            end = self.cluster.kill if fault.kind is Kind.KILL else self.cluster.terminate
            await asyncio.gather(*(end(node) for node in hit))
        await asyncio.sleep(fault.duration_s)
        if fault.kind is Kind.PAUSE:
            for node in hit:
                self.cluster.resume(node)
        else:
            await asyncio.gather(*(self.cluster.start_node(node) for node in hit))

    async def _lose_disk(self, fault: Fault, target: int) -> None:
        """Lose a disk, unless the last one lost is not made good yet; what follows takes its time.

        With two disks lost at a time, what only they held would be gone by right.
        """
        is_busy = self._replacing is not None and not self._replacing.done()
        if is_busy or target not in self.cluster.running:
            self.counts["skipped"] += 1
            return
        self.counts[fault.kind] += 1
        self.cluster.without_disk.add(target)
        self._replacing = asyncio.create_task(self._replace(target, fault.duration_s))
        await asyncio.sleep(fault.duration_s)

    async def _replace(self, target: int, down_s: float) -> None:
        await self.cluster.kill(target)
        self.cluster.wipe(target)
        await asyncio.sleep(down_s)
        await self.replace(target, await self.cluster.join(target))
        self._log(f"controller {target} votes with its new disk")

    async def _fill_disks(self, fault: Fault, targets: Sequence[int]) -> None:
        hit = [node for node in targets if node in self.cluster.running]
        if not hit:
            self.counts["skipped"] += 1
            return
        self.counts[fault.kind] += 1
        for node in hit:
            self.cluster.fill_disk(node, _ROOM_BYTES)
        await asyncio.sleep(fault.duration_s)
        for node in hit:
            self.cluster.free_disk(node)

    async def _hit_network(self, fault: Fault, targets: Sequence[int]) -> None:
        self.counts[fault.kind] += 1
        cut = Cut(frozenset(_pairs(fault.kind, targets, self.cluster.members)), _behaviour(fault))
        self.cluster.network.cut(cut)
        try:
            await asyncio.sleep(fault.duration_s)
        finally:
            self.cluster.network.heal(cut)

    def _log(self, text: str) -> None:
        self.done.append(f"{time.monotonic() - self._started:6.2f} s: {text}")


def _behaviour(fault: Fault) -> Behaviour:
    match fault.kind:
        case Kind.RESET:
            return Behaviour(Mode.RESET)
        case Kind.SLOW:
            return Behaviour(Mode.SLOW, delay_s=0.05, bytes_per_s=200_000)
    return Behaviour(Mode.HOLD if fault.holds else Mode.DROP)


def _pairs(kind: Kind, targets: Sequence[int], members: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Which (sender, receiver) pairs a fault of the network concerns."""
    others = [node for node in members if node not in targets]
    out = list(itertools.product(targets, others))
    back = [(receiver, sender) for sender, receiver in out]
    answers = [(node, FaultNetwork.CLIENTS) for node in targets]
    match kind:
        case Kind.ISOLATE:
            return out + back
        case Kind.MUTE:
            return out
        case Kind.DEAFEN:
            return back
        case Kind.BRIDGE:
            one, other = targets
            return [(one, other), (other, one)]
        case Kind.UNANSWERED:
            return answers
    return out + back + answers + [(client, node) for node, client in answers]
