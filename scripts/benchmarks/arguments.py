"""The options of the benchmarks, from words to values and back."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from scripts.benchmarks import (
    appending,
    backup,
    brokers,
    commits,
    compaction_settings,
    faults,
    kafka,
    latency,
    map_growth,
    monitoring,
    object_format,
    overload,
    reading,
    reconcile_loads,
    timeline,
    watches,
)
from scripts.benchmarks.peers import comparison
from scripts.benchmarks.report import FORMATS

_LATENCY = (
    "one commit and many, and reads, at streammeta, ZooKeeper and etcd in alternating short turns; "
    "about two minutes with the defaults, half as long again with --baseline"
)
_NOT_PASSED_ON = ("benchmark", "baseline", "rounds", "format")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the options; in JSON if that is asked for."""

    def error(self, message: str) -> NoReturn:
        words = " ".join(sys.argv)
        if "--format json" in words or "--format=json" in words:
            print(json.dumps({"ok": False, "error": f"usage: {message}"}))
            sys.exit(2)
        super().error(message)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; None means that of the process. Ends it with 2 if it is wrong."""
    parser = _Parser(
        prog="bench",
        description="Measure streammeta on this machine; everything is on loopback.",
        epilog="example: ./scripts/bench failover --runs 30 --kind crash --format json",
    )
    kinds = parser.add_subparsers(
        dest="benchmark",
        metavar="failover|commits|timeline|latency|peers|map|objects|appending|reading|compaction"
        "|watches|monitoring|brokers|overload|backup|kafka|reconcile|simulator|all",
        parser_class=_Parser,
    )
    kinds.required = True
    common, failover, commit, simulator = _common(), _failover(), _commits(), _simulator()
    grown, objects, read = _map(), _objects(), _reading()
    kind, tls, audit = _options(), _tls(), _audit()
    kind.add_argument("--kind", choices=faults.KINDS, default="crash", help="default: %(default)s")
    for name, parents, text in (
        (
            "failover",
            [failover, kind, tls, common],
            "time from the leader's loss to the next write",
        ),
        (
            "commits",
            [commit, tls, audit, common],
            "commits a second, latency, and what a commit costs",
        ),
        ("timeline", [_timeline(), common], "when the steps of a lone commit happen"),
        ("latency", [_latency(), tls, audit, _common(latency.ROUNDS_DEFAULT)], _LATENCY),
        ("peers", [_peers(), common], "the same commits on ZooKeeper, etcd and PostgreSQL"),
        ("map", [grown, common], "memory, commits, freezing, checkpoints, restart as it grows"),
        ("objects", [objects, common], "the object format against memcpy; searches in an index"),
        ("appending", [_appending(), common], "appends a second and the time to their answers"),
        ("reading", [read, common], "requests and bytes for each MiB read, in three ways"),
        ("compaction", [_compaction(), common], "its requests and bytes, what it brings, speed"),
        ("watches", [_watches(), common], "a bystander's commits beside watches and pipelines"),
        ("monitoring", [_monitoring(), common], "commits beside scrapes and open pages; pages"),
        ("brokers", [_brokers(), common], "what 300 brokers cost, and how late they have news"),
        ("overload", [_overload(), common], "calls served at four times a leader's capacity"),
        ("authorization", [_authorization(), common], "CPU time of letting a caller in"),
        (
            "backup",
            [_backup(), common],
            "its lag and cost under load; time and memory of restores and adoptions",
        ),
        ("kafka", [_kafka(), common], "streammeta kafka beside Apache Kafka; its failover"),
        ("reconcile", [_reconcile(), common], "a plan's time on each engine, by keys"),
        ("simulator", [simulator, common], "events a second of the quorum's simulator"),
        (
            "all",
            [failover, commit, grown, objects, read, simulator, tls, audit, common],
            "failover of all kinds, commits, map, objects, reading and simulator",
        ),
    ):
        example = f"example: ./scripts/bench {name} --format json"
        kinds.add_parser(name, parents=parents, help=text, description=text, epilog=example)
    return parser.parse_args(words)


def as_words(arguments: argparse.Namespace) -> list[str]:
    """Return the words that measure the same once, without comparison, in any format."""
    words = [arguments.benchmark]
    for name, value in vars(arguments).items():
        if name in _NOT_PASSED_ON or value is None or value is False or value == ():
            continue
        words.append(f"--{name.replace('_', '-')}")
        if isinstance(value, tuple):
            words.append(",".join(map(str, value)))
        elif value is not True:
            words.append(str(value))
    return words


def _options() -> _Parser:
    return _Parser(add_help=False)


def _common(rounds: int = 3) -> _Parser:
    parser = _options()
    parser.add_argument("--format", choices=FORMATS, default="table", help="default: %(default)s")
    parser.add_argument(
        "--data-dir",
        type=_directory,
        metavar="DIR",
        help="where controllers keep their data meanwhile; default: the system's temporary files",
    )
    parser.add_argument(
        "--baseline", metavar="REV", help="measure this commit too, alternating, and print ratios"
    )
    parser.add_argument(
        "--rounds",
        type=_positive,
        default=rounds,
        help="how often each tree, or system, has its turn; default: %(default)s",
    )
    return parser


def _tls() -> _Parser:
    parser = _options()
    parser.add_argument(
        "--tls", action="store_true", help="measure the same over TLS too, with certificates"
    )
    return parser


def _audit() -> _Parser:
    parser = _options()
    parser.add_argument(
        "--audit", action="store_true", help="measure the same with an audit log too"
    )
    return parser


def _authorization() -> _Parser:
    parser = _options()
    parser.add_argument(
        "--calls", type=_positive, default=2_000, help="in a turn; default: %(default)s"
    )
    return parser


def _failover() -> _Parser:
    parser = _options()
    parser.add_argument("--runs", type=_positive, default=30, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of the pauses between two runs")
    return parser


def _commits() -> _Parser:
    parser = _options()
    defaults = commits.Settings()
    for name, value, text in (
        ("--voters", defaults.voters, "numbers of controllers"),
        ("--ranges", defaults.ranges, "ranges of one commit"),
        ("--in-flight", defaults.in_flight, "numbers of commits in flight"),
    ):
        shown = ",".join(map(str, value))
        parser.add_argument(
            name, type=_numbers, default=value, metavar="N,N,...", help=f"{text}; default: {shown}"
        )
    parser.add_argument(
        "--ways",
        type=lambda text: _names(text, commits.WAYS),
        default=defaults.ways,
        metavar="WAY,WAY,...",
        help=f"of {', '.join(commits.WAYS)}; default: {','.join(defaults.ways)}",
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=defaults.seconds, help="per level; default: %(default)s"
    )
    parser.add_argument("--profile", action="store_true", help="and profile the event loops")
    return parser


def _timeline() -> _Parser:
    parser = _options()
    defaults = timeline.Settings()
    parser.add_argument(
        "--ways",
        type=lambda text: _names(text, timeline.WAYS),
        default=defaults.ways,
        metavar="WAY,WAY",
        help=f"of {', '.join(timeline.WAYS)}; default: {','.join(defaults.ways)}",
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=defaults.seconds, help="per way; default: %(default)s"
    )
    return parser


def _latency() -> _Parser:
    parser = _options()
    defaults = latency.Settings()
    parser.add_argument(
        "--systems",
        type=lambda text: _names(text, defaults.systems),
        default=defaults.systems,
        metavar="NAME,NAME,...",
        help=f"default: {','.join(defaults.systems)}",
    )
    parser.add_argument(
        "--seconds", type=_turn, default=defaults.seconds, help="of a turn; default: %(default)s"
    )
    return parser


def _peers() -> _Parser:
    parser = _options()
    defaults = comparison.Settings()
    parser.add_argument(
        "--systems",
        type=lambda text: _names(text, defaults.systems),
        default=defaults.systems,
        metavar="NAME,NAME,...",
        help=f"default: {','.join(defaults.systems)}",
    )
    for name, value, text in (
        ("--ranges", defaults.ranges, "ranges of one commit"),
        ("--in-flight", defaults.in_flight, "numbers of commits in flight; the better counts"),
    ):
        shown = ",".join(map(str, value))
        parser.add_argument(
            name, type=_numbers, default=value, metavar="N,N,...", help=f"{text}; default: {shown}"
        )
    parser.add_argument(
        "--seconds", type=_seconds, default=defaults.seconds, help="per load; default: %(default)s"
    )
    parser.add_argument(
        "--failovers",
        type=int,
        default=defaults.failovers,
        help="kills of ZooKeeper's and etcd's leaders; default: %(default)s",
    )
    return parser


def _map() -> _Parser:
    parser = _options()
    defaults = map_growth.Settings()
    for name, value, text in (
        ("--sizes", defaults.sizes, "streams, and as many objects"),
        ("--set-objects", defaults.set_objects, "of one node, to be read"),
    ):
        shown = ",".join(map(str, value))
        parser.add_argument(
            name, type=_numbers, default=value, metavar="N,N,...", help=f"{text}; default: {shown}"
        )
    parser.add_argument(
        "--large", action="store_true", help=f"measure {map_growth.LARGE:,} of each too"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="DIR", help="write PNG plots there; needs matplotlib"
    )
    return parser


def _objects() -> _Parser:
    parser = _options()
    defaults = object_format.Settings()
    for name, value, text in (
        ("--payloads", defaults.payloads, "bytes of a record's payload"),
        ("--entries", defaults.entries, "entries of an index"),
    ):
        shown = ",".join(map(str, value))
        parser.add_argument(
            name, type=_numbers, default=value, metavar="N,N,...", help=f"{text}; default: {shown}"
        )
    return parser


def _kafka() -> _Parser:
    parser = _options()
    defaults = kafka.Settings()
    for name, value, text in (
        ("--total-mib", defaults.total_mib, "MiB produced and consumed"),
        ("--failovers", defaults.failovers, "kills of a broker"),
    ):
        parser.add_argument(
            name, type=_positive, default=value, metavar="N", help=f"{text}; default: %(default)s"
        )
    return parser


def _reading() -> _Parser:
    parser = _options()
    defaults = reading.Settings()
    for name, value, text in (
        ("--streams", defaults.streams, "streams written and read"),
        ("--record-bytes", defaults.record_bytes, "payload of a record"),
        ("--total-mib", defaults.total_mib, "MiB written to all streams"),
        ("--random-reads", defaults.random_reads, "reads of one record anywhere"),
    ):
        parser.add_argument(
            name, type=_positive, default=value, metavar="N", help=f"{text}; default: %(default)s"
        )
    return parser


def _appending() -> _Parser:
    parser = _options()
    defaults = appending.Settings()
    parser.add_argument(
        "--stores",
        type=lambda text: _names(text, appending.STORES),
        default=defaults.stores,
        metavar="NAME,NAME,...",
        help=f"of {', '.join(appending.STORES)}; default: all",
    )
    for name, value, text in (
        ("--streams", defaults.streams, "streams appended to"),
        ("--record-bytes", defaults.record_bytes, "payload of a record"),
    ):
        parser.add_argument(
            name, type=_positive, default=value, metavar="N", help=f"{text}; default: %(default)s"
        )
    parser.add_argument(
        "--seconds", type=_seconds, default=defaults.seconds, help="per phase; default: %(default)s"
    )
    return parser


def _compaction() -> _Parser:
    parser = _options()
    day, runs = compaction_settings.Workload(), compaction_settings.Throughput()
    for name, value, text in (
        ("--hours", day.hours, "hours of a busy node on a virtual clock"),
        ("--total-mib", runs.total_mib, "MiB that are written and compacted"),
    ):
        parser.add_argument(
            name, type=_positive, default=value, metavar="N", help=f"{text}; default: %(default)s"
        )
    parser.add_argument(
        "--budgets-mib",
        type=_numbers,
        default=runs.budgets_mib,
        metavar="N,N,...",
        help="memory budgets to compact with; default: " + ",".join(map(str, runs.budgets_mib)),
    )
    parser.add_argument(
        "--large",
        action="store_true",
        help=f"compact {compaction_settings.LARGE_MIB:,} MiB with"
        f" {compaction_settings.LARGE_BUDGET_MIB} MiB too",
    )
    parser.add_argument("--profile", action="store_true", help="and profile the event loop")
    return parser


def _monitoring() -> _Parser:
    parser = _options()
    defaults = monitoring.Settings()
    parser.add_argument(
        "--streams",
        type=_positive,
        default=defaults.streams,
        metavar="N",
        help="streams in the map; default: %(default)s",
    )
    parser.add_argument(
        "--turns",
        type=_positive,
        default=defaults.turns,
        metavar="N",
        help="turns with and without onlookers; default: %(default)s",
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=defaults.seconds, help="per turn; default: %(default)s"
    )
    return parser


def _watches() -> _Parser:
    parser = _options()
    defaults = watches.Settings()
    for name, value, text in (
        ("--watches", defaults.watches, "numbers of watches"),
        ("--pipelines", defaults.pipelines, "numbers of open commit pipelines"),
    ):
        shown = ",".join(map(str, value))
        parser.add_argument(
            name,
            type=lambda given: tuple(_whole(part) for part in given.split(",")),
            default=value,
            metavar="N,N,...",
            help=f"{text}; default: {shown}",
        )
    parser.add_argument(
        "--connections",
        type=_positive,
        default=defaults.connections,
        metavar="N",
        help="connections that carry them; default: %(default)s",
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=defaults.seconds, help="per level; default: %(default)s"
    )
    return parser


def _brokers() -> _Parser:
    parser = _options()
    defaults = brokers.Settings()
    for name, value, text in (
        ("--brokers", defaults.brokers, "each with heartbeats and a watch"),
        ("--commits-per-s", defaults.commits_per_s, "pipelined, of one range"),
        ("--processes", defaults.processes, "client processes that the brokers are spread over"),
    ):
        parser.add_argument(
            name, type=_positive, default=value, metavar="N", help=f"{text}; default: %(default)s"
        )
    parser.add_argument(
        "--heartbeat-s",
        type=_seconds,
        default=defaults.heartbeat_s,
        help="between two heartbeats of a broker; default: %(default)s",
    )
    parser.add_argument(
        "--watch-at",
        choices=brokers.WATCH_AT,
        default=defaults.watch_at,
        help="where watches are opened; default: %(default)s, as the product's client does",
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=defaults.seconds, help="default: %(default)s"
    )
    return parser


def _overload() -> _Parser:
    parser = _options()
    defaults = overload.Settings()
    for name, value, text in (
        ("--times", defaults.times, "calls that come, as a multiple of the capacity"),
        ("--turns", defaults.turns, "of each load"),
    ):
        parser.add_argument(
            name, type=_positive, default=value, metavar="N", help=f"{text}; default: %(default)s"
        )
    parser.add_argument(
        "--seconds", type=_seconds, default=defaults.seconds, help="of a turn; default: %(default)s"
    )
    return parser


def _backup() -> _Parser:
    parser = _options()
    defaults = backup.Settings()
    for name, value, text in (
        ("--commits-per-s", defaults.commits_per_s, "pipelined, of one range"),
        ("--interval-ms", defaults.interval_ms, "between two copies"),
    ):
        parser.add_argument(
            name, type=_positive, default=value, metavar="N", help=f"{text}; default: %(default)s"
        )
    parser.add_argument(
        "--seconds", type=_seconds, default=defaults.seconds, help="of a turn; default: %(default)s"
    )
    parser.add_argument(
        "--sizes",
        type=_numbers,
        default=defaults.sizes,
        metavar="N,N,...",
        help="streams, and as many objects, to restore; default: 1000000",
    )
    parser.add_argument(
        "--adoptions",
        type=_numbers,
        default=defaults.adoptions,
        metavar="N,N,...",
        help="objects to adopt after a restore; default: 10000",
    )
    parser.add_argument("--large", action="store_true", help=f"restore {backup.LARGE:,} too")
    return parser


def _reconcile() -> _Parser:
    parser = _options()
    parser.add_argument(
        "--keys",
        type=_numbers,
        default=(6, 1_000_000),
        metavar="N,N,...",
        help="sizes of the bucket; default: 6,1000000",
    )
    parser.add_argument(
        "--engines",
        type=lambda given: _names(given, ("local", "spark")),
        default=("local", "spark"),
        metavar="NAME,...",
        help="local, spark; default: both, in turns",
    )
    text = "instead, join and verdicts alone, by keys, beside DuckDB"
    parser.add_argument("--joined", type=_numbers, default=(), metavar="N,N,...", help=text)
    parser.add_argument(
        "--deletions", type=_positive, metavar="N", help="instead, deletions a second of so many"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="DIR", help="write plots of growth there; needs matplotlib"
    )
    parser.add_argument(
        "--runs", type=_positive, default=3, help="of each engine and size; default: %(default)s"
    )
    parser.add_argument(
        "--loads",
        type=lambda given: _names(given, ("plan", *reconcile_loads.LOADS)),
        default=("plan",),
        metavar="NAME,...",
        help="plan: listing and join; join: alone; inventory: a plan of one; default: plan",
    )
    return parser


def _simulator() -> _Parser:
    parser = _options()
    parser.add_argument("--seeds", default="0:200", metavar="FROM:TO", help="default: %(default)s")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a whole number of 1 or more")
    return int(text)


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a whole number of 0 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.5 <= seconds <= 600:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted 0.5 to 600 seconds")
    return seconds


def _turn(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 60:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted 0.1 to 60 seconds")
    return seconds


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _names(text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(known):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted some of {', '.join(known)}")
    return names


def _directory(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a directory")
    return path.resolve()
