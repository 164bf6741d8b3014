"""The options of the benchmarks, from words to values and back."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from scripts.benchmarks import commits, faults
from scripts.benchmarks.report import FORMATS

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
        dest="benchmark", metavar="failover|commits|simulator|all", parser_class=_Parser
    )
    kinds.required = True
    common, failover, commit, simulator = _common(), _failover(), _commits(), _simulator()
    kind = _options()
    kind.add_argument("--kind", choices=faults.KINDS, default="crash", help="default: %(default)s")
    for name, parents, text in (
        ("failover", [failover, kind, common], "time from the leader's loss to the next write"),
        ("commits", [commit, common], "commits a second, latency, and what a commit costs"),
        ("simulator", [simulator, common], "events a second of the quorum's simulator"),
        ("all", [failover, commit, simulator, common], "all of these, all kinds of failover"),
    ):
        example = f"example: ./scripts/bench {name} --format json"
        kinds.add_parser(name, parents=parents, help=text, description=text, epilog=example)
    return parser.parse_args(words)


def as_words(arguments: argparse.Namespace) -> list[str]:
    """Return the words that measure the same once, without comparison, in any format."""
    words = [arguments.benchmark]
    for name, value in vars(arguments).items():
        if name in _NOT_PASSED_ON or value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if isinstance(value, tuple):
            words.append(",".join(map(str, value)))
        elif value is not True:
            words.append(str(value))
    return words


def _options() -> _Parser:
    return _Parser(add_help=False)


def _common() -> _Parser:
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
        "--rounds", type=_positive, default=3, help="with --baseline; default: %(default)s"
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
        ("--in-flight", defaults.in_flight, "numbers of requests in flight"),
    ):
        shown = ",".join(map(str, value))
        parser.add_argument(
            name, type=_numbers, default=value, metavar="N,N,...", help=f"{text}; default: {shown}"
        )
    parser.add_argument(
        "--work",
        choices=sorted(commits.WORKS),
        default=defaults.work,
        help="; ".join(f"{name}: {text}" for name, text in commits.WORKS.items()),
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=defaults.seconds, help="per level; default: %(default)s"
    )
    parser.add_argument("--profile", action="store_true", help="and profile the event loops")
    return parser


def _simulator() -> _Parser:
    parser = _options()
    parser.add_argument("--seeds", default="0:200", metavar="FROM:TO", help="default: %(default)s")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a whole number of 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.5 <= seconds <= 600:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted 0.5 to 600 seconds")
    return seconds


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _directory(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a directory")
    return path.resolve()
