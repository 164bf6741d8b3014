"""The command line of the benchmarks: chooses, runs in a directory of its own, prints.

What is measured is in the modules named after it. Nothing is left behind: controllers and clients
are children that are stopped, and the directory is removed, however a run ends.
"""

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from scripts.benchmarks import (
    baseline,
    commit_profile,
    commits,
    compaction_settings,
    failover,
    faults,
    latency,
    map_growth,
    reconcile_loads,
    reconciling,
    simulator,
    timeline,
)
from scripts.benchmarks.arguments import as_words, parse
from scripts.benchmarks.bench_cluster import UnhealthyError
from scripts.benchmarks.committer import LoadError
from scripts.benchmarks.figures import Outcome
from scripts.benchmarks.http2 import Http2Error
from scripts.benchmarks.machine import OtherWork, describe_commit, describe_machine
from scripts.benchmarks.map_plots import PlotError
from scripts.benchmarks.peers import comparison
from scripts.benchmarks.peers.servers import PeerError
from scripts.benchmarks.report import Reporter
from streammeta.cli.local_cluster import ChildFailedError
from streammeta.client import BrokerClientError

Say: TypeAlias = Callable[[str], None]

ROOT = Path(__file__).resolve().parent.parent.parent
EXPECTED_ERRORS = (
    BrokerClientError,
    ChildFailedError,
    Http2Error,
    LoadError,
    PeerError,
    PlotError,
    UnhealthyError,
    failover.FailoverError,
    reconciling.ReconcilingError,
    simulator.SimulatorError,
    baseline.BaselineError,
    OSError,
)
ALL_HANGING_RUNS = 10
"""`all` makes fewer runs of the faults that are found by time alone: each takes seconds."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 done, 1 failed (130 interrupted)."""
    arguments = parse(words)
    # A supervisor's SIGTERM ends a run as Ctrl-C does: cleanly. Shells start what runs in the
    # background with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    reporter = Reporter(arguments.format)
    place = Path(tempfile.mkdtemp(prefix="streammeta-bench-", dir=arguments.data_dir))
    try:
        return _run(arguments, place, reporter)
    except KeyboardInterrupt:
        reporter.fail("interrupted; everything is stopped")
        return 130
    except EXPECTED_ERRORS as error:
        reporter.fail(str(error))
        return 1
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _run(arguments: argparse.Namespace, place: Path, reporter: Reporter) -> int:
    machine, others = describe_machine(place), OtherWork()
    with reporter.running():
        outcomes = asyncio.run(_measure(arguments, place, reporter))
    reporter.results(machine, describe_commit(ROOT), others.cores(), outcomes)
    return 0


async def _measure(arguments: argparse.Namespace, place: Path, reporter: Reporter) -> list[Outcome]:
    say = reporter.progress
    if arguments.baseline is not None:
        commit = baseline.unpack(ROOT, arguments.baseline, place / "baseline")
        trees = {baseline.THIS: ROOT, commit[:12]: place / "baseline"}
        if arguments.benchmark == "latency":
            return await _latency(arguments, place, say, trees)
        words = as_words(arguments)
        return [await baseline.compare(trees, words, arguments.rounds, place, say)]
    outcomes: list[Outcome] = []
    for kind, runs in _failovers(arguments):
        outcomes += [
            await failover.measure(
                place / f"failover-{kind}-{over_tls}",
                kind,
                runs,
                arguments.seed,
                say,
                over_tls=over_tls,
            )
            for over_tls in ((False, True) if arguments.tls else (False,))
        ]
    for names, measured in (
        (("commits", "all"), _commits),
        (("timeline",), _timeline),
        (("latency",), _latency),
        (("peers",), _peers),
        (("map", "all"), _map),
        (("objects", "all"), _objects),
        (("appending",), _appending),
        (("reading", "all"), _reading),
        (("compaction",), _compaction),
        (("watches",), _watches),
        (("monitoring",), _monitoring),
        (("brokers",), _brokers),
        (("overload",), _overload),
        (("authorization",), _authorization),
        (("backup",), _backup),
        (("kafka",), _kafka),
        (("reconcile",), _reconcile),
    ):
        if arguments.benchmark in names:
            outcomes += await measured(arguments, place, say)
    if arguments.benchmark in ("simulator", "all"):
        outcomes.append(await simulator.measure(place / "simulator", arguments.seeds, say))
    return outcomes


async def _commits(arguments: argparse.Namespace, place: Path, say: Say) -> list[Outcome]:
    settings = commits.Settings(
        ways=arguments.ways,
        voters=arguments.voters,
        ranges=arguments.ranges,
        in_flight=arguments.in_flight,
        seconds=arguments.seconds,
        tls=arguments.tls,
        audit=arguments.audit,
    )
    outcomes = [await commits.measure(place / "commits", settings, say)]
    if arguments.profile:
        outcomes.append(await commit_profile.measure(place / "commits", settings, say))
    return outcomes


async def _timeline(arguments: argparse.Namespace, place: Path, say: Say) -> list[Outcome]:
    settings = timeline.Settings(ways=arguments.ways, seconds=arguments.seconds)
    return [await timeline.measure(place / "timeline", settings, say)]


async def _latency(
    arguments: argparse.Namespace,
    place: Path,
    say: Say,
    trees: Mapping[str, Path] = MappingProxyType({baseline.THIS: ROOT}),
) -> list[Outcome]:
    settings = latency.Settings(
        systems=arguments.systems,
        seconds=arguments.seconds,
        rounds=arguments.rounds,
        tls=arguments.tls,
        audit=arguments.audit,
    )
    return [await latency.measure(place / "latency", trees, settings, say)]


async def _peers(arguments: argparse.Namespace, place: Path, say: Say) -> list[Outcome]:
    settings = comparison.Settings(
        systems=arguments.systems,
        ranges=arguments.ranges,
        in_flight=arguments.in_flight,
        seconds=arguments.seconds,
        failovers=arguments.failovers,
    )
    return [await comparison.measure(place / "peers", settings, say)]


async def _map(arguments: argparse.Namespace, place: Path, say: Say) -> list[Outcome]:
    settings = map_growth.Settings(
        sizes=arguments.sizes,
        large=arguments.large,
        set_objects=arguments.set_objects,
        plot=arguments.plot,
    )
    (place / "map").mkdir()
    return [await map_growth.measure(place / "map", settings, say)]


# A commit measured with these scripts as the baseline may lack what the next ones measure.


async def _objects(arguments: argparse.Namespace, _place: Path, say: Say) -> list[Outcome]:
    from scripts.benchmarks import object_format

    settings = object_format.Settings(payloads=arguments.payloads, entries=arguments.entries)
    return [await asyncio.to_thread(object_format.measure, settings, say)]


async def _appending(arguments: argparse.Namespace, place: Path, say: Say) -> list[Outcome]:
    from scripts.benchmarks import appending

    settings = appending.Settings(
        stores=arguments.stores,
        streams=arguments.streams,
        record_bytes=arguments.record_bytes,
        seconds=arguments.seconds,
    )
    return [await appending.measure(place / "appending", settings, say)]


async def _reading(arguments: argparse.Namespace, place: Path, say: Say) -> list[Outcome]:
    from scripts.benchmarks import reading

    settings = reading.Settings(
        streams=arguments.streams,
        record_bytes=arguments.record_bytes,
        total_mib=arguments.total_mib,
        random_reads=arguments.random_reads,
    )
    return [await reading.measure(place / "reading", settings, say)]


async def _compaction(arguments: argparse.Namespace, place: Path, say: Say) -> list[Outcome]:
    from scripts.benchmarks import compaction

    settings = compaction_settings.Settings(
        workload=compaction_settings.Workload(hours=arguments.hours),
        throughput=compaction_settings.Throughput(
            total_mib=arguments.total_mib,
            budgets_mib=arguments.budgets_mib,
            large=arguments.large,
            profile=arguments.profile,
        ),
    )
    return await compaction.measure(place / "compaction", settings, say)


async def _watches(arguments: argparse.Namespace, place: Path, say: Say) -> list[Outcome]:
    from scripts.benchmarks import watches

    settings = watches.Settings(
        watches=arguments.watches,
        pipelines=arguments.pipelines,
        connections=arguments.connections,
        seconds=arguments.seconds,
    )
    return [await watches.measure(place / "watches", settings, say)]


async def _monitoring(arguments: argparse.Namespace, place: Path, say: Say) -> list[Outcome]:
    from scripts.benchmarks import monitoring

    settings = monitoring.Settings(
        streams=arguments.streams, turns=arguments.turns, seconds=arguments.seconds
    )
    return [await monitoring.measure(place / "monitoring", settings, say)]


async def _reconcile(arguments: argparse.Namespace, place: Path, say: Say) -> list[Outcome]:
    if arguments.deletions:
        from scripts.benchmarks import reconcile_deletions

        deleting = reconcile_deletions.Settings(arguments.deletions, arguments.runs)
        return [
            await asyncio.to_thread(reconcile_deletions.measure, place / "reconcile", deleting, say)
        ]
    if arguments.joined:
        from scripts.benchmarks import reconcile_joining

        sizes = reconcile_joining.Settings(arguments.joined, arguments.runs, arguments.plot)
        return [await asyncio.to_thread(reconcile_joining.measure, place / "reconcile", sizes, say)]
    outcomes = []
    given = (arguments.keys, arguments.engines, arguments.runs)
    if "plan" in arguments.loads:
        settings = reconciling.Settings(*given)
        outcomes.append(
            await asyncio.to_thread(reconciling.measure, place / "reconcile", settings, say)
        )
    loads = tuple(load for load in arguments.loads if load != "plan")
    if loads:
        others = reconcile_loads.Settings(loads, *given, plot=arguments.plot)
        outcomes.append(
            await asyncio.to_thread(reconcile_loads.measure, place / "loads", others, say)
        )
    return outcomes


async def _brokers(arguments: argparse.Namespace, place: Path, say: Say) -> list[Outcome]:
    from scripts.benchmarks import brokers

    settings = brokers.Settings(
        brokers=arguments.brokers,
        commits_per_s=arguments.commits_per_s,
        heartbeat_s=arguments.heartbeat_s,
        watch_at=arguments.watch_at,
        processes=arguments.processes,
        seconds=arguments.seconds,
    )
    return [await brokers.measure(place / "brokers", settings, say)]


async def _overload(arguments: argparse.Namespace, place: Path, say: Say) -> list[Outcome]:
    from scripts.benchmarks import overload

    settings = overload.Settings(
        times=arguments.times, turns=arguments.turns, seconds=arguments.seconds
    )
    return [await overload.measure(place / "overload", settings, say)]


async def _authorization(arguments: argparse.Namespace, place: Path, say: Say) -> list[Outcome]:
    from scripts.benchmarks import authorization

    settings = authorization.Settings(calls=arguments.calls)
    return [await authorization.measure(place / "authorization", settings, say)]


async def _backup(arguments: argparse.Namespace, place: Path, say: Say) -> list[Outcome]:
    from scripts.benchmarks import backup

    settings = backup.Settings(
        commits_per_s=arguments.commits_per_s,
        seconds=arguments.seconds,
        rounds=arguments.rounds,
        interval_ms=arguments.interval_ms,
        sizes=arguments.sizes,
        adoptions=arguments.adoptions,
        large=arguments.large,
    )
    return [await backup.measure(place / "backup", settings, say)]


async def _kafka(arguments: argparse.Namespace, place: Path, say: Say) -> list[Outcome]:
    from scripts.benchmarks import kafka

    settings = kafka.Settings(
        total_mib=arguments.total_mib,
        failovers=arguments.failovers,
    )
    return [await kafka.measure(place / "kafka", settings, say)]


def _failovers(arguments: argparse.Namespace) -> list[tuple[faults.Kind, int]]:
    match arguments.benchmark:
        case "failover":
            return [(arguments.kind, arguments.runs)]
        case "all":
            hanging = min(arguments.runs, ALL_HANGING_RUNS)
            return [("crash", arguments.runs), ("pause", hanging), ("partition", hanging)]
        case _:
            return []


if __name__ == "__main__":
    sys.exit(main())
