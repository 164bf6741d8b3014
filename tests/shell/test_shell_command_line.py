"""The command line's contract: formats, errors, exit codes; and the prompt, driven by keys."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import click
import grpc
import pytest
from click.testing import CliRunner
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from streammeta.cli.output import (
    CommandError,
    OutputFormat,
    command_output,
    format_option,
    run_cli,
)
from streammeta.cli.shell_command import shell
from streammeta.controller.errors import ApiError, InvalidRequestError
from streammeta.rpc.connections import operator_channel
from streammeta.shell.prompt import run_interactive
from streammeta.shell.tree import Child, Directory, Node
from streammeta.storage.errors import BucketNotFoundError
from streammeta.v1.admin_pb2 import DescribeClusterRequest
from streammeta.v1.admin_pb2_grpc import AdminServiceStub
from tests.shell.dict_tree import SAMPLE, DictDirectory
from tests.shell.fake_cluster import FakeCluster, sample_cluster, serve

FOUND_BEFORE = {"command", "documents", "entries", "text"}
"""Members of an answer that a failing command may have filled before it failed."""

PROGRAM = """
import sys, click
from streammeta.cli.output import run_cli
from streammeta.cli.shell_command import shell
sys.exit(run_cli(click.Group("streammeta", {"shell": shell})))
"""


@pytest.fixture
def endpoint() -> Iterator[str]:
    with serve(sample_cluster()) as served:
        yield served


def streammeta(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.process
def test_program_answers_in_one_json_object_and_exit_code(endpoint: str) -> None:
    done = streammeta("shell", "--connect", endpoint, "--format", "json", "--", "cat", "/streams/3")

    answer = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert answer["ok"] is True
    assert answer["command"] == "cat"
    assert answer["documents"][0]["stream_id"] == 3
    assert answer["documents"][0]["ranges"][1]["start_offset"] == 4


@pytest.mark.process
def test_program_fails_in_one_json_object_and_exit_code() -> None:
    done = streammeta("shell", "--connect", "127.0.0.1:1", "--format=json", "--", "ls", "/nodes")

    answer = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (1, "")
    assert answer["ok"] is False
    assert answer["error"]["code"] == "NO_CONTROLLER"
    assert answer["error"]["message"].startswith("no controller answers at 127.0.0.1:1")
    assert answer["error"]["hint"] != ""


@pytest.mark.parametrize("words", [["ls", "/"], ["cd", "/"], ["tree"]])
def test_no_command_passes_without_a_cluster(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    code, out, err = run_in_process(capsys, "shell", "--connect", "127.0.0.1:1", "--", *words)

    assert (code, out) == (1, "")
    assert "no controller answers at 127.0.0.1:1" in err


@pytest.mark.parametrize("words", [["help"], ["pwd"], ["exit"]])
def test_what_asks_nothing_of_a_cluster_needs_none(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    code, _, err = run_in_process(capsys, "shell", "--connect", "127.0.0.1:1", "--", *words)

    assert (code, err) == (0, "")


def run_in_process(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = run_cli(click.Group("streammeta", {"shell": shell}), words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("words", "code", "exit_code"),
    [
        (["--", "ls", "/x"], "NOT_FOUND", 1),
        (["--", "cat", "/streams"], "IS_DIRECTORY", 1),
        (["--", "cd", "/cluster"], "NOT_DIRECTORY", 1),
        (["--", "lss"], "USAGE", 2),
        (["--", "cat"], "USAGE", 2),
        ([], "USAGE", 2),
        (["--nonsense"], "USAGE", 2),
        (["--timeout", "0", "ls"], "USAGE", 2),
    ],
)
def test_failures_in_json(
    capsys: pytest.CaptureFixture[str],
    endpoint: str,
    words: list[str],
    code: str,
    exit_code: int,
) -> None:
    got, out, err = run_in_process(
        capsys, "shell", "--connect", endpoint, "--format", "json", *words
    )

    answer = json.loads(out)
    assert (got, err) == (exit_code, "")
    assert answer["ok"] is False
    assert answer["error"]["code"] == code
    assert set(answer) - FOUND_BEFORE == {"ok", "error"}
    assert set(answer["error"]) == {"code", "message", "hint"}


def test_failures_for_people_go_to_standard_error(
    capsys: pytest.CaptureFixture[str], endpoint: str
) -> None:
    code, out, err = run_in_process(
        capsys, "shell", "--connect", endpoint, "--", "ls", "/x", "/kv/topics"
    )

    assert code == 1
    assert out == "automq-test\nautomq-test-2\n"
    assert err == (
        "streammeta: ls: /x: no such file or directory\n  see what is there with `ls /`\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["shel"], "No such command 'shel'"),
        (["shell"], "Missing option '--connect'"),
        (["shell", "--connect", "nowhere", "ls"], "--connect: 'nowhere'; must be HOST:PORT"),
    ],
)
@pytest.mark.parametrize("output_format", ["json", "plain"])
def test_usage_errors_exit_with_2(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str, output_format: str
) -> None:
    words = [*words[:1], "--format", output_format, *words[1:]]

    code, out, err = run_in_process(capsys, *words)

    assert code == 2
    if output_format == "json":
        assert message in json.loads(out)["error"]["message"]
    else:
        assert out == ""
        assert err.startswith("streammeta: ")
        assert message in err


def test_table_format_lists_in_columns(capsys: pytest.CaptureFixture[str], endpoint: str) -> None:
    _, out, _ = run_in_process(capsys, "shell", "--connect", endpoint, "--format", "table", "ls")

    assert out.split() == ["cluster", "kv/", "nodes/", "objects/", "streams/"]
    assert out.count("\n") == 1


def test_options_of_the_inner_command_are_not_ours(
    capsys: pytest.CaptureFixture[str], endpoint: str
) -> None:
    code, _, err = run_in_process(capsys, "shell", "--connect", endpoint, "ls", "--format")

    assert code == 1
    assert "ls: --format: no such file" in err


def test_help_shows_examples() -> None:
    result = CliRunner().invoke(shell, ["--help"])

    assert result.exit_code == 0
    assert "streammeta shell --connect 127.0.0.1:9091 -- cat /streams/3" in result.output


def test_connect_may_come_from_the_environment(endpoint: str) -> None:
    result = CliRunner().invoke(shell, ["ls", "/streams"], env={"STREAMMETA_CONNECT": endpoint})

    assert (result.exit_code, result.output) == (0, "3\n")


def sample_command(error: Exception | None) -> click.Command:
    """A command as others write them."""

    @click.command("sample")
    @format_option
    def sample(output_format: OutputFormat) -> None:
        with command_output(output_format) as output:
            output.summary({"name": "x", "done": True, "absent": None})
            output.rows("things", ("id", "text"), iter([(1, "a\tb"), (20, "c")]))
            output.note("for people")
            if error is not None:
                raise error

    return sample


@pytest.mark.parametrize(
    ("output_format", "expected"),
    [
        (
            "plain",
            "name: x\ndone: yes\nabsent: -\nid\ttext\n1\ta\\tb\n20\tc\nfor people\n",
        ),
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
    assert run_cli(sample_command(None), ["--format", output_format]) == 0
    assert capsys.readouterr().out == expected


def test_table_of_a_command_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(sample_command(None), ["--format", "table"]) == 0

    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == ["name:   x", "done:   yes", "absent: -"]
    assert [line.split() for line in lines[3:] if "\u2500" not in line] == [
        ["id", "text"],
        ["1", "a\\tb"],
        ["20", "c"],
        ["for", "people"],
    ]


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
    capsys: pytest.CaptureFixture[str], error: Exception, code: str, exit_code: int
) -> None:
    assert run_cli(sample_command(error), ["--format", "json"]) == exit_code

    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert answer["error"]["code"] == code


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
    with serve(cluster) as endpoint, operator_channel(endpoint) as channel:
        stub = AdminServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.DescribeCluster(DescribeClusterRequest())

    assert run_cli(sample_command(caught.value), ["--format", "json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["code"], error["message"]) == (reason, "a controller: too much")
    assert hint in error["hint"]


class _FailingDirectory(Directory):
    """A backend that is down."""

    def children(self, prefix: str = "") -> Iterator[Child]:
        raise ApiError(f"out of reach, even {prefix!r}")

    def child(self, name: str) -> Node | None:
        raise ApiError(f"out of reach: {name}")


def prompt_with(keys: str, content: dict[str, Any] | None = None) -> list[str]:
    """What the prompt prints when these keys are typed."""
    written: list[str] = []
    root = _FailingDirectory() if content is None else DictDirectory(content)
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text(keys)
        run_interactive(root, "hello", written.append)
    return written


def test_prompt_runs_lines_until_exit() -> None:
    written = prompt_with("cd streams\rpwd\rcat 3\r\rhistory\rexit\rpwd\r", SAMPLE)

    assert written == [
        "hello",
        "/streams",
        "value: three",
        "    1  cd streams",
        "    2  pwd",
        "    3  cat 3",
        "    4  history",
    ]


def test_ctrl_c_abandons_the_line_and_ctrl_d_leaves() -> None:
    assert prompt_with("cat nons\x03pwd\r\x04", SAMPLE) == ["hello", "^C", "/"]


def test_ctrl_c_abandons_a_command_and_goes_on() -> None:
    written: list[str] = []

    def write(line: str) -> None:
        written.append(line)
        if line == "/streams/3":
            raise KeyboardInterrupt

    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text("find /streams\rpwd\r\x04")
        run_interactive(DictDirectory(SAMPLE), "hello", write)

    assert written == ["hello", "/streams", "/streams/3", "^C", "/"]


def test_tab_completes() -> None:
    """Completion runs beside the prompt, so Enter must not come before its result."""
    written: list[str] = []
    with (
        create_pipe_input() as pipe,
        create_app_session(input=pipe, output=DummyOutput()) as session,
    ):

        def type_keys() -> None:
            pipe.send_text("cat /streams/1\t")
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                if session.app is not None and session.app.current_buffer.text.endswith("12"):
                    break
                time.sleep(0.01)
            pipe.send_text("\r\x04")

        typist = threading.Thread(target=type_keys)
        typist.start()
        run_interactive(DictDirectory(SAMPLE), "hello", written.append)
        typist.join()

    assert written == ["hello", "value: twelve"]


def test_failures_do_not_end_the_prompt() -> None:
    written = prompt_with("lss\rls /x\rls '\rpwd\r\x04", SAMPLE)

    assert written == [
        "hello",
        "lss: unknown command\n  did you mean `ls`?",
        "ls: /x: no such file or directory\n  see what is there with `ls /`",
        "the quote ' is never closed: close it or write \\ before it",
        "/",
    ]


def test_failing_backend_does_not_end_the_prompt() -> None:
    written = prompt_with("ls\rcat /a\rpwd\r\x04")

    assert written == ["hello", "out of reach, even ''", "out of reach: a", "/"]
