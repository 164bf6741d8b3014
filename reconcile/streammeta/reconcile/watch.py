"""Continuous reconciliation: rounds of plan and apply in one folder.

Each round makes a new plan and applies it under all guards, so it deletes only keys that `plan` and
`apply` would delete. A failed round is reported and the next one runs.

    TIME-round-XXXX/  the plan of a round, with its report and its run
    status.json       the last round, replaced atomically
    watch.lock        locked by the process that works in the folder

The last few rounds stay whole. Older rounds without changes are deleted. Older rounds with changes
lose their large tables, while the plan, its candidates and the undo records stay. Other files in
the folder are not touched.
"""

from __future__ import annotations

import enum
import fcntl
import itertools
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Protocol

from streammeta.reconcile.apply import ApplyConfig, apply
from streammeta.reconcile.cluster.lease import new_run
from streammeta.reconcile.deletion.order import Outcome
from streammeta.reconcile.plan import PlanConfig, plan
from streammeta.reconcile.plans import plan_folder
from streammeta.reconcile.vocabulary import tables, verdicts
from streammeta.reconcile.vocabulary.errors import ConfigurationError
from streammeta.reconcile.vocabulary.tables import Tally
from streammeta.rpc import tracing
from streammeta.storage import errors, json_files
from streammeta.storage.durable_files import READABLE_MODE, PosixFileSystem, replace_file

STATUS_FILE = "status.json"
LOCK_FILE = "watch.lock"

_ROUND = re.compile(r"[0-9]{8}T[0-9]{6}Z-round-[0-9a-f]{4}")
_DRAFT = re.compile(rf"\.{_ROUND.pattern}\.draft-[0-9a-f]{{8}}")
_TABLES = (plan_folder.VERDICTS, plan_folder.MAP, plan_folder.UPLOADS, plan_folder.LISTING)


class Ending(Protocol):
    """Event that ends the rounds, with a subset of the methods of `threading.Event`."""

    def is_set(self) -> bool:
        """Return whether the event is set."""
        ...

    def wait(self, timeout: float) -> bool:
        """Wait for the event, at most `timeout` seconds, and return whether it is set."""
        ...


class RoundOutcome(enum.StrEnum):
    """Outcome of a round."""

    SETTLED = "settled"  # every candidate was settled, without a problem
    LOST = "lost"  # objects are confirmed missing or damaged, and candidates were settled
    INCOMPLETE = "incomplete"  # a fact is unknown, or a candidate was not deleted
    GUARD = "guard"  # a guard failed, and nothing was applied
    FAILED = "failed"  # no plan, or no apply
    ENDED = "ended"  # aborted because the process ends


SUCCESSES = (RoundOutcome.SETTLED, RoundOutcome.LOST)
"""Outcomes that leave nothing unknown and nothing to settle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Content of status.json."""

    outcome: str
    plan: str
    problem: str
    started_ms: int
    ended_ms: int
    last_success_ms: int
    lost: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Round(Status):
    """A round: times in Unix ms, bytes and keys by verdict and by outcome of a key.

    `plan` is the name of the plan's folder, empty without a plan. `problem` is a sentence, or
    empty. `last_success_ms` is the end of the last round, up to this one, that was settled or found
    a loss, or 0 without one. `engine` is the plan's engine. `is_compared` says whether the plan's
    orphans and losses are known.
    """

    outcome: RoundOutcome
    engine: str = ""
    is_compared: bool = False
    verdicts: Mapping[str, Tally] = field(default_factory=dict)
    outcomes: Mapping[str, Tally] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WatchConfig:
    """Rounds with `interval_s` seconds from the end of one to the start of the next.

    `plan` and `apply` configure a round. Their `folder` contains all rounds. The last `kept` rounds
    stay whole. `rounds` is the number of rounds, or None for no limit.
    """

    plan: PlanConfig
    apply: ApplyConfig
    interval_s: float
    kept: int = 30
    rounds: int | None = None


class _EndedError(Exception):
    """The process ends, so the round is aborted."""


def watch(
    config: WatchConfig,
    ending: Ending,
    on_round: Callable[[Round], None],
    progress: Callable[[str], None] = lambda _line: None,
) -> Round:
    """Run rounds until `ending` is set or the limit is reached, and return the last one.

    A running round is aborted at its next stage, or after the current batch of deletions.
    `on_round` is called after each round.

    Raises:
        ConfigurationError: the options are contradictory, or another process works in the folder.
        OSError: the folder is not writable.
    """
    _check(config)
    folder = config.plan.folder
    folder.mkdir(parents=True, exist_ok=True)

    with _locked(folder):
        for draft in folder.iterdir():
            if _DRAFT.fullmatch(draft.name):  # left by a killed process
                shutil.rmtree(draft, ignore_errors=True)
        # From the status of the previous process, so that a restart does not reset the metric.
        last_success_ms = _last_success_ms(folder)
        for number in itertools.count(1):
            last = _run_round(config, ending, last_success_ms, progress)
            last_success_ms = last.last_success_ms
            # Before the callback: monitoring reads this file, and the callback may fail.
            status = Status(**{field.name: getattr(last, field.name) for field in fields(Status)})
            text = json_files.encode(status)
            replace_file(PosixFileSystem(mode=READABLE_MODE), folder / STATUS_FILE, [text])
            on_round(last)
            _clean_up(folder, config.kept)
            # The pause is also the wait for the signal, so a stop is immediate between rounds.
            if number == config.rounds or ending.wait(config.interval_s):
                break

    return last


def _check(config: WatchConfig) -> None:
    if config.interval_s < 1:
        raise ConfigurationError(f"--every is {config.interval_s:g} s, expected at least 1 s")
    address = config.plan.inventory
    if address is not None and not address.partition("?")[0].endswith("/"):
        raise ConfigurationError(
            f"--inventory {address.partition('?')[0]} names one inventory, which each round would"
            " read again, expected the prefix of all inventories with a final slash:"
            " s3://BUCKET/PATH/"
        )
    if config.kept < 1:
        raise ConfigurationError(f"--keep is {config.kept} rounds, expected at least 1")
    if config.rounds is not None and config.rounds < 1:
        raise ConfigurationError(f"--rounds is {config.rounds}, expected at least 1")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder against other processes. The kernel releases the lock with the process."""
    with (folder / LOCK_FILE).open("ab") as file:
        try:
            # The file is never deleted: with a new inode two processes could each hold a lock.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigurationError(
                f"another process watches with the folder {folder}. Stop it, or use another folder"
            ) from error
        yield


@tracing.traced("streammeta.reconcile.round")
def _run_round(
    config: WatchConfig,
    ending: Ending,
    last_success_ms: int,
    progress: Callable[[str], None],
) -> Round:
    def report_progress(line: str) -> None:
        if ending.is_set():
            # Planning has no other place to stop: each stage reports progress at its start.
            raise _EndedError
        progress(line)

    started_ms = time.time_ns() // 1_000_000
    folder = config.plan.folder / new_run("round")
    found = Round(
        outcome=RoundOutcome.FAILED,
        plan="",
        problem="",
        started_ms=started_ms,
        ended_ms=started_ms,
        last_success_ms=last_success_ms,
    )
    try:
        made = plan(replace(config.plan, folder=folder), report_progress)
        found = _add_plan(found, folder.name, made)
        if not made.failed_guards:
            settings = replace(config.apply, folder=folder, is_ending=ending.is_set)
            done = apply(settings, report_progress)
            outcomes = {str(outcome): tally for outcome, tally in done.outcomes.items()}
            found = replace(found, outcomes=outcomes)
            if not done.complete:
                problem = "; ".join(done.problems) or "some candidates were not settled"
                found = replace(found, outcome=RoundOutcome.INCOMPLETE, problem=problem)
            # Candidates may also be left without a signal, after a failed task.
            if done.left and ending.is_set():
                found = replace(found, outcome=RoundOutcome.ENDED, problem="ended by a signal")
            problem = "; ".join(filter(None, (found.problem, done.warning)))
            found = replace(found, problem=problem)
    except ConfigurationError:
        raise  # every later round would fail too
    except _EndedError:
        found = replace(found, outcome=RoundOutcome.ENDED, problem="ended by a signal")
    except (errors.StorageError, OSError) as error:
        found = replace(found, outcome=RoundOutcome.FAILED, problem=str(error))

    ended_ms = time.time_ns() // 1_000_000
    tracing.note({"outcome": str(found.outcome)})
    if found.outcome in SUCCESSES:
        last_success_ms = ended_ms
    return replace(found, ended_ms=ended_ms, last_success_ms=last_success_ms)


def judge_plan(made: plan_folder.PlanResult) -> tuple[RoundOutcome, str]:
    """Return the outcome of a plan, and its problem or an empty string."""
    outcome, problem = RoundOutcome.SETTLED, ""
    # In ascending order of importance. The last match wins.
    if made.unknown:
        outcome, problem = RoundOutcome.INCOMPLETE, "; ".join(made.unknown)
    if made.lost:
        outcome = RoundOutcome.LOST
        problem = f"{made.lost} objects in the metadata are missing or damaged"
    if made.failed_guards:
        outcome = RoundOutcome.GUARD
        problem = "; ".join(f"{guard.name}: {guard.detail}" for guard in made.failed_guards)
    return outcome, problem


def _add_plan(basis: Round, name: str, made: plan_folder.PlanResult) -> Round:
    """Add the plan's findings."""
    outcome, problem = judge_plan(made)
    return replace(
        basis,
        outcome=outcome,
        plan=name,
        problem=problem,
        engine=made.engine,
        is_compared=made.is_compared,
        lost=made.lost,
        verdicts={str(verdict): tally for verdict, tally in made.classes.items()},
    )


def _clean_up(folder: Path, kept: int) -> None:
    """Shrink or delete the rounds before the last `kept`."""
    rounds = sorted(path for path in folder.iterdir() if _ROUND.fullmatch(path.name))
    for old in rounds[:-kept]:
        # Never follow links, or delete a folder that is not a round.
        if old.is_symlink() or not (old / plan_folder.PLAN_FILE).exists():
            continue

        if any((old / plan_folder.RUNS).glob(f"*/{plan_folder.UNDO}")):
            for table in _TABLES:
                shutil.rmtree(old / table, ignore_errors=True)
        else:
            shutil.rmtree(old, ignore_errors=True)


def _last_success_ms(folder: Path) -> int:
    """Return the time of the last successful round from status.json, or 0 if unknown."""
    with suppress(FileNotFoundError, errors.CorruptObjectError):
        data = (folder / STATUS_FILE).read_bytes()
        return json_files.decode(Status, STATUS_FILE, data).last_success_ms
    return 0


METRICS = {
    "streammeta_reconcile_last_round_timestamp_seconds": "End of the last round.",
    "streammeta_reconcile_last_success_timestamp_seconds": (
        "End of the last round that settled every candidate, 0 before the first."
    ),
    "streammeta_reconcile_last_round_duration_seconds": "Time that the last round took.",
    "streammeta_reconcile_last_round_outcome": "1 for the outcome of the last round, else 0.",
    "streammeta_reconcile_lost_objects": "Objects of the metadata missing or damaged, confirmed.",
    "streammeta_reconcile_keys": "Keys of the last round, by verdict.",
    "streammeta_reconcile_bytes": "Bytes of the last round, by verdict.",
    "streammeta_reconcile_candidates": "Candidates of the last round, by what became of them.",
}
"""Gauges of the last round, by name. The label `store` is the bucket and its endpoint."""


def exposition(last: Round, place: str) -> str:
    """Return the last round in the format of Prometheus' textfile collector."""
    series: dict[str, list[tuple[str, float]]] = {
        "last_round_timestamp_seconds": [("", last.ended_ms / 1000)],
        "last_success_timestamp_seconds": [("", last.last_success_ms / 1000)],
        "last_round_duration_seconds": [("", (last.ended_ms - last.started_ms) / 1000)],
        "last_round_outcome": [
            (f',outcome="{outcome}"', int(outcome is last.outcome)) for outcome in RoundOutcome
        ],
        "lost_objects": [("", last.lost)],
        "keys": [
            (f',verdict="{verdict}"', last.verdicts.get(verdict, tables.Tally()).keys)
            for verdict in verdicts.Verdict
        ],
        "bytes": [
            (f',verdict="{verdict}"', last.verdicts.get(verdict, tables.Tally()).size)
            for verdict in verdicts.Verdict
        ],
        "candidates": [
            (f',outcome="{outcome}"', last.outcomes.get(outcome, tables.Tally()).keys)
            for outcome in Outcome
        ],
    }
    store = place.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return "".join(
        f"# HELP {name} {meaning}\n# TYPE {name} gauge\n"
        + "".join(
            f'{name}{{store="{store}"{labels}}} {value}\n'
            for labels, value in series[name.removeprefix("streammeta_reconcile_")]
        )
        for name, meaning in METRICS.items()
    )
