"""The client process of `bench latency`: the same loads at all systems, in short turns.

    python -m scripts.benchmarks.latency_load PLAN

PLAN is a file with a JSON object: `members` (name, kind, endpoint, leader_pid, pids, tls of each),
`rounds` and `seconds` of a turn. All servers run all the time; one of them is under load. Each
round goes through all loads, and each load through all members, in an order that changes from round
to round, so that a machine whose speed wanders is the same to all. Prints a line for every round
and one JSON object at the end: all `turns`, and the latencies over all rounds as `overall`.
"""

import asyncio
import gc
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from scripts.benchmarks.commit_load import committer_of
from scripts.benchmarks.committer import Committer, Load
from scripts.benchmarks.figures import percentile
from streammeta.rpc.tls import TlsFiles

RAMP_SHARE = 0.15
"""Of a turn, at its begin: not counted."""
WARM_UP_S: Mapping[str, float] = {"streammeta": 1.0, "etcd": 2.0, "zookeeper": 4.0}
"""Under many commits before the first round; a Java server is slow until it is warm."""


@dataclass(frozen=True, slots=True)
class Turns:
    """A load: what it is at each kind of system, by the name that `committer_of` knows."""

    name: str
    ranges: int
    in_flight: int
    ways: Mapping[str, str]


_PEERS = {"zookeeper": "zookeeper", "etcd": "etcd"}
_READS = {kind: f"{kind}-reads" for kind in ("streammeta", "zookeeper", "etcd")}
MANY = Turns("pipelined, 1 range, 64 in flight", 1, 64, {"streammeta": "pipelined", **_PEERS})
LOADS = (
    Turns(
        "pipelined, 1 range, alone",
        1,
        1,
        {"streammeta": "pipelined", **_PEERS, "floor": "floor-pipelined"},
    ),
    Turns("unary, 1 range, alone", 1, 1, {"streammeta": "unary", "floor": "floor-unary"}),
    MANY,
    Turns("unary, 1 range, 64 in flight", 1, 64, {"streammeta": "unary"}),
    Turns("pipelined, 100 ranges, 64 in flight", 100, 64, {"streammeta": "pipelined", **_PEERS}),
    Turns("read of 10, alone", 1, 1, _READS),
    Turns("read of 10, 64 in flight", 1, 64, _READS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One cluster."""

    name: str
    kind: str
    endpoint: str
    leader_pid: int
    pids: Sequence[int]
    tls: Sequence[str] = ()
    """Paths of the caller's authority, certificate and key; none: plain text."""

    @property
    def files(self) -> TlsFiles | None:
        """The caller's files for TLS."""
        return TlsFiles(*map(Path, self.tls)) if self.tls else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one turn came to; `p50_ms` and `per_s` without the ramp, CPU with it."""

    round: int
    load: str
    member: str
    per_s: float
    p50_ms: float
    leader_cpu_us: float
    """CPU time of the leader for each request."""
    follower_cpu_us: float
    """Of one follower, on average."""
    client_cpu_us: float


@dataclass(slots=True)
class Seat:
    """A load at a member, ready to go on; its latencies so far."""

    load: Turns
    member: Member
    committer: Committer
    latencies_s: list[float] = field(default_factory=list)

    async def turn(self, number: int, seconds: float) -> Turn:
        """Keep the member under this load for so long."""
        answered: list[tuple[float, float]] = []
        began = time.monotonic()
        ends = began + seconds

        async def slot(index: int) -> None:
            asked = time.monotonic()
            while asked < ends:
                await self.committer.commit(index)
                now = time.monotonic()
                answered.append((now, now - asked))
                asked = now

        cpu_s, client_s = _cpu_s(self.member), time.process_time()
        async with asyncio.TaskGroup() as group:
            for index in range(self.load.in_flight):
                group.create_task(slot(index))
        client_s = time.process_time() - client_s
        leader_s, *others_s = (
            after - before for after, before in zip(_cpu_s(self.member), cpu_s, strict=True)
        )
        counted_from = began + seconds * RAMP_SHARE
        latencies = [took for at, took in answered if counted_from <= at < ends] or [seconds]
        self.latencies_s += latencies
        return Turn(
            round=number,
            load=self.load.name,
            member=self.member.name,
            per_s=round(len(latencies) / (ends - counted_from), 1),
            p50_ms=round(percentile(latencies, 0.5) * 1000, 4),
            leader_cpu_us=round(leader_s * 1e6 / len(answered), 2),
            follower_cpu_us=round(sum(others_s) / max(1, len(others_s)) * 1e6 / len(answered), 2),
            client_cpu_us=round(client_s * 1e6 / len(answered), 2),
        )


def _cpu_s(member: Member) -> list[float]:
    """Return the CPU seconds of each server's process, the leader's first."""
    others = [pid for pid in member.pids if pid != member.leader_pid]
    return [time.clock_gettime(_cpu_clock(pid)) for pid in (member.leader_pid, *others)]


def _cpu_clock(pid: int) -> int:
    """Return Linux's clock of a process's CPU time, to the nanosecond: /proc counts hundredths."""
    return (~pid << 3) | 2


def _objects(load: Turns, seconds: float) -> int:
    """Return how many object ids to prepare beforehand, if so long is spent under `load`."""
    by_load = 1_500 if load.in_flight == 1 else 25_000 if load.ranges == 1 else 8_000
    return int(by_load * (seconds + 2.0)) + load.in_flight


async def _open(members: Sequence[Member], seconds: float) -> list[Seat]:
    seats: list[Seat] = []
    for load in LOADS:
        for member in members:
            if (way := load.ways.get(member.kind)) is None:
                continue
            wanted = Load(
                endpoint=member.endpoint,
                ranges=load.ranges,
                in_flight=load.in_flight,
                objects=_objects(load, seconds),
                tls=member.files,
            )
            committer = committer_of(way, wanted)
            await committer.open()
            seats.append(Seat(load, member, committer))
    return seats


def in_order(seats: Sequence[Seat], number: int) -> Iterator[Seat]:
    """Yield all seats by load; each round begins with another member, every other one backwards."""
    for load in LOADS:
        same = [seat for seat in seats if seat.load is load]
        at = number // 2 % len(same) if same else 0
        same = same[at:] + same[:at]
        yield from same if number % 2 == 0 else reversed(same)


async def run(members: Sequence[Member], rounds: int, seconds: float) -> dict[str, Any]:
    """Go through all rounds; return what they came to."""
    seats = await _open(members, rounds * seconds)
    for seat in seats:
        if seat.load is MANY:
            await seat.turn(-1, WARM_UP_S[seat.member.kind])
        else:
            await seat.turn(-1, min(seconds, 0.3))
        seat.latencies_s.clear()
    turns: list[Turn] = []
    for number in range(rounds):
        print(f"ready round {number + 1} of {rounds}", flush=True)
        turns += [await seat.turn(number, seconds) for seat in in_order(seats, number)]
    for seat in seats:
        await seat.committer.close()
    return {
        "turns": [asdict(turn) for turn in turns],
        "overall": [
            {
                "load": seat.load.name,
                "member": seat.member.name,
                "requests": len(seat.latencies_s),
                "p50_ms": round(percentile(seat.latencies_s, 0.5) * 1000, 4),
                "p99_ms": round(percentile(seat.latencies_s, 0.99) * 1000, 4),
            }
            for seat in seats
        ],
    }


def main() -> None:
    """Run the plan named on the command line and print what it came to."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    members = [Member(**member) for member in plan["members"]]
    # The collector's pauses are no latencies of a server, and a run is short.
    gc.disable()
    print(json.dumps(uvloop.run(run(members, plan["rounds"], plan["seconds"]))), flush=True)


if __name__ == "__main__":
    main()
