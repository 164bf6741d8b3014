"""Tries mutants in processes of their own, so that no edit leaks, and checks the check.

A mutant counts as caught only if the same seed or test passes with the code as it is: what fails
anyway proves nothing. Processes are forked from one that has loaded others' modules, but none of
the product that a mutant edits: loading is most of what a trial costs.
"""

import json
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock, Timer

from streammeta.cli.local.local_cluster import Child
from tests.kit.warm_start import WarmServer
from tests.mutants.mutant import Mutant, Simulated, Tested
from tests.mutants.trial import Trial

_ROOT = Path(__file__).resolve().parents[2]
_TIME_LIMIT_S = 600.0
_LOADED = (
    *("pytest", "numpy", "pyarrow.parquet", "grpc.aio", "google.protobuf.json_format", "structlog"),
    *("boto3", "yaml", "click", "jinja2", "cryptography.x509", "aiokafka", "confluent_kafka"),
)
_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(_ROOT)}
"""Copied here: pytest changes its own while threads start trials, and a copy may fail then."""


class TrialError(Exception):
    """A trial could not be made: the edit does not fit the code, or the process failed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is known of a mutant after its trials and those of the unchanged code."""

    mutant: Mutant
    trial: Trial
    failing_unchanged: tuple[int | None, ...]
    """Seeds, or None for a test, that fail without the edits too, and so prove nothing."""

    @property
    def is_caught(self) -> bool:
        """Whether the mutant was found by something that finds nothing in the real code."""
        return self.trial.caught

    def __str__(self) -> str:
        trial = self.trial
        word = "caught" if self.is_caught else "missed"
        if not self.is_caught:
            detail = f"nothing found by {self.mutant.caught_by}"
        elif trial.seed is not None:
            detail = f"{trial.runs:3d} seeds: {trial.how}"
        else:
            detail = trial.how
        if self.failing_unchanged:
            seeds = ", ".join("the test" if s is None else str(s) for s in self.failing_unchanged)
            detail += f"; prove nothing, as the unchanged code fails them too: {seeds}"
        return f"{word}  {trial.name:40s} {detail}"


def investigate(mutant: Mutant) -> Finding:
    """Try a mutant, and what caught it on the unchanged code; raises TrialError."""
    failing: list[int | None] = []
    runs = 0
    trial = run_trial(mutant.name)
    while trial.caught:
        runs += trial.runs
        seed = () if trial.seed is None else ("--seeds", f"{trial.seed}:{trial.seed + 1}")
        if not run_trial(mutant.name, "--unchanged", *seed).caught:
            return Finding(mutant, replace(trial, runs=runs), tuple(failing))
        failing.append(trial.seed)
        later = _after(mutant.caught_by, trial)
        if later is None:
            break
        trial = run_trial(mutant.name, "--seeds", later)
    return Finding(mutant, replace(trial, caught=False, runs=runs), tuple(failing))


def _after(caught_by: Simulated | Tested, trial: Trial) -> str | None:
    """Return the seeds that are left to try, as `--seeds` wants them."""
    if not isinstance(caught_by, Simulated) or trial.seed is None:
        return None
    start, end = trial.seed + 1, caught_by.seeds.stop
    return f"{start}:{end}" if start < end else None


def run_trial(*arguments: str) -> Trial:
    """Run `trial.py` with these arguments in a process of its own; raises TrialError."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("ab") as errors:
            words = ["tests.mutants.trial", *arguments]
            process = _server().start(words, errors.fileno(), _ENVIRONMENT)
        child = Child(arguments[0], process, log)
        limit = Timer(_TIME_LIMIT_S, process.kill)
        limit.start()
        assert process.stdout is not None
        output = process.stdout.read()
        limit.cancel()
        if child.wait_end(_TIME_LIMIT_S) != 0:
            limit_s = f"{_TIME_LIMIT_S:.0f} s"
            raise TrialError(
                f"{arguments[0]}: the trial failed, or had no end in {limit_s}:\n{child.log_tail()}"
            )
    return Trial(**json.loads(output.splitlines()[-1]))


_lock = Lock()
_servers: list[WarmServer] = []


def _server() -> WarmServer:
    """Return the process that forks. The first trial starts it, and it ends with this process."""
    with _lock:
        if not _servers:
            _servers.append(WarmServer(_LOADED))
        return _servers[0]
