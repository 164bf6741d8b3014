"""The output contract: formats, one object in json, failures with code, hint and exit code."""

import json
import sys

import click
import grpc
import pytest

from streammeta.cli.output import CommandError, Output, run_cli, with_output
from streammeta.controller.errors import ApiError, InvalidRequestError
from streammeta.rpc.connections import operator_channel
from streammeta.storage.errors import BucketNotFoundError
from streammeta.v1.admin_pb2 import DescribeClusterRequest
from streammeta.v1.admin_pb2_grpc import AdminServiceStub
from tests.shell.fake_cluster import FakeCluster, serve

FOUND = {"name": "x", "error": "a fact with the name of the contract's member"}


def sample_command(error: BaseException | None = None) -> click.Command:
    """A command that finds something, then may fail."""

    @click.command("sample")
    @with_output
    def sample(output: Output) -> None:
        output.summary({"name": "x", "done": True, "absent": None} if error is None else FOUND)
        output.rows("things", ("id", "text"), iter([(1, "a\tb"), (20, "c")]))
        output.note("for people")
        if error is not None:
            raise error

    return sample


@pytest.mark.parametrize(
    ("output_format", "expected"),
    [
        ("plain", "name: x\ndone: yes\nabsent: -\nid\ttext\n1\ta\\tb\n20\tc\nfor people\n"),
        (
            "json",
            (
                '{"ok": true, "name": "x", "done": true, "absent": null, "things": '
                '[{"id": 1, "text": "a\\tb"}, {"id": 20, "text": "c"}]}\n'
            ),
        ),
    ],
)
def test_output_of_a_command(
    capsys: pytest.CaptureFixture[str], output_format: str, expected: str
) -> None:
    assert run_cli(sample_command(), ["--format", output_format]) == 0
    assert capsys.readouterr().out == expected


def test_table_of_a_command_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(sample_command(), ["--format", "table"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == ["name:   x", "done:   yes", "absent: -"]
    cells = [line.split() for line in lines[3:] if "\u2500" not in line]
    assert cells == [["id", "text"], ["1", "a\\tb"], ["20", "c"], ["for", "people"]]


@pytest.mark.parametrize(
    ("error", "code", "exit_code"),
    [
        (CommandError("MINE", "failed", "do this"), "MINE", 1),
        (InvalidRequestError("count", "is 0"), "INVALID_FIELD", 1),
        (ApiError("no"), "REFUSED", 1),
        (BucketNotFoundError("b"), "STORAGE", 1),
        (FileNotFoundError(2, "No such file", "/x"), "OS", 1),
        (click.UsageError("wrong"), "USAGE", 2),
        (click.ClickException("odd"), "FAILED", 1),
        (KeyboardInterrupt(), "INTERRUPTED", 1),
        (ZeroDivisionError("boom"), "DEFECT", 1),
    ],
)
def test_every_failure_is_one_object_in_json(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: str, exit_code: int
) -> None:
    assert run_cli(sample_command(error), ["--format", "json"]) == exit_code
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert answer["error"]["code"] == code


def test_a_failure_keeps_what_was_found_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    failing = sample_command(CommandError("GUARD", "guards failed", "look at them"))
    assert run_cli(failing, ["--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "ok": False,
        "error": {"code": "GUARD", "message": "guards failed", "hint": "look at them"},
        "name": "x",
        "things": [{"id": 1, "text": "a\tb"}, {"id": 20, "text": "c"}],
    }
    assert run_cli(failing, ["--format", "plain"]) == 1
    said = capsys.readouterr()
    assert "20\tc" in said.out
    assert said.err == "streammeta: guards failed\n  look at them\n"


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        ("LIMIT_EXCEEDED", "ask for less at once"),
        ("BUSY", "repeat the command in a moment"),
        ("DISK_FULL", "make room on the disks"),
    ],
)
def test_raw_grpc_failure_is_explained(
    capsys: pytest.CaptureFixture[str], reason: str, hint: str
) -> None:
    cluster = FakeCluster()
    cluster.failure = (grpc.StatusCode.RESOURCE_EXHAUSTED, reason, "too much")
    with (
        serve(cluster) as endpoint,
        operator_channel(endpoint) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        AdminServiceStub(channel).DescribeCluster(DescribeClusterRequest())
    assert run_cli(sample_command(caught.value), ["--format", "json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["code"], error["message"]) == (reason, "a controller: too much")
    assert hint in error["hint"]


NUMBERS = (1_795_345_586_511, -1, 9_223_372_036_854_775_807)


@click.command("wide")
@with_output
def wide(output: Output) -> None:
    """Print a table that is wider than any terminal."""
    columns = [f"number_{index}" for index in range(30)]
    rows = [[value] * 29 + [None] for value in NUMBERS]
    output.rows("wide", [*columns, "text"], [[*row, "word " * 20] for row in rows])


@pytest.mark.parametrize("terminal", ["20", "80", "200"])
def test_a_wide_table_never_breaks_a_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: str
) -> None:
    monkeypatch.setenv("COLUMNS", terminal)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run_cli(wide, ["--format", "table"]) == 0
    words = capsys.readouterr().out.split()
    assert [words.count(str(value)) for value in NUMBERS] == [29] * len(NUMBERS)
