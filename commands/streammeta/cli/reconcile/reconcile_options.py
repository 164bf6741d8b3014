"""Options that commands of `streammeta reconcile` share, and their progress messages."""

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
"""Values of `--shards`, with the digits of keys at which they cut. None adapts to the bucket."""


def _combine(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Combine these options, in the order of the help text."""
    return lambda command: reduce(lambda done, option: option(done), reversed(options), command)


limit_options = _combine(
    # Objects are uploaded before they are committed, so young unknown objects stay.
    click.option(
        "--grace",
        "grace_ms",
        type=Duration(),
        default="1h",
        show_default=True,
        help="Minimum age of unknown objects to delete, at least 15m.",
    ),
    click.option(
        "--unsafe-grace",
        "unsafe_grace_ms",
        type=Duration(),
        help="Replaces --grace with any duration down to 0s, for clusters without writers.",
    ),
    # Many orphans usually mean wrong metadata, not garbage.
    click.option(
        "--max-share",
        type=click.FloatRange(0, 1),
        default=0.2,
        show_default=True,
        help="Reject a plan that would delete more than this fraction of the cluster's keys.",
    ),
    click.option(
        "--max-candidates",
        type=click.IntRange(min=0),
        default=10_000,
        show_default=True,
        help="Reject a plan that would delete more keys than this.",
    ),
    click.option(
        "--allow-empty-map",
        is_flag=True,
        help="Accept metadata without objects. Then every key is an orphan.",
    ),
    click.option(
        "--namespace",
        help="Expected namespace. The command fails if the cluster's differs.",
    ),
    click.option(
        "--shards",
        type=click.Choice(list(SHARD_DIGITS)),
        default="auto",
        show_default=True,
        help="Granularity of the listing. auto adapts to the number of keys.",
    ),
)
"""Adds the options that protect objects and reject plans."""

removal_options = _combine(
    click.option(
        "--quarantine", is_flag=True, help="Keep a copy in the bucket, which `undo` restores."
    ),
    click.option(
        "--tag",
        is_flag=True,
        help="Only tag orphans with streammeta-reconcile=orphan, for a lifecycle rule of the"
        " bucket.",
    ),
    # Deletions must leave the bucket's request rate to the brokers.
    click.option(
        "--rate",
        "keys_per_s",
        type=click.IntRange(min=1),
        default=500,
        show_default=True,
        help="Maximum number of keys to delete per second.",
    ),
)
"""Adds the method and the rate of deletion."""

engine_options = _combine(
    click.option(
        "--wait",
        "patience_s",
        type=click.FloatRange(min=0),
        default=15.0,
        show_default=True,
        help="Seconds to search for a leader.",
    ),
    click.option(
        "--engine",
        type=click.Choice(["auto", "local", "spark"]),
        default="auto",
        show_default=True,
        help="Engine: local is this process. auto selects Spark above 20,000,000 keys.",
    ),
    click.option(
        "--master",
        help="Master of Spark. [default: the master of spark-submit, or else local[2]]",
    ),
    click.option(
        "--driver-memory", default="1g", show_default=True, help="Memory of Spark's driver."
    ),
    tracing_option("the phases of the run and its calls to controllers"),
)
"""Adds the engine, the time to search for a leader, and `--tracing`."""


def tell_progress(line: str) -> None:
    """Announce the next phase."""
    # Standard output has the result only.
    click.echo(f"{line} ...", err=True)
