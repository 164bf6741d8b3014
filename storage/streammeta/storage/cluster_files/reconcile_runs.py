"""Record of the last reconcile runs, a value among the cluster's keys that status pages show.

Decoding is strict: numbers are bounded and texts can be encoded, so a page can display every
decoded value. Any other value is rejected as a whole. Pure.
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
"""Version of the value. Readers reject any other."""

RUNS_MAX = 20
"""Maximum number of runs in the value. Older runs are dropped."""

VALUE_MAX = 131_072
"""Maximum size of a value in bytes, more than the longest texts need."""

TEXT_MAX = 200
"""Maximum length of a text in characters."""

NUMBER_MAX = (1 << 63) - 1
# `datetime` can't show later times.
TIME_MS_MAX = 253_402_300_799_000
"""The last second of the year 9999, in milliseconds since 1970."""


class RunsError(Exception):
    """A value does not contain runs, or has another version. The message names the problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: times in Unix ms, numbers of keys and bytes, or None if the run did not count them.

    `kind` is plan, apply or round, and `result` the result of a round. A plan finds `orphans` and
    `missing` objects. `deleted` counts objects deleted, moved to quarantine or tagged. `problem` is
    a sentence, or empty. A run `succeeded` if it left nothing unknown and nothing to do.
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
    """The last runs, newest first, and figures that outlive dropped runs.

    `last_success_ms` is the end of the last successful run, or 0 without one. `orphan_bytes` and
    `missing` come from the last run that counted them, or are None.
    """

    last_success_ms: int = 0
    orphan_bytes: int | None = None
    missing: int | None = None
    runs: tuple[Run, ...] = ()

    def followed_by(self, run: Run) -> Runs:
        """Return the runs with a new one in front."""
        return Runs(
            last_success_ms=run.ended_ms if run.succeeded else self.last_success_ms,
            orphan_bytes=self.orphan_bytes if run.orphan_bytes is None else run.orphan_bytes,
            missing=self.missing if run.missing is None else run.missing,
            runs=(run, *self.runs)[:RUNS_MAX],
        )


def shorten_text(text: str) -> str:
    """Return a text that a run may contain: valid Unicode, at most `TEXT_MAX` characters."""
    # Lone surrogates, as from file names, can't be encoded as UTF-8.
    valid = text.encode(errors="replace").decode()
    return valid if len(valid) <= TEXT_MAX else f"{valid[: TEXT_MAX - 3]}..."


def encode(runs: Runs) -> bytes:
    """Encode the value."""
    members = {"version": VERSION, **asdict(runs)}
    return json.dumps(members, sort_keys=True, ensure_ascii=False).encode()


def decode(value: bytes) -> Runs:
    """Decode a value, ignoring unknown members.

    Raises:
        RunsError: the value is invalid or has another version.
    """
    if len(value) > VALUE_MAX:
        raise RunsError(f"value has {len(value)} bytes, expected at most {VALUE_MAX}")

    try:
        members = parse_json(value)
    except DocumentError as error:
        raise RunsError("value is not JSON") from error

    if not isinstance(members, dict):
        raise RunsError("value is not a JSON object")
    if members.get("version") != VERSION:
        raise RunsError(f"version of the value is not {VERSION}")

    runs = members.get("runs")
    if not isinstance(runs, list) or len(runs) > RUNS_MAX:
        raise RunsError(f"runs: must be a list of at most {RUNS_MAX}")
    return Runs(
        last_success_ms=_time(members, "last_success_ms"),
        orphan_bytes=_count(members, "orphan_bytes"),
        missing=_count(members, "missing"),
        runs=tuple(_decode_run(run) for run in runs),
    )


def _decode_run(members: Any) -> Run:
    if not isinstance(members, dict):
        raise RunsError("runs: must be JSON objects")
    # The dataclass is the schema: each field's annotation selects its decoder.
    read: Mapping[str, Callable[[Mapping[str, Any], str], Any]] = {
        "int": _time,
        "str": _text,
        "bool": _truth,
        "int | None": _count,
    }
    return Run(**{field.name: read[str(field.type)](members, field.name) for field in fields(Run)})


def _time(members: Mapping[str, Any], name: str) -> int:
    value = members.get(name)
    # `bool` is a subclass of `int`.
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
    if not isinstance(value, str) or shorten_text(value) != value:
        raise RunsError(f"{name}: must be a text of at most {TEXT_MAX} characters")
    return value
