"""Histories are taken down as they happen, survive a file, and are shown short if bad."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path

import pytest

from tests.linearizability.check import main
from tests.linearizability.generated import kv_history, stream_history
from tests.linearizability.history import UNKNOWN, Operation, Recorder, dump, load
from tests.linearizability.models import MODELS, Get, KVAnswer, Put, values_of
from tests.linearizability.report import assert_linearizable

STORED = KVAnswer(applied=True, value="a", version=1)
ABSENT = KVAnswer(applied=True, value=None, version=0)


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
