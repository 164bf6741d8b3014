"""The checker accepts what could have happened; histories survive being written down."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.linearizability.check import main
from tests.linearizability.checker import Model, Verdict, check
from tests.linearizability.generated import kv_history, stream_history
from tests.linearizability.history import UNKNOWN, Operation, Recorder, dump, load
from tests.linearizability.models import (
    MODELS,
    CommitRange,
    Committed,
    Delete,
    End,
    Get,
    KVAnswer,
    NotAtEnd,
    Objects,
    Put,
    ReadEnd,
    ReadObjects,
    values_of,
)
from tests.linearizability.report import assert_linearizable

KV, STREAM = MODELS["kv"], MODELS["stream"]
ABSENT = KVAnswer(applied=True, value=None, version=0)


def held(value: str, version: int) -> KVAnswer:
    return KVAnswer(applied=True, value=value, version=version)


def refused(value: str | None, version: int) -> KVAnswer:
    return KVAnswer(applied=False, value=value, version=version)


def op(invoked: int, returned: int | None, request: Any, answer: Any = UNKNOWN) -> Any:
    return Operation(f"client {invoked}", "key", request, invoked, returned, answer)


def is_linearizable(operations: Sequence[Operation[Any, Any]], model: Model) -> bool:
    """The definition, tried out: some order of all completed and some ambiguous operations fits."""
    return any(
        _respects_time(order) and _explains(order, model)
        for chosen in _choices(operations)
        for order in itertools.permutations(chosen)
    )


def _choices(operations: Sequence[Operation[Any, Any]]) -> Iterator[list[Operation[Any, Any]]]:
    completed = [op for op in operations if op.returned is not None]
    ambiguous = [op for op in operations if op.returned is None]
    for count in range(len(ambiguous) + 1):
        for chosen in itertools.combinations(ambiguous, count):
            yield [*completed, *chosen]


def _respects_time(order: Sequence[Operation[Any, Any]]) -> bool:
    return not any(
        later.returned is not None and later.returned < earlier.invoked
        for earlier, later in itertools.combinations(order, 2)
    )


def _explains(order: Sequence[Operation[Any, Any]], model: Model) -> bool:
    state = model.initial
    for operation in order:
        fits, state = model.step(state, operation.request, operation.answer)
        if not fits:
            return False
    return True


GOOD_VALUES: dict[str, list[Any]] = {
    "one after the other": [
        op(0, 1, Get(), ABSENT),
        op(2, 3, Put("a"), held("a", 1)),
        op(4, 5, Get(), held("a", 1)),
        op(6, 7, Put("b", expected_version=1), held("b", 2)),
        op(8, 9, Put("c", expected_version=1), refused("b", 2)),
        op(10, 11, Delete(), held("b", 2)),
        op(12, 13, Delete(), refused(None, 0)),
        op(14, 15, Put("d", overwrite=False), held("d", 9)),
        op(16, 17, Put("e", overwrite=False), refused("d", 9)),
    ],
    "a read overlapping a write sees either": [
        op(0, 9, Put("a"), held("a", 1)),
        op(1, 2, Get(), ABSENT),
        op(3, 4, Get(), held("a", 1)),
    ],
    "equal times overlap": [
        op(0, 5, Put("a"), held("a", 1)),
        op(5, 6, Get(), ABSENT),
    ],
    "overlapping writes are ordered by their versions": [
        op(0, 10, Put("a"), held("a", 7)),
        op(1, 9, Put("b"), held("b", 3)),
        op(11, 12, Get(), held("a", 7)),
    ],
    "an ambiguous write appears late": [
        op(0, None, Put("a")),
        op(2, 3, Get(), ABSENT),
        op(4, 5, Get(), ABSENT),
        op(6, 7, Get(), held("a", 5)),
    ],
    "an ambiguous write never appears": [
        op(0, None, Put("a")),
        op(2, 3, Get(), ABSENT),
        op(4, 5, Put("b"), held("b", 2)),
        op(6, 7, Get(), held("b", 2)),
    ],
    "an ambiguous compare-and-set took effect, its repetition is refused": [
        op(0, 1, Put("a"), held("a", 1)),
        op(2, None, Put("b", expected_version=1)),
        op(4, 5, Put("b", expected_version=1), refused("b", 2)),
    ],
    "an ambiguous deletion explains an absent key": [
        op(0, 1, Put("a"), held("a", 1)),
        op(2, None, Delete()),
        op(4, 5, Get(), ABSENT),
        op(6, 7, Put("b", overwrite=False), held("b", 4)),
    ],
    "a write conditional on the guessed version of an ambiguous one": [
        op(0, None, Put("a")),
        op(2, 3, Put("b", expected_version=4), held("b", 6)),
    ],
}

BAD_VALUES: dict[str, list[Any]] = {
    "stale read": [
        op(0, 1, Put("a"), held("a", 1)),
        op(2, 3, Put("b"), held("b", 2)),
        op(4, 5, Get(), held("a", 1)),
    ],
    "lost write": [
        op(0, 1, Put("a"), held("a", 1)),
        op(2, 3, Get(), ABSENT),
    ],
    "uncommitted value read, then gone": [
        op(0, 1, Put("a"), held("a", 1)),
        op(2, None, Put("b")),
        op(3, 4, Get(), held("b", 2)),
        op(5, 6, Get(), held("a", 1)),
    ],
    "an ambiguous write twice": [
        op(0, None, Put("a")),
        op(1, 2, Get(), held("a", 1)),
        op(3, 4, Put("b"), held("b", 2)),
        op(5, 6, Get(), held("a", 3)),
    ],
    "both repetitions of a compare-and-set are applied": [
        op(0, 1, Put("a"), held("a", 1)),
        op(2, 9, Put("b", expected_version=1), held("b", 2)),
        op(3, 8, Put("c", expected_version=1), held("c", 3)),
    ],
    "a compare-and-set on an old version": [
        op(0, 1, Put("a"), held("a", 1)),
        op(2, 3, Put("b"), held("b", 2)),
        op(4, 5, Put("c", expected_version=1), held("c", 3)),
    ],
    "two leaders, each with its own clients": [
        op(0, 1, Put("a"), held("a", 1)),
        op(2, 3, Put("b"), held("b", 2)),
        op(2, 4, Put("c"), held("c", 3)),
        op(5, 7, Get(), held("b", 2)),
        op(6, 9, Get(), held("c", 3)),
        op(8, 10, Get(), held("b", 2)),
    ],
    "versions run back": [
        op(0, 1, Put("a"), held("a", 5)),
        op(2, 3, Put("b"), held("b", 4)),
    ],
    "a version is used again after a deletion": [
        op(0, 1, Put("a"), held("a", 5)),
        op(2, 3, Delete(), held("a", 5)),
        op(4, 5, Put("b"), held("b", 5)),
    ],
    "the version read is not the one written": [
        op(0, 1, Put("a"), held("a", 1)),
        op(2, 3, Get(), held("a", 2)),
    ],
    "put if absent replaces": [
        op(0, 1, Put("a"), held("a", 1)),
        op(2, 3, Put("b", overwrite=False), held("b", 2)),
    ],
    "refused for no reason": [
        op(0, 1, Put("a"), held("a", 1)),
        op(2, 3, Put("b", expected_version=1), refused("a", 1)),
    ],
    "another value stored than asked": [op(0, 1, Put("a"), held("b", 1))],
    "a write seen before it was asked for": [
        op(0, 1, Get(), held("a", 1)),
        op(2, 3, Put("a"), held("a", 1)),
    ],
    "deleted twice": [
        op(0, 1, Put("a"), held("a", 1)),
        op(2, 3, Delete(), held("a", 1)),
        op(4, 5, Delete(), held("a", 1)),
    ],
}

GOOD_STREAMS: dict[str, list[Any]] = {
    "one after the other": [
        op(0, 1, CommitRange(1, 0, 5), Committed()),
        op(2, 3, ReadEnd(), End(5)),
        op(4, 5, CommitRange(2, 5, 6), Committed()),
        op(6, 7, CommitRange(1, 0, 5), Committed()),
        op(8, 9, ReadObjects(), Objects((1, 2))),
    ],
    "of two at one offset one wins": [
        op(0, 9, CommitRange(1, 0, 5), NotAtEnd()),
        op(1, 8, CommitRange(2, 0, 6), Committed()),
        op(10, 11, ReadEnd(), End(6)),
    ],
    "an ambiguous commit explains the end": [
        op(0, None, CommitRange(1, 0, 5)),
        op(2, 3, CommitRange(2, 0, 4), NotAtEnd()),
        op(4, 5, CommitRange(3, 5, 6), Committed()),
    ],
}

BAD_STREAMS: dict[str, list[Any]] = {
    "two commits at one offset": [
        op(0, 9, CommitRange(1, 0, 5), Committed()),
        op(1, 8, CommitRange(2, 0, 5), Committed()),
    ],
    "a gap": [op(0, 1, CommitRange(1, 3, 5), Committed())],
    "an acknowledged commit is gone": [
        op(0, 1, CommitRange(1, 0, 5), Committed()),
        op(2, 3, ReadEnd(), End(0)),
    ],
    "a retried commit counted twice": [
        op(0, None, CommitRange(1, 0, 5)),
        op(2, 3, CommitRange(1, 0, 5), Committed()),
        op(4, 5, ReadObjects(), Objects((1, 1))),
    ],
    "the end runs back": [
        op(0, None, CommitRange(1, 0, 5)),
        op(2, 3, ReadEnd(), End(5)),
        op(4, 5, ReadEnd(), End(0)),
    ],
    "refused at the end": [op(0, 1, CommitRange(1, 0, 5), NotAtEnd())],
}


def named(*groups: tuple[Any, dict[str, list[Any]]]) -> list[Any]:
    return [
        pytest.param(model, history, id=name)
        for model, histories in groups
        for name, history in histories.items()
    ]


@pytest.mark.parametrize(("model", "history"), named((KV, GOOD_VALUES), (STREAM, GOOD_STREAMS)))
def test_what_could_have_happened_is_accepted(model: Any, history: list[Any]) -> None:
    assert check(history, model).verdict is Verdict.LINEARIZABLE
    assert is_linearizable(history, model)


@pytest.mark.parametrize(("model", "history"), named((KV, BAD_VALUES), (STREAM, BAD_STREAMS)))
def test_what_can_not_have_happened_is_found(model: Any, history: list[Any]) -> None:
    assert check(history, model).verdict is Verdict.NOT_LINEARIZABLE
    assert not is_linearizable(history, model)


def test_keys_are_judged_apart() -> None:
    history: list[Any] = [
        Operation("c", "good", Put("a"), 0, 1, held("a", 1)),
        Operation("c", "bad", Put("a"), 2, 3, held("a", 2)),
        Operation("c", "bad", Get(), 4, 5, ABSENT),
    ]
    report = check(history, KV)
    assert [(item.key, item.verdict) for item in report.results] == [
        ("bad", Verdict.NOT_LINEARIZABLE),
        ("good", Verdict.LINEARIZABLE),
    ]


def test_a_spent_budget_is_no_success() -> None:
    history = kv_history(random.Random(1), operations=50, clients=5, ambiguous=0.0)
    assert check(history, KV, budget=10).verdict is Verdict.UNKNOWN
    with pytest.raises(AssertionError, match="budget"):
        assert_linearizable(history, KV, budget=10)


@given(st.integers(0, 2**32), st.integers(1, 8), st.sampled_from([0.0, 0.1, 0.4]))
def test_histories_of_a_correct_store_are_accepted(
    seed: int, clients: int, ambiguous: float
) -> None:
    rng = random.Random(seed)
    assert_linearizable(kv_history(rng, operations=60, clients=clients, ambiguous=ambiguous), KV)
    assert_linearizable(
        stream_history(rng, operations=40, clients=clients, ambiguous=ambiguous), STREAM
    )


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.booleans())
def test_small_histories_right_or_wrong_are_judged_as_by_brute_force(
    seed: int, of_values: bool
) -> None:
    rng = random.Random(seed)
    model = KV if of_values else STREAM
    generate = kv_history if of_values else stream_history
    history = generate(rng, operations=rng.randint(1, 6), clients=3, ambiguous=0.3, values=2)
    answers = [item.answer for item in history if item.returned is not None]
    mixed: list[Any] = [_with_other_answer(item, answers, rng) for item in history]
    expected = is_linearizable(mixed, model)
    assert (check(mixed, model).verdict is Verdict.LINEARIZABLE) == expected, mixed


def _with_other_answer(item: Any, answers: list[Any], rng: random.Random) -> Any:
    if item.returned is None or rng.random() < 0.7:
        return item
    return dataclasses.replace(item, answer=rng.choice(answers))


@given(st.integers(0, 2**32))
def test_one_wrong_answer_among_many_is_found(seed: int) -> None:
    """Without overlap every read's answer is determined, so any other answer is wrong."""
    rng = random.Random(seed)
    history: list[Any] = kv_history(rng, operations=80, clients=1, ambiguous=0.0)
    number = rng.choice([n for n, item in enumerate(history) if isinstance(item.request, Get)])
    right = history[number].answer
    wrong = held("never written", 1) if right.value is None else ABSENT
    history[number] = dataclasses.replace(history[number], answer=wrong)
    assert check(history, KV).verdict is Verdict.NOT_LINEARIZABLE


def test_thousands_of_operations_on_tens_of_keys_fit_the_budget() -> None:
    rng = random.Random(5)
    history: list[Any] = [
        dataclasses.replace(item, key=str(key))
        for key in range(30)
        for item in kv_history(rng, operations=200, clients=8, ambiguous=0.05)
    ]
    report = assert_linearizable(history, KV)
    assert sum(result.steps for result in report.results) < 200_000


STORED = KVAnswer(applied=True, value="a", version=1)


def test_each_end_of_an_operation_is_recorded() -> None:
    recorder = Recorder()
    handles = [recorder.invoke(f"c{number}", "k", Put("a")) for number in range(4)]
    recorder.complete(handles[0], STORED)
    recorder.fail(handles[1])
    recorder.ambiguous(handles[2])
    assert recorder.history() == (
        Operation("c0", "k", Put("a"), 0, 4, STORED),
        Operation("c2", "k", Put("a"), 2, None, UNKNOWN),
        Operation("c3", "k", Put("a"), 3, None, UNKNOWN),
    )


def test_an_operation_ends_once() -> None:
    recorder = Recorder()
    handle = recorder.invoke("c", "k", Get())
    recorder.ambiguous(handle)
    with pytest.raises(ValueError, match="ended already"):
        recorder.complete(handle, ABSENT)


def test_threads_record_at_once() -> None:
    recorder = Recorder()

    def work(name: str) -> None:
        for _ in range(200):
            recorder.complete(recorder.invoke(name, name, Get()), ABSENT)

    threads = [threading.Thread(target=work, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    history = recorder.history()
    times = [time for item in history for time in (item.invoked, item.returned)]
    assert sorted(time for time in times if time is not None) == list(range(1600))
    assert_linearizable(history, MODELS["kv"])


@pytest.mark.parametrize("model", sorted(MODELS))
def test_a_history_survives_its_file(model: str, tmp_path: Path) -> None:
    generate = {"kv": kv_history, "stream": stream_history}[model]
    history = generate(random.Random(3), operations=80, clients=4, ambiguous=0.2)
    dump(tmp_path / "history.jsonl", model, history)
    assert load(tmp_path / "history.jsonl", values_of) == (model, history)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1"),
        ('{"model": "other"}', "known are kv, stream"),
        ('{"model": "kv"}\n{"client": "c"}', "line 2"),
        ('{"model": "kv"}\nnonsense', "line 2"),
    ],
)
def test_a_file_that_holds_no_history_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load(path, values_of)
    assert main([str(path)]) == 2


def bad_history() -> list[Operation[object, object]]:
    """Many keys are right; on key `x` a read between many others is stale."""
    recorder = Recorder()
    for number in range(20):
        recorder.complete(recorder.invoke("c", "right", Get()), ABSENT)
        recorder.complete(recorder.invoke("c", f"right {number}", Get()), ABSENT)
    recorder.complete(recorder.invoke("writer", "x", Put("a")), STORED)
    for _ in range(10):
        recorder.complete(recorder.invoke("reader", "x", Get()), STORED)
    recorder.complete(recorder.invoke("stale reader", "x", Get()), ABSENT)
    for _ in range(10):
        recorder.complete(recorder.invoke("reader", "x", Get()), STORED)
    return list(recorder.history())


def test_only_what_contradicts_is_shown() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_linearizable(bad_history(), MODELS["kv"])
    lines = str(caught.value).splitlines()
    assert "key x: not linearizable" in lines[0]
    assert [line.split()[1:] for line in lines[2:]] == [
        ["writer", "put", "a", "a", "at", "version", "1"],
        ["stale", "reader", "get", "absent"],
    ]


def test_the_command_judges_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    dump(good, "kv", bad_history()[:10])
    dump(bad, "kv", bad_history())
    assert main([str(good)]) == 0
    assert "OK: 10 operations on 6 keys" in capsys.readouterr().out
    assert main([str(good), str(bad), "--format", "json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert answer["files"][str(good)]["verdict"] == "LINEARIZABLE"
    assert answer["files"][str(bad)]["verdict"] == "NOT_LINEARIZABLE"
    assert main([str(bad), "--budget", "1"]) == 1
