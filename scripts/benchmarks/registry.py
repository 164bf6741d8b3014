"""Registry of benchmarks: their names, modules and summaries, and their command line.

A module has a dataclass `Settings`, whose fields are its options, and a function
`measure(directory, settings, progress)`, which returns one `Outcome` or several. It raises
`ChildFailedError` if a process ended early, and `BenchmarkError` if it can't measure otherwise.
"""

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.benchmarks.options import Parser, add_options, option, settings_of, words_of
from scripts.benchmarks.report import FORMATS, Format

ALL = "all"
MODULES: Mapping[str, tuple[str, str]] = {
    "failover": ("failover", "time from the leader's loss to the next acknowledged write"),
    "commits": ("commits", "commits a second, their latency and their cost"),
    "latency": ("latency", "one commit, many, and reads, compared with ZooKeeper and etcd"),
    "shared": ("shared", "commits of shared rows beside an installed PostgreSQL server"),
    "map": ("metadata_growth", "memory, commits, checkpoints, restart and reads as metadata grows"),
    "objects": ("object_format", "encoding and decoding of objects, and searches in an index"),
    "appending": ("appending", "appends a second and the time to their acknowledgement"),
    "reading": ("reading", "requests and bytes for each MiB read, in three ways"),
    "compaction": ("compaction", "requests, bytes, speed and memory of compaction"),
    "monitoring": ("monitoring", "commits during scrapes and open pages, and times of pages"),
    "brokers": ("brokers", "cost of 300 brokers, and delay of their news"),
    "overload": ("overload", "calls served at four times a leader's capacity"),
    "authorization": ("authorization", "CPU time of admitting a caller"),
    "backup": ("backup", "lag and cost of a backup; time and memory of restores and adoptions"),
    "kafka": ("kafka", "streammeta kafka and Apache Kafka under one load, and a failover"),
    "kafka-tiered": ("kafka_tiered", "a Kafka broker's tiered storage, by manager of metadata"),
    "s3stream": ("s3stream", "price of the controllers for AutoMQ's s3stream"),
    "reconcile": ("reconcile", "a plan's time on each engine, and deletions a second"),
}
"""Module and summary of each benchmark, by its name on the command line."""

MEMBERS_OF_ALL: Mapping[str, Mapping[str, object]] = {
    "failover": {"kind": ("crash", "pause", "partition")},
    "commits": {},
    "map": {},
    "objects": {},
    "reading": {},
}
"""Benchmarks that `all` runs, with the settings that are fixed there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The benchmarks to run, with their settings by name, and how to run and report them."""

    name: str
    settings: Mapping[str, Any]
    format: Format
    data_dir: Path | None
    baseline: str | None
    rounds: int

    def words(self) -> list[str]:
        """Return the command line that measures the same once, without a comparison."""
        options: dict[str, Sequence[str]] = {}
        for name, settings in self.settings.items():
            options |= words_of(settings, without=("rounds", *_fixed(self.name, name)))
        if self.data_dir is not None:
            options["--data-dir"] = [str(self.data_dir)]
        return [self.name, *(word for name, value in options.items() for word in (name, *value))]


@dataclass(frozen=True, slots=True)
class _Comparison:
    rounds: int = option(3, "turns of each tree")


def module_of(name: str) -> Any:
    """Import the module of a benchmark."""
    return importlib.import_module(f"scripts.benchmarks.{MODULES[name][0]}")


def parse(words: Sequence[str] | None = None) -> Request:
    """Read a command line, by default the process's; exit with 2 if it is wrong."""
    parser = Parser(
        prog="bench",
        description="Measure streammeta on this machine. All traffic is on loopback.",
        epilog="example: ./scripts/bench failover --runs 30 --kind crash --format json",
    )
    names = parser.add_subparsers(
        dest="name", metavar="|".join((*MODULES, ALL)), parser_class=Parser, required=True
    )
    summaries = {name: summary for name, (_, summary) in MODULES.items()}
    summaries[ALL] = ", ".join(MEMBERS_OF_ALL)
    parsers = {
        name: names.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=f"example: ./scripts/bench {name} --format json",
        )
        for name, summary in summaries.items()
    }

    # Only the chosen benchmark's module is imported: others may need packages of an extra.
    given = sys.argv[1:] if words is None else words
    for chosen in [word for word in given if word in parsers][:1]:
        for name in _members(chosen):
            add_options(parsers[chosen], module_of(name).Settings, _fixed(chosen, name))
        _add_common(parsers[chosen])
    arguments = parser.parse_args(words)
    return Request(
        name=arguments.name,
        settings={
            name: settings_of(module_of(name).Settings, arguments, _fixed(arguments.name, name))
            for name in _members(arguments.name)
        },
        format=arguments.format,
        data_dir=arguments.data_dir,
        baseline=arguments.baseline,
        rounds=arguments.rounds,
    )


def _members(name: str) -> Sequence[str]:
    return tuple(MEMBERS_OF_ALL) if name == ALL else (name,)


def _fixed(name: str, member: str) -> Mapping[str, object]:
    return MEMBERS_OF_ALL[member] if name == ALL else {}


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=FORMATS, default="table", help="default: %(default)s")
    parser.add_argument(
        "--data-dir",
        type=_directory,
        metavar="DIR",
        help="directory for the data of all servers; default: the system's temporary directory",
    )
    parser.add_argument(
        "--baseline", metavar="REV", help="also measure this commit, in turns, and print ratios"
    )
    add_options(parser, _Comparison, {})


def _directory(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a directory")
    return path.resolve()
