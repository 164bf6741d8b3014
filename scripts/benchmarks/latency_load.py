"""Client process of `bench latency`: the same loads on all systems, in short turns.

All servers run all the time, and one of them is under load. Each round goes through all loads, and
each load through all members, in an order that changes from round to round, so that a machine whose
speed varies treats all alike.
"""

import asyncio
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from scripts.benchmarks.commit_load import committer_of
from scripts.benchmarks.committer import Committer, Load
from scripts.benchmarks.figures import latencies, percentile

RAMP_SHARE = 0.15
"""Share of a turn, at its beginning, that does not count."""
WARM_UP_S: Mapping[str, float] = {"streammeta": 1.0, "etcd": 2.0, "zookeeper": 4.0}
"""Warm-up under many commits before the first round. A Java server is slow until it is warm."""


@dataclass(frozen=True, slots=True)
class Turns:
    """A load, with the name of its committer for each kind of system."""

    name: str
    ranges: int
    in_flight: int
    ways: Mapping[str, str]


_PEERS = {"zookeeper": "zookeeper", "etcd": "etcd"}
_PIPELINED = {"streammeta": "pipelined", **_PEERS}
_READS = {kind: f"{kind}-reads" for kind in ("streammeta", "zookeeper", "etcd")}
_UNARY = {"streammeta": "unary"}
MANY = Turns("pipelined, 1 range, 64 in flight", 1, 64, _PIPELINED)
LOADS = (
    Turns("pipelined, 1 range, alone", 1, 1, {**_PIPELINED, "floor": "floor-pipelined"}),
    Turns("unary, 1 range, alone", 1, 1, {**_UNARY, "floor": "floor-unary"}),
    MANY,
    Turns("unary, 1 range, 64 in flight", 1, 64, _UNARY),
    Turns("pipelined, 100 ranges, 64 in flight", 100, 64, _PIPELINED),
    Turns("read of 10, alone", 1, 1, _READS),
    Turns("read of 10, 64 in flight", 1, 64, _READS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One cluster. `tls` are the paths of the caller's files, none for plain text."""

    name: str
    kind: str
    endpoint: str
    leader_pid: int
    pids: Sequence[int]
    tls: Sequence[str] = ()


Turn: TypeAlias = Mapping[str, Any]
"""Figures of one turn. `p50_ms` and `per_s` exclude the ramp, while CPU times, which are for each
request, include it. `follower_cpu_us` is the mean of the followers."""


@dataclass(slots=True)
class Seat:
    """A load on a member, connected, with its latencies so far."""

    load: Turns
    member: Member
    committer: Committer
    latencies_s: list[float] = field(default_factory=list)

    async def turn(self, number: int, seconds: float) -> Turn:
        """Keep the member under this load for so long."""
        answered: list[tuple[float, float]] = []
        began = time.monotonic()
        ends = began + seconds

        async def commit_on(slot: int) -> None:
            asked = time.monotonic()
            while asked < ends:
                await self.committer.commit(slot)
                now = time.monotonic()
                answered.append((now, now - asked))
                asked = now

        before_s, client_s = _cpu_s(self.member), time.process_time()
        async with asyncio.TaskGroup() as group:
            for slot in range(self.load.in_flight):
                group.create_task(commit_on(slot))
        client_s = time.process_time() - client_s
        leader_s, *others_s = (
            now - then for now, then in zip(_cpu_s(self.member), before_s, strict=True)
        )

        # The first answers of a turn find cold caches after the other members' turns.
        counted_from = began + seconds * RAMP_SHARE
        counted = [took for at, took in answered if counted_from <= at < ends] or [seconds]
        self.latencies_s += counted
        follower_s = sum(others_s) / max(1, len(others_s))
        return {
            "round": number,
            "load": self.load.name,
            "member": self.member.name,
            "per_s": round(len(counted) / (ends - counted_from), 1),
            "p50_ms": round(percentile(counted, 0.5) * 1000, 4),
            "leader_cpu_us": round(leader_s * 1e6 / len(answered), 2),
            "follower_cpu_us": round(follower_s * 1e6 / len(answered), 2),
            "client_cpu_us": round(client_s * 1e6 / len(answered), 2),
        }


def _cpu_s(member: Member) -> list[float]:
    """Return the CPU seconds of each server's process, the leader's first."""
    others = [pid for pid in member.pids if pid != member.leader_pid]
    # Linux's clock of a process's CPU time has nanoseconds, while /proc counts hundredths.
    return [time.clock_gettime((~pid << 3) | 2) for pid in (member.leader_pid, *others)]


async def _open_seats(members: Sequence[Member], seconds: float) -> list[Seat]:
    seats: list[Seat] = []
    for load in LOADS:
        for member in members:
            # Peers have no pipeline, and the floor has no ranges.
            if (way := load.ways.get(member.kind)) is None:
                continue
            ids_a_second = 1_500 if load.in_flight == 1 else 25_000 if load.ranges == 1 else 8_000
            wanted = Load(
                endpoint=member.endpoint,
                ranges=load.ranges,
                in_flight=load.in_flight,
                objects=int(ids_a_second * (seconds + 2.0)) + load.in_flight,
                tls=member.tls,
            )
            committer = committer_of(way, wanted)
            await committer.open()
            seats.append(Seat(load, member, committer))
    return seats


def in_order(seats: Sequence[Seat], number: int) -> Iterator[Seat]:
    """Yield all seats by load. Each round begins with another member, every second one reversed."""
    for load in LOADS:
        same = [seat for seat in seats if seat.load is load]
        at = number // 2 % len(same) if same else 0
        same = same[at:] + same[:at]
        yield from same if number % 2 == 0 else reversed(same)


async def take_turns(
    *, members: Sequence[Mapping[str, Any]], rounds: int, seconds: float
) -> dict[str, Any]:
    """Go through all rounds and return all `turns`, and the `overall` latencies.

    `members` are the fields of `Member`. Prints a ready line for every round.
    """
    # The collector's pauses are no latencies of a server, and a run is short.
    gc.disable()
    seats = await _open_seats([Member(**member) for member in members], rounds * seconds)
    for seat in seats:
        is_long = seat.load is MANY
        await seat.turn(-1, WARM_UP_S[seat.member.kind] if is_long else min(seconds, 0.3))
        seat.latencies_s.clear()

    turns: list[Turn] = []
    for number in range(rounds):
        print(f"ready round {number + 1} of {rounds}", flush=True)
        turns += [await seat.turn(number, seconds) for seat in in_order(seats, number)]
    for seat in seats:
        await seat.committer.close()
    overall = [
        {
            "load": seat.load.name,
            "member": seat.member.name,
            "requests": len(seat.latencies_s),
            **latencies(seat.latencies_s, digits=4),
        }
        for seat in seats
    ]
    return {"turns": turns, "overall": overall}
