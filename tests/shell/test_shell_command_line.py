"""The shell as a command: formats, errors, exit codes; and its prompt, driven by keys."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from prompt_toolkit.application import create_app_session
from prompt_toolkit.application.current import AppSession
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from streammeta.cli.framework.output import CommandError, run_cli
from streammeta.cli.inspection.metadata_sources import MetadataSources
from streammeta.cli.inspection.shell_command import explain_for_prompt, shell
from streammeta.controller.errors import ApiError
from streammeta.shell.prompt import run_interactive
from streammeta.shell.state import Change, MetadataCopy
from streammeta.shell.tree import Child, Directory, Node
from streammeta.storage.errors import StorageError
from tests.shell.fake_cluster import sample_cluster, serve
from tests.shell.test_shell_commands import SAMPLE, DictDirectory

FOUND_BEFORE = {"command", "documents", "entries", "text"}
"""Members of an answer that a failing command may have filled before it failed."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    with serve(sample_cluster()) as served:
        yield served


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = run_cli(click.Group("streammeta", {"shell": shell}), words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("words", [["ls", "/"], ["cd", "/"], ["tree"]])
def test_commands_need_a_cluster(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    code, out, err = run(capsys, "shell", "--connect", "127.0.0.1:1", "--", *words)
    assert (code, out) == (1, "")
    assert "no controller answers at 127.0.0.1:1" in err


@pytest.mark.parametrize("word", ["help", "pwd", "exit"])
def test_offline_commands_need_no_cluster(capsys: pytest.CaptureFixture[str], word: str) -> None:
    code, _, err = run(capsys, "shell", "--connect", "127.0.0.1:1", "--", word)
    assert (code, err) == (0, "")


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
    capsys: pytest.CaptureFixture[str], endpoint: str, words: list[str], code: str, exit_code: int
) -> None:
    got, out, err = run(capsys, "shell", "--connect", endpoint, "--format", "json", *words)

    answer = json.loads(out)
    assert (got, err) == (exit_code, "")
    assert answer["ok"] is False
    assert answer["error"]["code"] == code
    assert set(answer) - FOUND_BEFORE == {"ok", "error"}
    assert set(answer["error"]) == {"code", "message", "hint"}


def test_text_failures_go_to_stderr(capsys: pytest.CaptureFixture[str], endpoint: str) -> None:
    code, out, err = run(capsys, "shell", "--connect", endpoint, "ls", "/x", "/kv/topics")

    assert code == 1
    assert out == "automq-test\nautomq-test-2\n"
    message, hint = "ls: /x: no such file or directory", "list the directory with `ls /`"
    assert err == f"streammeta: {message}\n  {hint}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["shel"], "No such command 'shel'"),
        (["shell"], "Missing option '--connect'"),
        (["shell", "--connect", "nowhere", "ls"], "--connect: 'nowhere', must be HOST:PORT"),
    ],
)
@pytest.mark.parametrize("output_format", ["json", "plain"])
def test_usage_errors_exit_with_2(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str, output_format: str
) -> None:
    words = [*words[:1], "--format", output_format, *words[1:]]

    code, out, err = run(capsys, *words)

    assert code == 2
    if output_format == "json":
        assert message in json.loads(out)["error"]["message"]
    else:
        assert out == ""
        assert err.startswith("streammeta: ")
        assert message in err


def test_table_format_lists_in_columns(capsys: pytest.CaptureFixture[str], endpoint: str) -> None:
    _, out, _ = run(capsys, "shell", "--connect", endpoint, "--format", "table", "ls")

    assert out.split() == ["cluster", "kv/", "nodes/", "objects/", "streams/"]
    assert out.count("\n") == 1


def test_inner_options_are_not_ours(capsys: pytest.CaptureFixture[str], endpoint: str) -> None:
    code, _, err = run(capsys, "shell", "--connect", endpoint, "ls", "--format")

    assert code == 1
    assert "ls: --format: no such file" in err


def test_connect_may_come_from_the_environment(endpoint: str) -> None:
    result = CliRunner().invoke(shell, ["ls", "/streams"], env={"STREAMMETA_CONNECT": endpoint})

    assert (result.exit_code, result.output) == (0, "3\n")


class _FailingDirectory(Directory):
    """A backend that is down."""

    def children(self, prefix: str = "") -> Iterator[Child]:
        raise ApiError(f"out of reach, even {prefix!r}")

    def child(self, name: str) -> Node | None:
        raise ApiError(f"out of reach: {name}")


@contextmanager
def prompt(tree: Directory, write: Callable[[str], None]) -> Iterator[tuple[PipeInput, AppSession]]:
    """A prompt that reads typed keys; it runs when the block ends."""
    with (
        create_pipe_input() as pipe,
        create_app_session(input=pipe, output=DummyOutput()) as session,
    ):
        yield pipe, session
        run_interactive(tree, "hello", write)


def prompt_with(keys: str, tree: Directory | None = None) -> list[str]:
    """What the prompt prints when these keys are typed."""
    written: list[str] = []
    with prompt(tree or DictDirectory(SAMPLE), written.append) as (pipe, _):
        pipe.send_text(keys)
    return written


def test_prompt_runs_lines_until_exit() -> None:
    written = prompt_with("cd streams\rpwd\rcat 3\r\rhistory\rexit\rpwd\r")

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
    assert prompt_with("cat nons\x03pwd\r\x04") == ["hello", "^C", "/"]


def test_ctrl_c_abandons_a_command_and_goes_on() -> None:
    written: list[str] = []

    def write(line: str) -> None:
        written.append(line)
        if line == "/streams/3":
            raise KeyboardInterrupt

    with prompt(DictDirectory(SAMPLE), write) as (pipe, _):
        pipe.send_text("find /streams\rpwd\r\x04")

    assert written == ["hello", "/streams", "/streams/3", "^C", "/"]


def test_tab_completes() -> None:
    """Completion runs beside the prompt, so Enter must not come before its result."""
    written: list[str] = []
    with prompt(DictDirectory(SAMPLE), written.append) as (pipe, session):

        def type_keys() -> None:
            pipe.send_text("cat /streams/1\t")
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                if session.app is not None and session.app.current_buffer.text.endswith("12"):
                    break
                time.sleep(0.01)
            pipe.send_text("\r\x04")

        typist = threading.Thread(target=type_keys)
        typist.start()
    typist.join()
    assert written == ["hello", "value: twelve"]


def test_failures_do_not_end_the_prompt() -> None:
    written = prompt_with("lss\rls /x\rls '\rpwd\r\x04")

    assert written == [
        "hello",
        "lss: unknown command\n  did you mean `ls`?",
        "ls: /x: no such file or directory\n  list the directory with `ls /`",
        "the quote ' is never closed: close it or write \\ before it",
        "/",
    ]


def test_failing_backend_does_not_end_the_prompt() -> None:
    written = prompt_with("ls\rcat /a\rpwd\r\x04", _FailingDirectory())

    assert written == ["hello", "out of reach, even ''", "out of reach: a", "/"]


class _FailingSource:
    """Maps that can't be opened, each by an error of another kind."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def copy(self) -> MetadataCopy:
        raise self._error

    def other(self, _address: str) -> MetadataCopy:
        raise self._error

    def changes(self, _from_offset: int | None) -> Iterator[Change]:
        raise self._error

    def now_ms(self) -> int:
        return 0


@pytest.mark.parametrize(
    "error",
    [
        CommandError("NO_MAP", "WRONG/PATH: No such file or directory", "name a checkpoint file"),
        StorageError("bucket 'x' does not exist"),
        OSError(5, "Input/output error"),
        ValueError("a defect"),
        click.exceptions.Exit(1),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("line", ["diff WRONG/PATH", "du", "tail"])
def test_an_error_of_any_kind_costs_one_command_alone(error: Exception, line: str) -> None:
    written: list[str] = []
    source = _FailingSource(error)
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text(f"{line}\rpwd\r\x04")
        tree = DictDirectory(SAMPLE)
        run_interactive(tree, "hello", written.append, source=source, explain=explain_for_prompt)
    first, problem, last = written
    assert (first, last) == ("hello", "/")
    known = not isinstance(error, ValueError | click.exceptions.Exit)
    assert problem.startswith(str(error) if known else "defect in streammeta")


def test_a_map_that_is_not_there_is_named_at_the_prompt(tmp_path: Path) -> None:
    written: list[str] = []
    with (
        contextlib.closing(MetadataSources(None, None)) as sources,
        create_pipe_input() as pipe,
        create_app_session(input=pipe, output=DummyOutput()),
    ):
        pipe.send_text(f"diff {tmp_path}/wrong\rpwd\r\x04")
        tree = DictDirectory(SAMPLE)
        run_interactive(tree, "hello", written.append, source=sources)
    assert written[-1] == "/"
    assert len(written) == 3
