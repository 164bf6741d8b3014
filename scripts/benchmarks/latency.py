"""One commit and many, and reads, on streammeta and its peers, in short turns of one run.

Three voters of every system run all the time, and one client process (`take_turns`) turns from one
to the next every half second. Each round goes through all loads, and each load through all members,
in an order that changes from round to round, so that a machine whose speed varies treats all alike.
Ratios are taken within a round, and the figure is the median of the rounds. With a baseline its
controllers take their turns too, under this tree's client. The `floor` is a program of the same
shape without any work: the part of a lone commit that is not the product's.
"""

import asyncio
import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from scripts.benchmarks.baseline import THIS, command_in
from scripts.benchmarks.cluster import VOTERS
from scripts.benchmarks.committer import Committer, Load, committer_of
from scripts.benchmarks.figures import (
    Bound,
    Outcome,
    Progress,
    Table,
    Target,
    latencies,
    median,
    percentile,
)
from scripts.benchmarks.floor import follow, lead
from scripts.benchmarks.options import option
from scripts.benchmarks.peers.servers import missing, missing_table, running_peer
from scripts.benchmarks.processes import command_of, read_result, wait_ready, working
from streammeta.cli.local.local_cluster import Child, start_child
from streammeta.cli.main import GRPC_SETTINGS

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
LOADS = (
    Turns("pipelined, 1 range, alone", 1, 1, {**_PIPELINED, "floor": "floor-pipelined"}),
    Turns("unary, 1 range, alone", 1, 1, {**_UNARY, "floor": "floor-unary"}),
    Turns("pipelined, 1 range, 64 in flight", 1, 64, _PIPELINED),
    Turns("unary, 1 range, 64 in flight", 1, 64, _UNARY),
    Turns("pipelined, 100 ranges, 64 in flight", 100, 64, _PIPELINED),
    Turns("read of 10, alone", 1, 1, _READS),
    Turns("read of 10, 64 in flight", 1, 64, _READS),
)
ALONE, UNARY_ALONE, MANY, UNARY, HUNDRED, READ, READS = (load.name for load in LOADS)


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
        is_long = seat.load.name == MANY
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


OURS = "streammeta"
OVER_TLS = "streammeta over TLS"
AUDITED = "streammeta audited"
FLOOR = "floor"
_SYSTEMS = (OURS, "zookeeper", "etcd", FLOOR)

PEERS_LOAD = {UNARY_ALONE: ALONE, UNARY: MANY}
"""The peers' load that is compared with a load of ours, where it is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Systems to measure, and turns."""

    systems: tuple[str, ...] = option(_SYSTEMS, "systems", choices=_SYSTEMS)
    seconds: float = option(0.5, "seconds of each turn", least=0.1, most=60)
    rounds: int = option(8, "turns of each system under each load")
    tls: bool = option(False, "measure streammeta over TLS too")
    audit: bool = option(False, "measure streammeta with an audit log too")


@dataclass(frozen=True, slots=True, eq=False)
class Figure:
    """A row of the table: a quantity of a load, and its bounds."""

    load: str
    quantity: Literal["p50_ms", "per_s", "leader_cpu_us"]
    bound: Bound = "at most"
    wanted: Mapping[str, float] | None = None
    """By peer the wanted multiple of the peer's figure, and by `OURS` the wanted figure itself."""

    @property
    def name(self) -> str:
        """Name of the figure."""
        units = {"p50_ms": "p50 ms", "per_s": "per s", "leader_cpu_us": "leader's CPU us"}
        return f"{self.load}: {units[self.quantity]}"


FIGURES = (
    Figure(ALONE, "p50_ms", wanted={"etcd": 1.3, "zookeeper": 1.5}),
    Figure(UNARY_ALONE, "p50_ms", wanted={"etcd": 1.3, "zookeeper": 1.5}),
    Figure(UNARY, "per_s", "at least", {"etcd": 0.7}),
    Figure(MANY, "per_s", "at least", {"zookeeper": 3.5, "etcd": 6}),
    Figure(HUNDRED, "per_s", "at least", {"zookeeper": 6}),
    Figure(READ, "p50_ms", wanted={OURS: 1.0}),
    Figure(READS, "per_s", "at least", {OURS: 3_000}),
    *(Figure(load, "leader_cpu_us") for load in (ALONE, UNARY_ALONE, UNARY, MANY, HUNDRED, READS)),
)

Values = Mapping[tuple[Figure, str], Sequence[float]]
"""Values of all rounds, by figure and member."""


async def measure_trees(
    root: Path, trees: Mapping[str, Path], settings: Settings, progress: Progress
) -> Outcome:
    """Measure every system that is installed. `trees` are this one and perhaps a baseline."""
    left_out: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        members: list[Member] = []
        for system in settings.systems:
            if system not in (OURS, FLOOR) and (package := missing(system)):
                left_out[system] = package
                continue
            progress(f"latency: {system}, starting")
            if system == OURS:
                members += [
                    await _serve(stack, root / name, name, tree, *kind)
                    for name, tree, kind in _own_clusters(trees, settings)
                ]
            elif system == FLOOR:
                members.append(await serve_floor(stack, root / FLOOR))
            else:
                members.append(await _serve_peer(stack, root / system, system))

        log = root / "client.log"
        turns = {"rounds": settings.rounds, "seconds": settings.seconds}
        known = [asdict(member) for member in members]
        progress("latency: warming up")
        async with working(log, take_turns, members=known, **turns) as client:
            for _ in range(settings.rounds):
                progress(f"latency: {await wait_ready(client)}")
            measured = await read_result(client)
    return outcome(settings, [member.name for member in members], measured, left_out)


def _own_clusters(
    trees: Mapping[str, Path], settings: Settings
) -> Iterator[tuple[str, Path, Sequence[str]]]:
    """Yield our clusters: name, tree, and the kind for `serve_cluster` if it is a special one."""
    for name, tree in trees.items():
        yield OURS if name == THIS else name, tree, ()
    if settings.tls:
        yield OVER_TLS, trees[THIS], ("tls",)
    if settings.audit:
        yield AUDITED, trees[THIS], ("audited",)


async def _serve(
    stack: contextlib.ExitStack, place: Path, name: str, tree: Path, *kind: str
) -> Member:
    command = command_in(tree, "scripts.benchmarks.serve_cluster", sys.executable)
    words = (str(place).replace(" ", "-"), str(VOTERS), *kind)
    child = start_child(f"controllers of {name}", [*command, *words], _log(place, "serving"))
    stack.callback(child.stop, 30.0)
    return Member(name=name, kind=OURS, **json.loads(await wait_ready(child)))


async def _serve_peer(stack: contextlib.ExitStack, place: Path, system: str) -> Member:
    cluster = stack.enter_context(running_peer(system, place, VOTERS))
    leader = await cluster.find_leader()
    return Member(
        name=system,
        kind=system,
        endpoint=cluster.endpoints[leader],
        leader_pid=cluster.children[leader].pid,
        pids=[child.pid for child in cluster.children.values()],
    )


async def serve_floor(stack: contextlib.ExitStack, place: Path) -> Member:
    """Start the three processes of the floor. They end with `stack`."""
    followers = [await _start_floor(stack, place, n, follow) for n in range(2, VOTERS + 1)]
    ports = [port for _, port in followers]
    leader, port = await _start_floor(stack, place, 1, lead, ports=ports)
    return Member(
        name=FLOOR,
        kind=FLOOR,
        endpoint=f"127.0.0.1:{port}",
        leader_pid=leader.pid,
        pids=[leader.pid, *(follower.pid for follower, _ in followers)],
    )


async def _start_floor(
    stack: contextlib.ExitStack, place: Path, number: int, role: Callable[..., Any], **more: Any
) -> tuple[Child, int]:
    command = command_of(role, log=place.with_name(f"{place.name}-{number}.data"), **more)
    child = start_child(f"floor {number}", command, _log(place, str(number)), GRPC_SETTINGS)
    stack.callback(child.stop)
    return child, int(await wait_ready(child))


def _log(place: Path, name: str) -> Path:
    return place.with_name(f"{place.name}-{name}.log")


def outcome(
    settings: Settings,
    names: Sequence[str],
    measured: Mapping[str, Any],
    left_out: Mapping[str, str],
) -> Outcome:
    """Return figures, tables and targets from the client's report."""
    by_turn = {(turn["member"], turn["load"], turn["round"]): turn for turn in measured["turns"]}
    found = {
        (figure, name): values
        for figure in FIGURES
        for name in names
        if (values := _values(by_turn, figure, name, settings.rounds))
    }
    ratios = {
        (figure, name): [ours / theirs for ours, theirs in zip(own, values, strict=True)]
        for (figure, name), values in found.items()
        if name != OURS and (own := found.get((figure, OURS)))
    }
    figures = {f"{name} {figure.name}": median(values) for (figure, name), values in found.items()}
    figures |= {
        f"{figure.name} / {name}": round(median(values), 4)
        for (figure, name), values in ratios.items()
    }
    tables = [_figures_table(found, ratios, names), _latencies_table(measured["overall"], names)]

    return Outcome(
        benchmark="latency",
        figures=figures,
        details={**measured, "left_out": dict(left_out)},
        tables=[*tables, *missing_table(left_out)],
        targets=list(_tls_targets(found)),
    )


def _values(
    by_turn: Mapping[tuple[str, str, int], Mapping[str, Any]],
    figure: Figure,
    name: str,
    rounds: int,
) -> list[float]:
    """Return a figure of each round for a member, or none if the member has no such load."""
    for load in (figure.load, PEERS_LOAD.get(figure.load, figure.load)):
        turns = [by_turn.get((name, load, number)) for number in range(rounds)]
        if None not in turns:
            return [turn[figure.quantity] for turn in turns if turn is not None]
    return []


def _figures_table(found: Values, ratios: Values, names: Sequence[str]) -> Table:
    others = [name for name in names if name != OURS]
    rows: list[tuple[object, ...]] = []
    for figure in FIGURES:
        if (figure, OURS) not in found:
            continue
        cells = [
            _number(median(found[figure, name])) if (figure, name) in found else ""
            for name in names
        ]
        compared = [
            _ratio(ratios[figure, name]) if (figure, name) in ratios else "" for name in others
        ]
        verdicts = [
            f"{'' if name == OURS else f'{name} '}{target.bound} {target.wanted:,g}: "
            f"{'met' if target.is_met else 'missed'}"
            for name, target in _targets(figure, found, ratios)
        ]
        rows.append((figure.name, *cells, *compared, "; ".join(verdicts)))

    return Table(
        title="Medians of all rounds; ratios are ours to theirs within a round, median "
        "(least to most). At peers every commit is a separate call",
        columns=("figure", *names, *(f"/ {name}" for name in others), "target"),
        rows=tuple(rows),
    )


def _targets(figure: Figure, found: Values, ratios: Values) -> Iterator[tuple[str, Target]]:
    for name, wanted in (figure.wanted or {}).items():
        values = found.get((figure, OURS)) if name == OURS else ratios.get((figure, name))
        if values:
            yield name, Target(figure.name, figure.bound, wanted, median(values))


def _tls_targets(found: Values) -> Iterator[Target]:
    """Yield the cost of TLS, from values within a round."""
    by_name = {(at.load, at.quantity, name): values for (at, name), values in found.items()}

    def pairs(load: str, quantity: Literal["p50_ms", "per_s"]) -> list[tuple[float, float]]:
        plain, tls = (by_name.get((load, quantity, name), ()) for name in (OURS, OVER_TLS))
        return list(zip(plain, tls, strict=False))

    for load in (ALONE, UNARY_ALONE):
        if alone := [tls - plain for plain, tls in pairs(load, "p50_ms")]:
            yield Target(f"{load}: p50 ms more over TLS", "at most", 0.5, median(alone))
    if many := [tls / plain for plain, tls in pairs(MANY, "per_s")]:
        yield Target(f"{MANY}: per s over TLS / in plain text", "at least", 0.9, median(many))


def _latencies_table(overall: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Table:
    cells = {
        (seat["load"], seat["member"]): f"{seat['p50_ms']:.2f}, {seat['p99_ms']:.1f}"
        for seat in overall
    }
    rows = tuple(
        (load.name, *(cells.get((load.name, name), "") for name in names)) for load in LOADS
    )
    title = "Latency over all rounds: p50, p99 ms"
    return Table(title=title, columns=("load", *names), rows=rows)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
