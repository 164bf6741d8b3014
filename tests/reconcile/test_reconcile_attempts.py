"""Attempts of a Spark task have names of their own, whatever Spark calls them."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from streammeta.reconcile.vocabulary.attempts import ONLY_ATTEMPT, Attempt, OtherAttempts


def test_an_attempt_is_known_by_the_id_that_no_repeated_stage_gives_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pyspark import TaskContext

    from streammeta.reconcile.engines.spark_engine import _this_attempt

    assert _this_attempt() == ONLY_ATTEMPT
    contexts = iter(
        SimpleNamespace(
            partitionId=lambda: 4, attemptNumber=lambda: 0, taskAttemptId=lambda at=at: at
        )
        for at in (17, 40)
    )
    monkeypatch.setattr(TaskContext, "get", lambda: next(contexts))
    assert [_this_attempt(), _this_attempt()] == [Attempt(4, 17), Attempt(4, 40)]


def test_records_of_the_same_task_alone_are_read_and_each_once(tmp_path: Path) -> None:
    def record(attempt: Attempt, number: int, key: str) -> None:
        path = tmp_path / f"{attempt.name}-{number:06d}.jsonl"
        path.write_text(f'{{"key": "{key}"}}\n')

    others = OtherAttempts(tmp_path, Attempt(1, 5))
    others.look()
    record(Attempt(1, 5), 0, "own")
    record(Attempt(11, 6), 0, "of task 11")
    record(Attempt(1, 55), 0, "first")
    others.look()
    record(Attempt(1, 55), 1, "second")
    assert not others.has_begun("second"), "as of the last look"
    (tmp_path / f"{Attempt(1, 55).name}-000000.jsonl").write_text("no record any more")
    others.look()
    found = {key for key in ("own", "of task 11", "first", "second") if others.has_begun(key)}
    assert found == {"first", "second"}
