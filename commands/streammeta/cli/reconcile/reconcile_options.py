"""Parts that commands of `streammeta reconcile` share: options, progress, tallies, signals.

The first SIGTERM or Ctrl-C ends the command, at once or after the current work, and a second one
the process.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from streammeta.cli.framework import output, signal_event
from streammeta.cli.framework.client import Command, add_options
from streammeta.cli.framework.output import Duration, Output
from streammeta.cli.framework.tracing import exporting_traces, tracing_option
from streammeta.storage.installation import optional_packages

if TYPE_CHECKING:
    from streammeta.reconcile.vocabulary.tables import Tally
    from streammeta.storage.cluster_files.reconcile_runs import Run
    from streammeta.tls.files import CallerFiles


EXIT_LOST = 3
"""Exit code of a plan that has confirmed missing or damaged objects."""

SHARD_DIGITS: Mapping[str, int | None] = {"auto": None, "16": 1, "256": 2}
"""Values of `--shards`, with the digits of keys at which they cut. None adapts to the bucket."""


_limit_options = add_options(
    # Objects are uploaded before they are committed, so young unknown objects stay.
    click.option(
        "--grace",
        "grace_ms",
        type=Duration(),
        default="1h",
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
        help="Reject a plan that would delete more than this fraction of the cluster's keys.",
    ),
    click.option(
        "--max-candidates",
        type=click.IntRange(min=0),
        default=10_000,
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
        help="Granularity of the listing. auto adapts to the number of keys.",
    ),
)
removal_options = add_options(
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
        help="Maximum number of keys to delete per second.",
    ),
)
"""Adds the method and the rate of deletion."""

_engine_options = add_options(
    click.option(
        "--wait",
        "patience_s",
        type=click.FloatRange(min=0),
        default=15.0,
        help="Seconds to search for a leader.",
    ),
    click.option(
        "--engine",
        type=click.Choice(["auto", "local", "spark"]),
        default="auto",
        help="Engine: local is this process. auto selects Spark above 20,000,000 keys.",
    ),
    click.option(
        "--master",
        help="Master of Spark. [default: the master of spark-submit, or else local[2]]",
    ),
    click.option("--driver-memory", default="1g", help="Memory of Spark's driver."),
    tracing_option("the phases of the run and its calls to controllers"),
)


def tell_progress(line: str) -> None:
    """Announce the next phase."""
    # Standard output has the result only.
    click.echo(f"{line} ...", err=True)


def with_limits(command: Command) -> Command:
    """Add the options that protect objects and reject plans: arguments as in `PlanConfig`."""

    @functools.wraps(command)
    def run(*, grace_ms: int, unsafe_grace_ms: int | None, shards: str, **others: Any) -> None:
        is_unsafe = unsafe_grace_ms is not None
        command(
            grace_ms=unsafe_grace_ms if is_unsafe else grace_ms,
            unsafe_grace=is_unsafe,
            shard_digits=SHARD_DIGITS[shards],
            **others,
        )

    return _limit_options(run)


def with_engine(command: Command) -> Command:
    """Add the engine's options, and start Arrow: arguments `engine`, `spark` and `patience_s`.

    The argument `store` becomes a `StoreAddress`. The argument `traces` is a context manager that
    traces the body if `--tracing` is set.
    """

    @functools.wraps(command)
    def run(
        *, engine: str, master: str | None, driver_memory: str, tracing: bool, **others: Any
    ) -> None:
        start_reconciliation()
        from streammeta.reconcile.cluster.identity import parse_store
        from streammeta.reconcile.engines.engine import EngineName
        from streammeta.reconcile.engines.spark_session import SparkConfig
        from streammeta.reconcile.engines.task_tracing import SERVICE

        if others["store"] is not None:
            others["store"] = parse_store(others["store"])
        command(
            engine=EngineName(engine),
            spark=SparkConfig(master=master, driver_memory=driver_memory),
            traces=exporting_traces(SERVICE, wanted=tracing),
            **others,
        )

    return _engine_options(run)


def start_reconciliation() -> None:
    """Import the packages of reconciliation. The error for a missing one names their extra."""
    with optional_packages("reconciliation", "reconcile"):
        from streammeta.reconcile.parquet.arrow_start import start_arrow

    # Before other threads start, because it hides pandas from all imports for a moment.
    start_arrow()


def tell_controllers(run: Run, connect: Sequence[str], tls: CallerFiles | None) -> None:
    """Add a run to the runs on status pages. A failure is a warning on stderr."""
    from streammeta.reconcile.run_reporter import report_run

    problem = report_run(run, connect, tls)
    if problem:
        click.echo(f"warning: {problem}", err=True)


def show_tallies(output: Output, name: str, column: str, tallies: Mapping[Any, Tally]) -> None:
    """Print a table of keys and bytes by verdict or outcome."""
    rows = [(str(value), tally.keys, tally.size) for value, tally in tallies.items()]
    output.rows(name, (column, "keys", "bytes"), rows)


_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STDERR = 2


class Ending(signal_event.SignalEvent):
    """Event that the first signal sets. `by` is its name."""

    by = ""


# A KeyboardInterrupt passes through `except Exception` in libraries.
class _SignalError(KeyboardInterrupt):
    """Raised by the first signal, wherever the main thread is."""


@contextmanager
def interruptible(done: str, advice: str) -> Iterator[None]:
    """Let the first signal interrupt the block. Its `finally` clauses run.

    An interrupted library may raise its own error.

    Raises:
        CommandError: INTERRUPTED, with the finished work and the next step.
    """
    struck: list[str] = []

    def end(number: int, _frame: FrameType | None) -> None:
        # Noted before raising, because a library may turn the exception into another one.
        struck.append(signal.Signals(number).name)
        raise _SignalError(*struck)

    try:
        with _first_signal(end):
            yield
    except (_SignalError, Exception):
        if not struck:
            raise
        raise output.CommandError("INTERRUPTED", f"ended by {struck[0]}: {done}", advice) from None


@contextmanager
def ending_event() -> Iterator[Ending]:
    """Return an event that the first signal sets and announces."""
    ending = Ending()

    def end(number: int, _frame: FrameType | None) -> None:
        # The name comes first: whoever sees the event may read it.
        ending.by = signal.Signals(number).name
        ending.set()
        line = f"{ending.by}: stopping after the current work. Another signal stops at once\n"
        # Past the stream, which refuses a line in the midst of another.
        with suppress(OSError):
            os.write(_STDERR, line.encode())

    with _first_signal(end):
        yield ending


@contextmanager
def _first_signal(act: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let the first signal within the block call `act`, and restore the former handlers.

    Only the main thread receives signals. In other threads the block runs unchanged.
    """
    has_come = False

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def once(number: int, frame: FrameType | None) -> None:
        nonlocal has_come
        # Restored before anything else, so that a second signal ends the process.
        restore()
        if has_come:  # what ran meanwhile has put this handler back
            signal.raise_signal(number)
        else:
            has_come = True
            act(number, frame)

    for number in _SIGNALS:
        signal.signal(number, once)
    try:
        yield
    finally:
        restore()
