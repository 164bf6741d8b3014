"""The value of the last runs: bounded, read back as written, and refused if it is anything else."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from streammeta.storage.cluster_files.reconcile_runs import (
    RUNS_MAX,
    TEXT_MAX,
    TIME_MS_MAX,
    VALUE_MAX,
    Run,
    Runs,
    RunsError,
    decode,
    encode,
    shorten_text,
)

RUN = Run(
    started_ms=1_000,
    ended_ms=2_000,
    kind="plan",
    engine="local",
    result="settled",
    problem="",
    succeeded=True,
    keys=9,
    orphans=2,
    orphan_bytes=20,
    missing=0,
)
FAILED = replace(RUN, result="failed", succeeded=False, orphan_bytes=None, missing=None)


def test_runs_are_read_as_written() -> None:
    runs = Runs().followed_by(RUN).followed_by(FAILED)
    assert decode(encode(runs)) == runs
    assert decode(encode(Runs())) == Runs()


def test_the_newest_runs_are_kept_and_what_was_known_before_is_remembered() -> None:
    runs = Runs().followed_by(RUN)
    for number in range(RUNS_MAX + 3):
        runs = runs.followed_by(replace(FAILED, ended_ms=3_000 + number))
    assert [each.ended_ms for each in runs.runs] == [3_022 - at for at in range(RUNS_MAX)]
    assert (runs.last_success_ms, runs.orphan_bytes, runs.missing) == (2_000, 20, 0)


@pytest.mark.parametrize("letter", ["\0", "\U0001f600"])
def test_the_largest_value_is_read(letter: str) -> None:
    text = letter * TEXT_MAX
    large = replace(RUN, kind=text, engine=text, result=text, problem=text)
    runs = Runs(runs=(large,) * RUNS_MAX)
    assert decode(encode(runs)) == runs
    assert len(encode(runs)) <= VALUE_MAX


@pytest.mark.parametrize(
    ("text", "kept"),
    [("a" * 200, "a" * 200), ("a" * 201, "a" * 197 + "..."), ("\ud800", "?"), ("", "")],
)
def test_texts_are_shortened_to_what_can_be_shown(text: str, kept: str) -> None:
    assert shorten_text(text) == kept


def value(**changes: Any) -> bytes:
    return json.dumps({"version": 1, **asdict(Runs(runs=(RUN,))), **changes}).encode()


def with_run(**changes: Any) -> bytes:
    return value(runs=[{**asdict(RUN), **changes}])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 60_000, "not JSON"),
        (b"9" * 6_000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"version": 2}', "version of the value is not 1"),
        (b" " * (VALUE_MAX + 1), "131073 bytes"),
        (value(runs={}), "runs: must be a list"),
        (value(runs=[asdict(RUN)] * (RUNS_MAX + 1)), "at most 20"),
        (value(runs=[7]), "runs: must be JSON objects"),
        (value(last_success_ms=None), "last_success_ms"),
        (value(missing=-1), "missing"),
        (value(orphan_bytes=1 << 63), "orphan_bytes"),
        (with_run(started_ms=TIME_MS_MAX + 1), "started_ms"),
        (with_run(ended_ms=True), "ended_ms"),
        (with_run(ended_ms=1.5), "ended_ms"),
        (with_run(keys=float("nan")), "keys"),
        (with_run(succeeded=1), "succeeded"),
        (with_run(kind=None), "kind"),
        (with_run(problem="x" * (TEXT_MAX + 1)), "problem"),
        (with_run(result="\ud800"), "result"),
    ],
)
def test_anything_else_is_refused(given: bytes, told: str) -> None:
    assert decode(value()).runs == (RUN,)
    with pytest.raises(RunsError, match=told):
        decode(given)
