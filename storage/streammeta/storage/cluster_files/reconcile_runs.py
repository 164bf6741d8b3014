"""The last runs of reconciliation, as one value among the cluster's keys: what status pages show.

Pure: knows neither who writes the value nor who shows it. Numbers are bounded and texts can be
encoded, so that a value that was read can always be shown; anything else is refused as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from streammeta.storage.parsing import DocumentError, parse_json

NAMESPACE = "_streammeta/reconcile"
KEY = "runs"

VERSION = 1
"""Version of the value; readers refuse any other."""

RUNS_MAX = 20
"""Runs that the value has, the newest ones."""

VALUE_MAX = 131_072
"""Size up to which a value is read, in bytes; that of the longest texts is less."""

TEXT_MAX = 200
"""Length up to which a text is kept, in characters."""

NUMBER_MAX = (1 << 63) - 1
TIME_MS_MAX = 253_402_300_799_000
"""The last second of the year 9999, in milliseconds since 1970."""


class RunsError(Exception):
    """A value is not one of runs, or is of another version; the message says what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: times in Unix milliseconds, numbers of keys and bytes; None: it does not tell.

    `kind` is plan, apply or round; `result` that of a round. `orphans` and `missing` are what a
    plan found, `deleted` what was deleted, moved to quarantine or tagged. `problem` says in a
    sentence what is wrong, if anything is. `succeeded`: nothing was left to find out or to settle.
    """

    started_ms: int
    ended_ms: int
    kind: str
    engine: str
    result: str
    problem: str
    succeeded: bool
    keys: int | None = None
    orphans: int | None = None
    orphan_bytes: int | None = None
    deleted: int | None = None
    missing: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """The last runs, the newest first, and what is remembered of runs before them.

    `last_success_ms` is the end of the last run that succeeded; 0: there was none. `orphan_bytes`
    and `missing` are of the last run that tells them; None: none did.
    """

    last_success_ms: int = 0
    orphan_bytes: int | None = None
    missing: int | None = None
    runs: tuple[Run, ...] = ()

    def followed_by(self, run: Run) -> Runs:
        """Return these with one more."""
        return Runs(
            last_success_ms=run.ended_ms if run.succeeded else self.last_success_ms,
            orphan_bytes=self.orphan_bytes if run.orphan_bytes is None else run.orphan_bytes,
            missing=self.missing if run.missing is None else run.missing,
            runs=(run, *self.runs)[:RUNS_MAX],
        )


def shortened(text: str) -> str:
    """Return a text as a run may have it."""
    valid = text.encode(errors="replace").decode()
    return valid if len(valid) <= TEXT_MAX else f"{valid[: TEXT_MAX - 3]}..."


def encode(runs: Runs) -> bytes:
    """Return the value."""
    members = {"version": VERSION, **asdict(runs)}
    return json.dumps(members, sort_keys=True, ensure_ascii=False).encode()


def decode(value: bytes) -> Runs:
    """Read a value; members that are not known are passed over.

    Raises:
        RunsError: it is none of this version.
    """
    if len(value) > VALUE_MAX:
        raise RunsError(f"it has {len(value)} bytes, at most {VALUE_MAX} are read")

    try:
        members = parse_json(value)
    except DocumentError as error:
        raise RunsError("it is not JSON") from error

    if not isinstance(members, dict):
        raise RunsError("it is not a JSON object")
    if members.get("version") != VERSION:
        raise RunsError(f"its version is not {VERSION}")

    runs = members.get("runs")
    if not isinstance(runs, list) or len(runs) > RUNS_MAX:
        raise RunsError(f"runs: must be a list of at most {RUNS_MAX}")
    return Runs(
        last_success_ms=_time(members, "last_success_ms"),
        orphan_bytes=_count(members, "orphan_bytes"),
        missing=_count(members, "missing"),
        runs=tuple(_run(each) for each in runs),
    )


def _run(members: Any) -> Run:
    if not isinstance(members, dict):
        raise RunsError("runs: must be JSON objects")
    read: Mapping[str, Callable[[Mapping[str, Any], str], Any]] = {
        "int": _time,
        "str": _text,
        "bool": _truth,
        "int | None": _count,
    }
    return Run(**{each.name: read[str(each.type)](members, each.name) for each in fields(Run)})


def _time(members: Mapping[str, Any], name: str) -> int:
    value = members.get(name)
    if type(value) is not int or not 0 <= value <= TIME_MS_MAX:
        raise RunsError(f"{name}: must be milliseconds since 1970")
    return value


def _count(members: Mapping[str, Any], name: str) -> int | None:
    value = members.get(name)
    if value is not None and (type(value) is not int or not 0 <= value <= NUMBER_MAX):
        raise RunsError(f"{name}: must be a number, 0 or more, or null")
    return value


def _truth(members: Mapping[str, Any], name: str) -> bool:
    value = members.get(name)
    if type(value) is not bool:
        raise RunsError(f"{name}: must be true or false")
    return value


def _text(members: Mapping[str, Any], name: str) -> str:
    value = members.get(name)
    if not isinstance(value, str) or shortened(value) != value:
        raise RunsError(f"{name}: must be a text of at most {TEXT_MAX} characters")
    return value
