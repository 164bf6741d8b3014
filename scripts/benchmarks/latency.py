"""One commit and many, and reads: streammeta beside its peers, in short turns of one run.

Three voters of every system run all the time, and one client process (`latency_load`) turns from
one to the next every half second, so that a machine that grows slower does so for all. What counts
are ratios: each is taken within a round, and the median of the rounds is the figure. With another
commit as baseline its controllers take their turns too, under this tree's client. The `floor` is a
program of the same shape that does no work: what is left of a lone commit without ours.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from scripts.benchmarks import latency_load
from scripts.benchmarks.baseline import THIS, module_of
from scripts.benchmarks.figures import Outcome, Table, Target, median, targets_table
from scripts.benchmarks.latency_load import Member
from scripts.benchmarks.peers.servers import missing, running_peer
from streammeta.cli.local_cluster import Child, ChildFailedError, start_child
from streammeta.cli.main import GRPC_SETTINGS

OURS = "streammeta"
OVER_TLS = "streammeta over TLS"
AUDITED = "streammeta audited"
FLOOR = "floor"
VOTERS = 3
TURN_S_DEFAULT = 0.5
ROUNDS_DEFAULT = 8

ALONE, UNARY_ALONE, MANY, UNARY, HUNDRED, READ, READS = (load.name for load in latency_load.LOADS)
PEERS_LOAD = {UNARY_ALONE: ALONE, UNARY: MANY}
"""The load of the peers that a load of ours is compared with, where it is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure."""

    systems: Sequence[str] = (OURS, "zookeeper", "etcd", FLOOR)
    seconds: float = TURN_S_DEFAULT
    """Of one turn."""
    rounds: int = ROUNDS_DEFAULT
    tls: bool = False
    """Measure our own over TLS too."""
    audit: bool = False
    """Measure our own with an audit log too."""


@dataclass(frozen=True, slots=True, eq=False)
class Figure:
    """A row of the table: a quantity of a load, and what is wanted of it."""

    load: str
    quantity: Literal["p50_ms", "per_s", "leader_cpu_us"]
    bound: Literal["at most", "at least"] = "at most"
    wanted: Mapping[str, float] | None = None
    """By the peer that the figure is a multiple of; our own under `OURS`."""

    @property
    def name(self) -> str:
        """How the figure is called."""
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


async def measure(
    root: Path, trees: Mapping[str, Path], settings: Settings, progress: Callable[[str], None]
) -> Outcome:
    """Measure every system that is installed; `trees` are this one and perhaps a baseline.

    Raises:
        PeerError: a peer did not start.
        ChildFailedError: a server or the client ended early.
    """
    left_out: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        members: list[Member] = []
        for system in settings.systems:
            if system == OURS:
                for name, tree in trees.items():
                    progress(f"latency: {name}, starting")
                    shown = OURS if name == THIS else name
                    members.append(await serve(stack, root / shown, shown, module_of_serving(tree)))
                for name, kind in _variants(settings):
                    progress(f"latency: {name}, starting")
                    command = module_of_serving(trees[THIS])
                    members.append(await serve(stack, root / kind, name, command, kind))
            elif system == FLOOR:
                members.append(await serve_floor(stack, root / FLOOR))
            elif package := missing(system):
                left_out[system] = package
            else:
                progress(f"latency: {system}, starting")
                members.append(await _serve_peer(stack, root / system, system))
        measured = await drive(stack, root, members, settings, progress)
    return outcome(settings, [member.name for member in members], measured, left_out)


def _variants(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield our own other clusters: name, and kind for `serve`."""
    if settings.tls:
        yield OVER_TLS, "tls"
    if settings.audit:
        yield AUDITED, "audited"


def module_of_serving(tree: Path, python: str = sys.executable) -> list[str]:
    """Return the words that run the controllers of a tree."""
    return module_of(tree, "scripts.benchmarks.serve_cluster", python)


async def serve(
    stack: contextlib.ExitStack, place: Path, name: str, command: Sequence[str], *kind: str
) -> Member:
    """Start three controllers, of `kind` "tls" or "audited" if given; they end with `stack`."""
    child = start_child(
        f"controllers of {name}", [*command, str(place), str(VOTERS), *kind], _log(place, "serving")
    )
    stack.callback(child.stop, 30.0)
    told = json.loads(await asyncio.to_thread(child.wait_ready))
    return Member(name=name, kind=OURS, **told)


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
    """Start the three processes of the floor; they end with `stack`."""
    followers = [await _start_floor(stack, place, n, "follower") for n in range(2, VOTERS + 1)]
    ports = ",".join(str(port) for _, port in followers)
    leader, port = await _start_floor(stack, place, 1, "leader", ports)
    return Member(
        name=FLOOR,
        kind=FLOOR,
        endpoint=f"127.0.0.1:{port}",
        leader_pid=leader.pid,
        pids=[leader.pid, *(follower.pid for follower, _ in followers)],
    )


async def _start_floor(
    stack: contextlib.ExitStack, place: Path, number: int, *words: str
) -> tuple[Child, int]:
    log = str(place.with_name(f"{place.name}-{number}.data"))
    command = [sys.executable, "-m", "scripts.benchmarks.floor", log, *words]
    child = start_child(f"floor {number}", command, _log(place, str(number)), GRPC_SETTINGS)
    stack.callback(child.stop)
    return child, int(await asyncio.to_thread(child.wait_ready))


async def drive(
    stack: contextlib.ExitStack,
    root: Path,
    members: Sequence[Member],
    settings: Settings,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Run the client process to its end; return what it reports."""
    plan = _write_plan(root, members, settings)
    command = [sys.executable, "-m", "scripts.benchmarks.latency_load", str(plan)]
    client = start_child("latency load", command, _log(root, "client"))
    stack.callback(client.stop)
    progress("latency: warming up")
    for _ in range(settings.rounds):
        progress(f"latency: {await asyncio.to_thread(client.wait_ready)}")
    return await asyncio.to_thread(_result, client)


def _write_plan(root: Path, members: Sequence[Member], settings: Settings) -> Path:
    plan = {
        "members": [asdict(member) for member in members],
        "rounds": settings.rounds,
        "seconds": settings.seconds,
    }
    path = root / "plan.json"
    path.write_text(json.dumps(plan))
    return path


def _result(client: Child) -> dict[str, Any]:
    line = client.read_line()
    if not line:
        client.process.wait()
        raise ChildFailedError(f"the client ended without a result; its log:\n{client.log_tail()}")
    result: dict[str, Any] = json.loads(line)
    return result


def _log(place: Path, name: str) -> Path:
    return place.with_name(f"{place.name}-{name}.log")


def outcome(
    settings: Settings,
    names: Sequence[str],
    measured: Mapping[str, Any],
    left_out: Mapping[str, str],
) -> Outcome:
    """Return figures, tables and what was wanted, out of the client's report."""
    by_turn = {(turn["member"], turn["load"], turn["round"]): turn for turn in measured["turns"]}
    found = {
        (figure, name): values
        for figure in FIGURES
        for name in names
        if (values := _values(by_turn, figure, name, settings.rounds))
    }
    others = [name for name in names if name != OURS]
    ratios = {
        (figure, name): [a / b for a, b in zip(ours, found[figure, name], strict=True)]
        for figure in FIGURES
        if (ours := found.get((figure, OURS)))
        for name in others
        if (figure, name) in found
    }
    figures = {f"{name} {figure.name}": median(values) for (figure, name), values in found.items()}
    figures |= {
        f"{figure.name} / {name}": round(median(values), 4)
        for (figure, name), values in ratios.items()
    }
    tables = [_figures_table(found, ratios, names), _latencies_table(measured["overall"], names)]
    tables += targets_table(_tls_targets(found))
    if left_out:
        rows = tuple(left_out.items())
        tables.append(
            Table(title="Not measured: not installed", columns=("system", "install"), rows=rows)
        )
    return Outcome(
        benchmark="latency",
        settings=asdict(settings),
        figures=figures,
        details={**measured, "left_out": dict(left_out)},
        tables=tables,
    )


def _values(
    by_turn: Mapping[tuple[str, str, int], Mapping[str, Any]],
    figure: Figure,
    name: str,
    rounds: int,
) -> list[float]:
    """Return a figure of each round at a member; none if it has no such load."""
    for load in (figure.load, PEERS_LOAD.get(figure.load, figure.load)):
        turns = [by_turn.get((name, load, number)) for number in range(rounds)]
        if None not in turns:
            return [turn[figure.quantity] for turn in turns if turn is not None]
    return []


Values = Mapping[tuple[Figure, str], Sequence[float]]


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
        "(least to most). At peers every commit is a call of its own",
        columns=("figure", *names, *(f"/ {name}" for name in others), "target"),
        rows=tuple(rows),
    )


def _targets(figure: Figure, found: Values, ratios: Values) -> Iterator[tuple[str, Target]]:
    for name, wanted in (figure.wanted or {}).items():
        values = found.get((figure, OURS)) if name == OURS else ratios.get((figure, name))
        if values:
            yield name, Target(figure.name, figure.bound, wanted, median(values))


def _tls_targets(found: Values) -> Iterator[Target]:
    """Yield what TLS costs, from values within a round."""
    by_name: dict[tuple[str, str, str], Sequence[float]] = {
        (figure.load, figure.quantity, name): values for (figure, name), values in found.items()
    }

    def pairs(load: str, quantity: str) -> list[tuple[float, float]]:
        plain = by_name.get((load, quantity, OURS), ())
        return list(zip(plain, by_name.get((load, quantity, OVER_TLS), ()), strict=False))

    for load in (ALONE, UNARY_ALONE):
        if alone := [tls - plain for plain, tls in pairs(load, "p50_ms")]:
            yield Target(f"{load}: p50 ms more over TLS", "at most", 0.5, median(alone))
    if many := [tls / plain for plain, tls in pairs(MANY, "per_s")]:
        yield Target(f"{MANY}: per s over TLS / in plain text", "at least", 0.9, median(many))


def _latencies_table(overall: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Table:
    by_load = {(each["load"], each["member"]): each for each in overall}
    return Table(
        title="Latency over all rounds: p50, p99 ms",
        columns=("load", *names),
        rows=tuple(
            (load.name, *(_latency(by_load.get((load.name, name))) for name in names))
            for load in latency_load.LOADS
        ),
    )


def _latency(each: Mapping[str, Any] | None) -> str:
    return "" if each is None else f"{each['p50_ms']:.2f}, {each['p99_ms']:.1f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
