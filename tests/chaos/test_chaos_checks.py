"""The checks after a run find what they are there to find."""

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.chaos_checks import (
    check_histories,
    check_logs,
    check_no_commit_lost,
    check_no_write_lost,
    longest_gap_s,
)
from tests.linearizability import models
from tests.linearizability.history import UNKNOWN, Operation


def put(value: str, invoked: int, returned: int | None) -> Operation[Any, Any]:
    answer = UNKNOWN if returned is None else models.KVAnswer(True, value, invoked + 1)
    return Operation("client", "key", models.Put(value), invoked, returned, answer)


def delete(value: str, version: int, invoked: int) -> Operation[Any, Any]:
    answer = models.KVAnswer(True, value, version)
    return Operation("client", "key", models.Delete(), invoked, invoked + 1, answer)


def last_read(value: str | None, version: int = 0) -> Operation[Any, Any]:
    return Operation(
        "client", "key", models.Get(), 1000, 1001, models.KVAnswer(True, value, version)
    )


def test_a_value_may_be_overwritten_by_whatever_did_not_end_before() -> None:
    check_no_write_lost([put("a", 0, 5), put("b", 3, 9), last_read("a", 1)])
    check_no_write_lost([put("a", 0, None), put("b", 3, 9), last_read("a", 1)])
    check_no_write_lost([put("a", 0, 5), delete("a", 1, 7), last_read(None)])


@pytest.mark.parametrize("value", ["a", None, "never written"])
def test_a_lost_write_is_found(value: str | None) -> None:
    with pytest.raises(AssertionError, match=r"lost|never written"):
        check_no_write_lost([put("a", 0, 1), put("b", 3, 9), last_read(value)])


def test_a_stale_read_is_found() -> None:
    stale = Operation("client", "key", models.Get(), 10, 11, models.KVAnswer(True, "a", 1))
    check_histories([put("a", 0, 1), stale, last_read("a", 1)], [])

    with pytest.raises(AssertionError, match="not linearizable"):
        check_histories([put("a", 0, 1), put("b", 3, 9), stale, last_read("b", 4)], [])


def commit(stream: str, object_id: int, *, known: bool = True) -> Operation[Any, Any]:
    returned, answer = (1, models.Committed()) if known else (None, UNKNOWN)
    return Operation("client", stream, models.CommitRange(object_id, 0, 5), 0, returned, answer)


def objects(stream: str, *object_ids: int) -> Operation[Any, Any]:
    return Operation("client", stream, models.ReadObjects(), 8, 9, models.Objects(object_ids))


def test_a_lost_commit_and_half_a_commit_are_found() -> None:
    check_no_commit_lost([commit("1", 7), commit("2", 7), objects("1", 7), objects("2", 7)])
    unknown = [commit("1", 7, known=False), commit("2", 7, known=False)]
    check_no_commit_lost([*unknown, objects("1"), objects("2")])

    with pytest.raises(AssertionError, match="lost"):
        check_no_commit_lost([commit("1", 7), objects("1", 6)])
    with pytest.raises(AssertionError, match="object 7"):
        check_no_commit_lost([*unknown, objects("1", 7), objects("2")])


def test_errors_in_logs_are_found_unless_expected(tmp_path: Path) -> None:
    log = tmp_path / "controller.log"
    log.write_text('{"event": "leader_elected", "level": "info"}\n')
    check_logs([log])

    log.write_text('{"event": "disk_full", "level": "error"}\n')
    check_logs([log], ["disk_full"])
    with pytest.raises(AssertionError, match="disk_full"):
        check_logs([log])
    log.write_text("Traceback (most recent call last):\n")
    with pytest.raises(AssertionError, match="Traceback"):
        check_logs([log])


def test_the_longest_gap_is_between_answers_of_all_histories() -> None:
    second = 10**9
    assert longest_gap_s([[put("a", 0, second)], [put("b", 0, 4 * second)]]) == 3.0
    assert longest_gap_s([[]]) == 0.0
