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

from tests.linearizability import models
from tests.linearizability.check import main
from tests.linearizability.checker import Model, Verdict, check
from tests.linearizability.generated import kv_history, stream_history
from tests.linearizability.history import UNKNOWN, Operation, Recorder, dump, load
from tests.linearizability.report import assert_linearizable

KV, STREAM = models.MODELS["kv"], models.MODELS["stream"]
ABSENT = models.KVAnswer(applied=True, value=None, version=0)
STORED = models.KVAnswer(applied=True, value="a", version=1)


def operation_of(text: str) -> Any:
    """Read `4-5 put b at 1: refused a@1`: invoked and returned, the request, and its answer."""
    times, _, said = text.partition(" ")
    invoked, _, returned = times.partition("-")
    words, _, answer = said.partition(": ")
    request = request_of(words.split())
    end = (int(returned), answer_to(request, answer)) if returned else (None, UNKNOWN)
    return Operation(f"client {invoked}", "key", request, int(invoked), *end)


def request_of(words: list[str]) -> Any:
    match words:
        case ["put", value, "at", version]:
            return models.Put(value, expected_version=int(version))
        case ["put", value, *if_absent]:
            return models.Put(value, overwrite=not if_absent)
        case ["commit", object_id, span]:
            start, end = map(int, span.split(".."))
            return models.CommitRange(int(object_id), start, end)
    return {
        "get": models.Get,
        "delete": models.Delete,
        "end": models.ReadEnd,
        "objects": models.ReadObjects,
    }[words[0]]()


def answer_to(request: Any, text: str) -> Any:
    match request:
        case models.ReadEnd():
            return models.End(int(text))
        case models.ReadObjects():
            return models.Objects(tuple(map(int, text.split())))
        case models.CommitRange():
            return models.Committed() if text == "committed" else models.NotAtEnd()
    held = text.removeprefix("refused ")
    value, _, version = held.partition("@")
    stored = value if version else None
    return models.KVAnswer(applied=held == text, value=stored, version=int(version or 0))


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


BAD_VALUES = {
    "stale read": "0-1 put a: a@1 | 2-3 put b: b@2 | 4-5 get: a@1",
    "lost write": "0-1 put a: a@1 | 2-3 get: absent",
    "uncommitted value read, then gone": "0-1 put a: a@1 | 2- put b | 3-4 get: b@2 | 5-6 get: a@1",
    "an ambiguous write twice": "0- put a | 1-2 get: a@1 | 3-4 put b: b@2 | 5-6 get: a@3",
    "both repetitions of a compare-and-set are applied": (
        "0-1 put a: a@1 | 2-9 put b at 1: b@2 | 3-8 put c at 1: c@3"
    ),
    "a compare-and-set on an old version": "0-1 put a: a@1 | 2-3 put b: b@2 | 4-5 put c at 1: c@3",
    "two leaders, each with its own clients": (
        "0-1 put a: a@1 | 2-3 put b: b@2 | 2-4 put c: c@3 | 5-7 get: b@2 | 6-9 get: c@3 | "
        "8-10 get: b@2"
    ),
    "versions run back": "0-1 put a: a@5 | 2-3 put b: b@4",
    "a version is used again after a deletion": "0-1 put a: a@5 | 2-3 delete: a@5 | 4-5 put b: b@5",
    "the version read is not the one written": "0-1 put a: a@1 | 2-3 get: a@2",
    "put if absent replaces": "0-1 put a: a@1 | 2-3 put b if absent: b@2",
    "refused for no reason": "0-1 put a: a@1 | 2-3 put b at 1: refused a@1",
    "another value stored than asked": "0-1 put a: b@1",
    "a write seen before it was asked for": "0-1 get: a@1 | 2-3 put a: a@1",
    "deleted twice": "0-1 put a: a@1 | 2-3 delete: a@1 | 4-5 delete: a@1",
}

BAD_STREAMS = {
    "two commits at one offset": "0-9 commit 1 0..5: committed | 1-8 commit 2 0..5: committed",
    "a gap": "0-1 commit 1 3..5: committed",
    "an acknowledged commit is gone": "0-1 commit 1 0..5: committed | 2-3 end: 0",
    "a retried commit counted twice": (
        "0- commit 1 0..5 | 2-3 commit 1 0..5: committed | 4-5 objects: 1 1"
    ),
    "the end runs back": "0- commit 1 0..5 | 2-3 end: 5 | 4-5 end: 0",
    "refused at the end": "0-1 commit 1 0..5: refused",
}


def named(*groups: tuple[Any, dict[str, str]]) -> list[Any]:
    return [
        pytest.param(model, [operation_of(word) for word in text.split(" | ")], id=name)
        for model, histories in groups
        for name, text in histories.items()
    ]


@pytest.mark.parametrize(("model", "history"), named((KV, BAD_VALUES), (STREAM, BAD_STREAMS)))
def test_what_can_not_have_happened_is_found(model: Any, history: list[Any]) -> None:
    assert check(history, model).verdict is Verdict.NOT_LINEARIZABLE
    assert not is_linearizable(history, model)


def test_keys_are_judged_apart() -> None:
    history: list[Any] = [
        Operation("c", "good", models.Put("a"), 0, 1, STORED),
        Operation("c", "bad", models.Put("a"), 2, 3, dataclasses.replace(STORED, version=2)),
        Operation("c", "bad", models.Get(), 4, 5, ABSENT),
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
    # Each ambiguous operation may double the search.
    operations = 60 if ambiguous < 0.4 else 40
    history = kv_history(rng, operations=operations, clients=clients, ambiguous=ambiguous)
    assert_linearizable(history, KV)
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
    number = rng.choice(
        [n for n, item in enumerate(history) if isinstance(item.request, models.Get)]
    )
    right = history[number].answer
    wrong = STORED if right.value is None else ABSENT
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


def test_each_end_of_an_operation_is_recorded() -> None:
    recorder = Recorder()
    handles = [recorder.invoke(f"c{number}", "k", models.Put("a")) for number in range(4)]
    recorder.complete(handles[0], STORED)
    recorder.fail(handles[1])
    recorder.ambiguous(handles[2])
    assert recorder.history() == (
        Operation("c0", "k", models.Put("a"), 0, 4, STORED),
        Operation("c2", "k", models.Put("a"), 2, None, UNKNOWN),
        Operation("c3", "k", models.Put("a"), 3, None, UNKNOWN),
    )


def test_an_operation_ends_once() -> None:
    recorder = Recorder()
    handle = recorder.invoke("c", "k", models.Get())
    recorder.ambiguous(handle)
    with pytest.raises(ValueError, match="ended already"):
        recorder.complete(handle, ABSENT)


def test_threads_record_at_once() -> None:
    recorder = Recorder()

    def work(name: str) -> None:
        for _ in range(200):
            recorder.complete(recorder.invoke(name, name, models.Get()), ABSENT)

    threads = [threading.Thread(target=work, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    history = recorder.history()
    times = [time for item in history for time in (item.invoked, item.returned)]
    assert sorted(time for time in times if time is not None) == list(range(1600))
    assert_linearizable(history, models.MODELS["kv"])


@pytest.mark.parametrize("model", sorted(models.MODELS))
def test_a_history_survives_its_file(model: str, tmp_path: Path) -> None:
    generate = {"kv": kv_history, "stream": stream_history}[model]
    history = generate(random.Random(3), operations=80, clients=4, ambiguous=0.2)
    dump(tmp_path / "history.jsonl", model, history)
    assert load(tmp_path / "history.jsonl", models.values_of) == (model, history)


def bad_history() -> list[Operation[object, object]]:
    """Many keys are right; on key `x` a read between many others is stale."""
    recorder = Recorder()
    for number in range(20):
        recorder.complete(recorder.invoke("c", "right", models.Get()), ABSENT)
        recorder.complete(recorder.invoke("c", f"right {number}", models.Get()), ABSENT)
    recorder.complete(recorder.invoke("writer", "x", models.Put("a")), STORED)
    for _ in range(10):
        recorder.complete(recorder.invoke("reader", "x", models.Get()), STORED)
    recorder.complete(recorder.invoke("stale reader", "x", models.Get()), ABSENT)
    for _ in range(10):
        recorder.complete(recorder.invoke("reader", "x", models.Get()), STORED)
    return list(recorder.history())


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
