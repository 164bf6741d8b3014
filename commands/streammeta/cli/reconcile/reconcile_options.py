"""Options that commands of `streammeta reconcile` share, and what all of them tell on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce

import click

from streammeta.cli.framework.client import Command
from streammeta.cli.framework.output import Duration
from streammeta.cli.framework.tracing import tracing_option

EXIT_LOST = 3
"""Exit code of a plan that has confirmed missing or damaged objects."""

SHARD_DIGITS: Mapping[str, int | None] = {"auto": None, "16": 1, "256": 2}
"""Values of `--shards`, with the digits of keys that they cut at; None: by what is there."""


def _together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """All of these options, in the order of the help text."""
    return lambda command: reduce(lambda done, option: option(done), reversed(options), command)


limit_options = _together(
    click.option(
        "--grace",
        "grace_ms",
        type=Duration(),
        default="1h",
        show_default=True,
        help="Leave unknown objects alone that are younger than this; 15m or more.",
    ),
    click.option(
        "--unsafe-grace",
        "unsafe_grace_ms",
        type=Duration(),
        help="Instead of --grace, any duration down to 0s: for clusters that nothing writes to.",
    ),
    click.option(
        "--max-share",
        type=click.FloatRange(0, 1),
        default=0.2,
        show_default=True,
        help="Refuse a plan that would delete more than this fraction of the cluster's keys.",
    ),
    click.option(
        "--max-candidates",
        type=click.IntRange(min=0),
        default=10_000,
        show_default=True,
        help="Refuse a plan that would delete more keys than this.",
    ),
    click.option(
        "--allow-empty-map",
        is_flag=True,
        help="Accept a map without objects: every key is an orphan.",
    ),
    click.option(
        "--namespace",
        help="Confirms the namespace that the controllers tell; any other is refused.",
    ),
    click.option(
        "--shards",
        type=click.Choice(list(SHARD_DIGITS)),
        default="auto",
        show_default=True,
        help="How finely to cut the listing; auto looks at how many keys there are.",
    ),
)
"""Adds what a plan leaves alone, and what it is refused for."""

removal_options = _together(
    click.option(
        "--quarantine", is_flag=True, help="Keep a copy in the bucket, which `undo` brings back."
    ),
    click.option(
        "--tag",
        is_flag=True,
        help="Tag with streammeta-reconcile=orphan instead, for a rule of the bucket to delete.",
    ),
    click.option(
        "--rate",
        "keys_per_s",
        type=click.IntRange(min=1),
        default=500,
        show_default=True,
        help="Most keys to delete per second, in all.",
    ),
)
"""Adds how candidates are removed, and how fast."""

engine_options = _together(
    click.option(
        "--wait",
        "patience_s",
        type=click.FloatRange(min=0),
        default=15.0,
        show_default=True,
        help="Seconds to look for a leader before giving up.",
    ),
    click.option(
        "--engine",
        type=click.Choice(["auto", "local", "spark"]),
        default="auto",
        show_default=True,
        help="Where the work is done: local is this process;"
        " auto takes Spark above 20,000,000 keys.",
    ),
    click.option(
        "--master",
        help="Where Spark runs, if it does;"
        " without it the master of spark-submit, or else local[2].",
    ),
    click.option(
        "--driver-memory", default="1g", show_default=True, help="Memory of Spark's driver."
    ),
    tracing_option("the phases of the run and its calls of controllers"),
)
"""Adds where the work is done, how long to wait for a leader, and `--tracing`."""


def tell_progress(line: str) -> None:
    """Tell what is done next."""
    click.echo(f"{line} ...", err=True)
