"""`streammeta reconcile watch`: rounds of plan and apply, one after another, until SIGTERM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from streammeta.cli.framework.client import store_option
from streammeta.cli.framework.connecting import connecting
from streammeta.cli.framework.output import EXIT_FAILED, CommandError, Duration, Output, with_output
from streammeta.cli.reconcile import reconcile_options, reconcile_signals
from streammeta.storage.durable_files import PosixFileSystem, replace_file
from streammeta.storage.private_files import READABLE_MODE

if TYPE_CHECKING:
    from streammeta.reconcile.watch import Round

T = TypeVar("T")


@click.command("watch")
@store_option
@connecting()
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder of all rounds. Only one process may use it at a time.",
)
@click.option(
    "--every",
    "every_ms",
    type=Duration(),
    default="1h",
    help="Pause between two rounds, at least 1s.",
)
@click.option(
    "--yes",
    is_flag=True,
    help="Delete orphans. Without this option, rounds only report them.",
)
@reconcile_options.removal_options
@reconcile_options.with_limits
@click.option(
    "--keep",
    "kept",
    type=click.IntRange(min=1),
    default=30,
    help="Number of rounds to keep. Older rounds without changes are deleted.",
)
@click.option("--rounds", type=click.IntRange(min=1), help="Number of rounds. [default: unlimited]")
@click.option(
    "--inventory",
    metavar="PREFIX",
    help="Read the newest S3 Inventory below this address instead of listing the bucket,"
    " s3://BUCKET/PATH/ or a folder with a trailing slash. Each round looks for it"
    " again.",
)
@click.option(
    "--metrics-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write each round to this file, for the textfile collector of node_exporter.",
)
@reconcile_options.with_engine
@with_output
def watch_command(
    *,
    every_ms: int,
    kept: int,
    rounds: int | None,
    yes: bool,
    metrics_file: Path | None,
    traces: AbstractContextManager[None],
    output: Output,
    **settings: Any,
) -> None:
    """Reconcile in small rounds, one after another, until SIGTERM or Ctrl-C.

    Each round runs `plan` and `apply` with all their guards. Its folder contains the plan's report.
    A failed round is reported and the next one runs. The same holds when another run deletes
    meanwhile. On a signal the command finishes the current batch and ends. A second signal ends it
    at once, which loses nothing.

    The exit code describes the last round: 3 if objects are missing or damaged, 1 if the round or a
    guard failed or a candidate was not settled, otherwise 0, also after a signal.

    \b
    Example:
      streammeta reconcile watch --store 's3://data?endpoint=http://127.0.0.1:9000' \\
          --connect 127.0.0.1:9091 --folder ./rounds --every 6h --yes
    """
    from streammeta.reconcile.apply import ApplyConfig
    from streammeta.reconcile.cluster.identity import place_of
    from streammeta.reconcile.plan import PlanConfig
    from streammeta.reconcile.run_reporter import round_report
    from streammeta.reconcile.watch import WatchConfig, watch
    from streammeta.reconcile.watch_metrics import exposition

    planned = _select(PlanConfig, settings)
    applied = _select(ApplyConfig, settings | {"delete": yes})
    config = WatchConfig(planned, applied, every_ms / 1000, kept, rounds)
    place = place_of(planned.store)

    def tell(one: Round) -> None:
        click.echo(_line(one), err=True)
        if metrics_file is not None:
            text = exposition(one, place)
            # Replaced atomically, so that the collector never reads half of a file.
            replace_file(PosixFileSystem(mode=READABLE_MODE), metrics_file, [text.encode()])
        reconcile_options.tell_controllers(round_report(one), planned.connect, planned.tls)

    # A round may be deleting, so a signal lets it finish its batch.
    with traces, reconcile_signals.ending_event() as ending:
        last = watch(config, ending, tell, reconcile_options.tell_progress)
    _show(output, last)
    _require_success(last)


def _select(kind: Callable[..., T], settings: Mapping[str, Any]) -> T:
    """Return a configuration with those settings that are fields of its kind."""
    names = signature(kind).parameters.keys() & settings.keys()
    return kind(**{name: settings[name] for name in names})


def _line(one: Round) -> str:
    found = ", ".join(f"{tally.keys} {name}" for name, tally in one.outcomes.items())
    took_s = (one.ended_ms - one.started_ms) / 1000
    parts = [f"round {one.plan or 'without a plan'}: {one.outcome} in {took_s:.1f} s"]
    return "; ".join([*parts, *filter(None, (found, one.problem))])


def _show(output: Output, last: Round) -> None:
    names = ("outcome", "plan", "problem", "started_ms", "ended_ms", "last_success_ms", "lost")
    output.summary({name: getattr(last, name) for name in names})
    reconcile_options.show_tallies(output, "classes", "verdict", last.verdicts)
    reconcile_options.show_tallies(output, "outcomes", "outcome", last.outcomes)


def _require_success(last: Round) -> None:
    """Raise the problem of the last round, if any."""
    from streammeta.reconcile.watch import RoundOutcome

    # A round that a signal ended is not a failure.
    if last.outcome in (RoundOutcome.SETTLED, RoundOutcome.ENDED):
        return
    is_lost = bool(last.lost)
    raise CommandError(
        last.outcome.name,
        last.problem,
        "see the round's report and correct its findings. The next round continues from there",
        exit_code=reconcile_options.EXIT_LOST if is_lost else EXIT_FAILED,
    )
