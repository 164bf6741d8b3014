"""Continuous reconciliation: rounds of plan and apply, one after another, in one folder.

Each round makes a plan of its own and applies it under all guards, so that nothing is deleted here
that `plan` and `apply` would not delete. A round that fails is told, and the next one is tried.

    TIME-round-XXXX/  the plan of a round, with its report and its run
    status.json       the last round, replaced as a whole
    watch.lock        held by the process that works in the folder

Of rounds before the last few, those that changed nothing are deleted; of the others the large
tables are, while the plan, its candidates and the records of what was changed stay. Nothing else in
the folder is touched.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from streammeta.reconcile.apply import ApplyConfig, apply
from streammeta.reconcile.cluster.lease import new_run
from streammeta.reconcile.plan import PlanConfig, plan
from streammeta.reconcile.plans import plan_folder
from streammeta.reconcile.plans.plan_folder import PlanResult
from streammeta.reconcile.vocabulary.errors import ConfigurationError
from streammeta.reconcile.vocabulary.tables import Tally
from streammeta.rpc import tracing
from streammeta.storage import json_files
from streammeta.storage.durable_files import PosixFileSystem, replace_file
from streammeta.storage.errors import CorruptObjectError, StorageError
from streammeta.storage.private_files import READABLE_MODE

STATUS_FILE = "status.json"
LOCK_FILE = "watch.lock"

_ROUND = re.compile(r"[0-9]{8}T[0-9]{6}Z-round-[0-9a-f]{4}")
_DRAFT = re.compile(rf"\.{_ROUND.pattern}\.draft-[0-9a-f]{{8}}")
_TABLES = (plan_folder.VERDICTS, plan_folder.MAP, plan_folder.UPLOADS, plan_folder.LISTING)


class Ending(Protocol):
    """Set when rounds are to end; `threading.Event` has these methods too."""

    def is_set(self) -> bool:
        """Return True once it is set."""
        ...

    def wait(self, timeout: float) -> bool:
        """Wait until it is set, at most `timeout` seconds; returns whether it is."""
        ...


class RoundOutcome(enum.StrEnum):
    """Outcome of a round."""

    SETTLED = "settled"  # every candidate was settled, and nothing is wrong
    LOST = "lost"  # objects of the map are missing or damaged, confirmed; candidates were settled
    INCOMPLETE = "incomplete"  # something was not found out, or not deleted
    GUARD = "guard"  # a guard failed: nothing was applied
    FAILED = "failed"  # no plan, or no apply
    ENDED = "ended"  # given up because the process ends


SUCCESSES = (RoundOutcome.SETTLED, RoundOutcome.LOST)
"""Outcomes that leave nothing to find out or to settle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round: times in Unix milliseconds, bytes and keys by verdict and by outcome of a key.

    `plan` is the name of the plan's folder, empty without a plan. `problem` says in a sentence what
    is wrong, if anything is. `last_success_ms` is the end of the last round that was settled or
    found a loss, this one or one before; 0: there was none. `engine` is that of the plan, and
    `is_compared` tells that its orphans and losses are known.
    """

    outcome: RoundOutcome
    plan: str
    problem: str
    started_ms: int
    ended_ms: int
    last_success_ms: int
    engine: str = ""
    is_compared: bool = False
    lost: int = 0
    verdicts: Mapping[str, Tally] = field(default_factory=dict)
    outcomes: Mapping[str, Tally] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WatchConfig:
    """Rounds to make, `interval_s` seconds from the end of one to the start of the next.

    `plan` and `apply` are what a round does; their `folder` is that of all rounds. `kept` rounds
    stay whole. After `rounds` of them it ends; None: never.
    """

    plan: PlanConfig
    apply: ApplyConfig
    interval_s: float
    kept: int = 30
    rounds: int | None = None


class _EndedError(Exception):
    """The process is to end, so the round is given up."""


def watch(
    config: WatchConfig,
    ending: Ending,
    tell: Callable[[Round], None],
    progress: Callable[[str], None] = lambda _line: None,
) -> Round:
    """Make rounds until `ending` is set, or there were as many as asked for; returns the last one.

    A round under way is given up at its next stage, or after the batch that is being deleted.

    Raises:
        ConfigurationError: what was asked for makes no sense, or another process works in the
            folder.
        OSError: the folder can't be written to.
    """
    _check(config)
    folder = config.plan.folder
    folder.mkdir(parents=True, exist_ok=True)

    with _locked(folder):
        for draft in folder.iterdir():
            if _DRAFT.fullmatch(draft.name):  # of a process that was killed
                shutil.rmtree(draft, ignore_errors=True)
        last_success_ms = _last_success_ms(folder)
        for number in itertools.count(1):
            last = _one_round(config, ending, last_success_ms, progress)
            last_success_ms = last.last_success_ms
            text = json_files.encode(_status_of(last))
            replace_file(PosixFileSystem(mode=READABLE_MODE), folder / STATUS_FILE, [text])
            tell(last)
            _forget(folder, config.kept)
            if number == config.rounds or ending.wait(config.interval_s):
                break

    return last


def _check(config: WatchConfig) -> None:
    if config.interval_s < 1:
        raise ConfigurationError(f"--every is {config.interval_s:g} s, wanted at least 1 s")
    address = config.plan.inventory
    if address is not None and not address.partition("?")[0].endswith("/"):
        raise ConfigurationError(
            f"--inventory {address.partition('?')[0]} is one inventory, which each round would read"
            " again; wanted the prefix of all, with a slash at its end: s3://BUCKET/PATH/"
        )
    if config.kept < 1:
        raise ConfigurationError(f"--keep is {config.kept} rounds, wanted at least 1")
    if config.rounds is not None and config.rounds < 1:
        raise ConfigurationError(f"--rounds is {config.rounds}, wanted at least 1")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep a second process out of the folder; the lock goes with the process."""
    with (folder / LOCK_FILE).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigurationError(
                f"another process watches with the folder {folder}; end it, or name another folder"
            ) from error
        yield


@tracing.span("streammeta.reconcile.round")
def _one_round(
    config: WatchConfig,
    ending: Ending,
    last_success_ms: int,
    progress: Callable[[str], None],
) -> Round:
    def go_on(line: str) -> None:
        if ending.is_set():
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
        made = plan(replace(config.plan, folder=folder), go_on)
        found = _planned(found, folder.name, made)
        if not made.failed_guards:
            settings = replace(config.apply, folder=folder, is_ending=ending.is_set)
            done = apply(settings, go_on)
            found = replace(found, outcomes={str(o): t for o, t in done.outcomes.items()})
            if not done.complete:
                problem = "; ".join(done.problems) or "some candidates were not settled"
                found = replace(found, outcome=RoundOutcome.INCOMPLETE, problem=problem)
            if done.left and ending.is_set():
                found = replace(found, outcome=RoundOutcome.ENDED, problem="ended by a signal")
            problem = "; ".join(filter(None, (found.problem, done.warning)))
            found = replace(found, problem=problem)
    except ConfigurationError:
        raise  # no round would go better
    except _EndedError:
        found = replace(found, outcome=RoundOutcome.ENDED, problem="ended by a signal")
    except (StorageError, OSError) as error:
        found = replace(found, outcome=RoundOutcome.FAILED, problem=str(error))
    ended_ms = time.time_ns() // 1_000_000
    tracing.note({"outcome": str(found.outcome)})
    if found.outcome in SUCCESSES:
        last_success_ms = ended_ms
    return replace(found, ended_ms=ended_ms, last_success_ms=last_success_ms)


def judged(made: PlanResult) -> tuple[RoundOutcome, str]:
    """Return the outcome of a plan alone, and what is wrong."""
    outcome, problem = RoundOutcome.SETTLED, ""
    if made.unknown:
        outcome, problem = RoundOutcome.INCOMPLETE, "; ".join(made.unknown)
    if made.lost:
        outcome = RoundOutcome.LOST
        problem = f"{made.lost} objects of the map are missing or damaged"
    if made.failed_guards:
        outcome = RoundOutcome.GUARD
        problem = "; ".join(f"{guard.name}: {guard.detail}" for guard in made.failed_guards)
    return outcome, problem


def _planned(basis: Round, name: str, made: PlanResult) -> Round:
    """Add what the plan has found."""
    outcome, problem = judged(made)
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


def _forget(folder: Path, kept: int) -> None:
    """Make the rounds before the last `kept` smaller, or delete them."""
    rounds = sorted(one for one in folder.iterdir() if _ROUND.fullmatch(one.name))
    for one in rounds[:-kept]:
        if one.is_symlink() or not (one / plan_folder.PLAN_FILE).exists():
            continue
        if any((one / plan_folder.RUNS).glob(f"*/{plan_folder.UNDO}")):
            for table in _TABLES:
                shutil.rmtree(one / table, ignore_errors=True)
        else:
            shutil.rmtree(one, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Status:
    """The content of status.json."""

    outcome: str
    plan: str
    problem: str
    started_ms: int
    ended_ms: int
    last_success_ms: int
    lost: int


def _status_of(one: Round) -> _Status:
    return _Status(
        outcome=str(one.outcome),
        plan=one.plan,
        problem=one.problem,
        started_ms=one.started_ms,
        ended_ms=one.ended_ms,
        last_success_ms=one.last_success_ms,
        lost=one.lost,
    )


def _last_success_ms(folder: Path) -> int:
    """When a round succeeded last, of this process or one before; 0: none did, or none says so."""
    with suppress(FileNotFoundError, CorruptObjectError):
        data = (folder / STATUS_FILE).read_bytes()
        return json_files.decode(_Status, STATUS_FILE, data).last_success_ms
    return 0
