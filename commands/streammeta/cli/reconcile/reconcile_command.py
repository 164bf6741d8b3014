"""`streammeta reconcile`: compare the bucket with the metadata, and delete orphans."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from streammeta.cli.framework.client import store_option
from streammeta.cli.framework.connecting import Endpoints, connecting
from streammeta.cli.framework.output import (
    EXIT_FAILED,
    CommandError,
    Duration,
    Moment,
    Output,
    with_output,
)
from streammeta.cli.reconcile import reconcile_options
from streammeta.storage.durable_files import READABLE_MODE, PosixFileSystem, replace_file

if TYPE_CHECKING:
    from streammeta.reconcile.apply import ApplyResult
    from streammeta.reconcile.plans.plan_folder import PlanResult
    from streammeta.reconcile.undo import UndoResult
    from streammeta.reconcile.watch import Round


T = TypeVar("T")
_PLAN_FACTS = (
    *("cluster_id", "cluster_uuid", "store", "namespace", "engine", "map_end_offset", "map_epoch"),
    *("map_objects", "unfinished_uploads"),
)
"""Fields of a plan that its summary shows."""


@click.group()
def reconcile() -> None:
    """Compare the bucket with the metadata, and delete orphans.

    Needs the extra `reconcile`. Without it the error names the command that installs it. Spark,
    which is used for the largest buckets or on request, needs the extra `reconcile-spark` and a
    Java 17+ runtime.
    """


_plan_store_option = click.option(
    "--store", metavar="URI", help="Address of the plan's bucket, if it has to carry credentials."
)
_plan_folder_option = click.option(
    "--plan",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder of the plan. If Spark runs on several machines, all must share it.",
)


@reconcile.command("plan")
@store_option
@connecting()
@_plan_folder_option
@reconcile_options.with_limits
@click.option(
    "--deep",
    "deep_share",
    type=click.FloatRange(0, 1),
    default=0.0,
    metavar="SHARE",
    help="Read this fraction of the known objects, and check checksum, footer and index. 1"
    " reads all.",
)
@click.option(
    "--versions",
    is_flag=True,
    help="Also list old versions and delete markers of a versioned bucket.",
)
@click.option(
    "--inventory",
    metavar="ADDRESS",
    help="Read an inventory instead of listing the bucket: s3://BUCKET/PATH/manifest.json of"
    " S3 Inventory, s3://BUCKET/PATH/ for the newest one below it, a copy of one, or"
    " Parquet, ORC or CSV with path, size and modified.",
)
@click.option(
    "--taken-at",
    "inventory_taken_ms",
    type=Moment(),
    help="Start time of the listing, for an --inventory without a manifest.",
)
@reconcile_options.with_engine
@with_output
def plan_command(
    *, folder: Path, traces: AbstractContextManager[None], output: Output, **settings: Any
) -> None:
    """Give every key a verdict and write the plan to a new folder. Delete nothing.

    The command requires that the controllers and the bucket's marker belong to one cluster: the
    same id, UUID and namespace.

    Exit code 3: objects of the metadata are missing in the bucket or damaged, confirmed by a second
    look at both. The plan is written. Exit code 1 with GUARD: a guard failed, and `apply` rejects
    the plan. With INCOMPLETE: a fact that the plan does not depend on is unknown. With INTERRUPTED:
    SIGTERM or Ctrl-C ended the command, without a plan. If the loss is the only problem, the code
    is MISSING_OBJECTS and the plan may be applied.

    \b
    Examples:
      streammeta reconcile plan --store 's3://data?endpoint=http://127.0.0.1:9000' \\
          --connect 127.0.0.1:9091 --plan ./plan-1
      streammeta reconcile plan --store s3://data --connect 127.0.0.1:9091 --plan ./plan-2 \\
          --inventory s3://lists/data/daily/2026-05-01T01-00Z/manifest.json
    """
    from streammeta.reconcile.plan import PlanConfig, plan
    from streammeta.reconcile.run_reporter import plan_report

    config = PlanConfig(folder=folder, **settings)  # the fields of the same names
    started_ms = _now_ms()
    # A plan deletes nothing, so a signal may interrupt it anywhere.
    with (
        reconcile_options.interruptible(
            f"no plan was written to {folder}, and no object was deleted", "run the command again"
        ),
        traces,
    ):
        result = plan(config, reconcile_options.tell_progress)
    # Reported before a failure is raised, so that status pages show failed runs too.
    run = plan_report(result, started_ms, _now_ms())
    reconcile_options.tell_controllers(run, config.connect, config.tls)
    _show_plan(output, folder, result)
    _require_whole(folder, result)


@reconcile.command("apply")
@_plan_folder_option
@_plan_store_option
@connecting(Endpoints.KNOWN)
@click.option("--yes", is_flag=True, help="Apply the changes. Without this option, only show them.")
@reconcile_options.removal_options
@reconcile_options.with_engine
@with_output
def apply_command(
    *, yes: bool, traces: AbstractContextManager[None], output: Output, **settings: Any
) -> None:
    """Check every candidate of a plan at the leader, and delete the confirmed orphans.

    The command rejects a plan with a failed guard, a plan older than 24 h, and a plan of another
    cluster, bucket or endpoint. It records the known facts of an object in the plan's folder before
    it deletes the object. Only one run deletes at a time. The command may be repeated. Exit code 1
    with INCOMPLETE: a key failed or was skipped. With INTERRUPTED: SIGTERM or Ctrl-C ended it after
    the current batches, before all candidates were settled. A second signal ends it at once.

    \b
    Examples:
      streammeta reconcile apply --plan ./plan-1          # shows the changes
      streammeta reconcile apply --plan ./plan-1 --yes    # applies them
      streammeta reconcile apply --plan ./plan-1 --yes --quarantine
      streammeta reconcile apply --plan ./plan-1 --yes --tag
    """
    from streammeta.reconcile.apply import ApplyConfig, apply
    from streammeta.reconcile.plans.plan_folder import read_plan_file
    from streammeta.reconcile.run_reporter import apply_report

    started_ms = _now_ms()
    # Deletions must not be broken off, so a signal waits for the current batches.
    with reconcile_options.ending_event() as ending:
        config = ApplyConfig(delete=yes, is_ending=ending.is_set, **settings)
        with traces:
            result = apply(config, reconcile_options.tell_progress)
        run = apply_report(result, started_ms, _now_ms())
        # Without --connect, the plan names the controllers.
        connect = config.connect or read_plan_file(config.folder).connect
        reconcile_options.tell_controllers(run, connect, config.tls)
    _show_run(output, result)
    settled = _count_settled(result)
    _require_settled(
        "apply",
        result,
        f"ended by {ending.by}: {settled} of {settled + result.left} candidates were settled,"
        f" {result.left} remain",
    )


@reconcile.command("undo")
@_plan_folder_option
@_plan_store_option
@with_output
def undo_command(*, folder: Path, store: str | None, output: Output) -> None:
    """Restore all objects that `apply --quarantine` of this plan removed.

    Bytes, metadata and tags are unchanged. The modification time is new. The command never replaces
    an object that now exists under a key. It needs no controller, works for a plan of any age, and
    may be repeated. Exit code 1 with INCOMPLETE: an object is still in quarantine. With
    INTERRUPTED: SIGTERM or Ctrl-C ended it after the current batch, before all objects were
    checked. A second signal ends it at once.

    \b
    Example:
      streammeta reconcile undo --plan ./plan-1
    """
    reconcile_options.start_reconciliation()
    from streammeta.reconcile.cluster.identity import parse_store
    from streammeta.reconcile.undo import undo

    with reconcile_options.ending_event() as ending:
        address = None if store is None else parse_store(store)
        result = undo(folder, address, reconcile_options.tell_progress, ending.is_set)
    reconcile_options.show_tallies(
        output, "outcomes", "outcome", dict(sorted(result.outcomes.items()))
    )
    _require_settled(
        "undo",
        result,
        f"ended by {ending.by}: {_count_settled(result)} objects were settled, up to {result.left}"
        " candidates of the plan remain",
    )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _show_plan(output: Output, folder: Path, result: PlanResult) -> None:
    output.summary({"plan": str(folder), "report": str(folder / "report.html")})
    inventory = ("inventory",) if result.inventory else ()
    names = (*_PLAN_FACTS, *inventory, "repeated_rows")
    output.summary({name: getattr(result, name) for name in names})
    _show_losses(output, result)

    reconcile_options.show_tallies(output, "classes", "verdict", result.classes)
    guards = [
        (guard.name, "passed" if guard.passed else "failed", guard.detail)
        for guard in result.guards
    ]
    output.rows("guards", ("guard", "finding", "detail"), guards)
    if result.unknown:
        output.rows("unknown", ("unknown",), [(sentence,) for sentence in result.unknown])
    # A plan with a failed guard can't be applied, so there is no such next step.
    if not result.failed_guards:
        output.note(f"next: streammeta reconcile apply --plan {folder}")


def _show_losses(output: Output, result: PlanResult) -> None:
    if result.read:
        output.rows("read", ("finding", "objects"), result.read.items())
    if result.losses is None or not result.suspected:
        return
    counts = {name: getattr(result.losses, name) for name in ("objects", "streams", "ranges")}
    output.summary({f"lost_{name}": count for name, count in counts.items()})
    output.summary({"refuted_losses": result.losses.refuted})
    columns = ("verdict", "key", "stream_id", "start_offset", "end_offset", "committed_ms")
    first = [[getattr(loss, name) for name in columns] for loss in result.losses.first]
    output.rows("losses", columns, first)


def _require_whole(folder: Path, result: PlanResult) -> None:
    """Raise the most serious failure of a written plan, if any."""
    # Failed guards come first, because such a plan can't be applied at all.
    if result.failed_guards:
        names = ", ".join(guard.name for guard in result.failed_guards)
        raise CommandError(
            "GUARD",
            f"the plan {folder} can't be applied. Failed guards: {names}",
            result.failed_guards[0].detail,
            # Lost objects keep their exit code, also with other problems.
            exit_code=reconcile_options.EXIT_LOST if result.lost else EXIT_FAILED,
        )

    if result.losses is not None and result.lost:
        raise CommandError(
            "MISSING_OBJECTS",
            f"{result.lost} objects of the metadata are missing in the bucket or damaged,"
            f" with {result.losses.ranges} ranges of {result.losses.streams} streams. Their"
            " records are unreadable",
            f"restore them. {folder / 'losses'} lists keys, streams, offsets and times. The"
            " plan may be applied",
            exit_code=reconcile_options.EXIT_LOST,
        )

    if result.unknown:
        raise CommandError(
            "INCOMPLETE",
            "; ".join(result.unknown),
            "the plan may be applied. Correct this and make a new plan to learn the rest",
        )


def _count_settled(result: ApplyResult | UndoResult) -> int:
    return sum(tally.keys for tally in result.outcomes.values())


def _require_settled(command: str, result: ApplyResult | UndoResult, ended: str) -> None:
    """Raise the failure of an incomplete run, explained by `ended` if a signal ended it."""
    if result.left:
        raise CommandError(
            "INTERRUPTED", "; ".join((ended, *result.problems)), f"run {command} again for the rest"
        )
    if not result.complete:
        raise CommandError(
            "INCOMPLETE",
            "; ".join(result.problems) or "some candidates were not settled",
            f"correct this and run {command} again. Repeating it loses nothing",
        )


def _show_run(output: Output, result: ApplyResult) -> None:
    output.summary(
        {"run": str(result.run_folder), "dry_run": not result.deleted, "left": result.left}
    )
    reconcile_options.show_tallies(
        output, "outcomes", "outcome", dict(sorted(result.outcomes.items()))
    )
    output.rows("examples", ("key",), [(key,) for key in result.examples])
    if result.warning:
        output.rows("ahead_of_map", ("key", "detail"), result.ahead)
        output.text("warning", result.warning)
    if not result.deleted and result.complete:
        output.note("nothing was deleted. Repeat with --yes to delete")


@reconcile.command("watch")
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
    from streammeta.reconcile.watch import WatchConfig, exposition, watch

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
    with traces, reconcile_options.ending_event() as ending:
        last = watch(config, ending, tell, reconcile_options.tell_progress)
    _show_round(output, last)
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


def _show_round(output: Output, last: Round) -> None:
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
