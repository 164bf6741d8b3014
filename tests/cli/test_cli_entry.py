"""The first commands of a new operator, and the output and the hints of every command."""

from __future__ import annotations

import errno
import json
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import click
import grpc
import pytest

from streammeta.cli.framework.output import CommandError, Output, explain, run_cli, with_output
from streammeta.cli.local.local_cluster import PROGRAM
from streammeta.cli.root import cli
from streammeta.controller.errors import ApiError, InvalidRequestError
from streammeta.controller.features import SUPPORTED
from streammeta.rpc.connections import operator_channel
from streammeta.storage import installation
from streammeta.storage.errors import BucketNotFoundError
from streammeta.v1.admin_pb2 import DescribeClusterRequest
from streammeta.v1.admin_pb2_grpc import AdminServiceStub
from tests.shell.fake_cluster import FakeCluster, serve


@pytest.mark.parametrize("words", [[], ["quorum"]])
def test_a_group_without_a_command_shows_its_help_or_is_one_object_in_json(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert run_cli(cli, words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("Usage: streammeta")
    assert "Commands:" in said.err
    assert run_cli(cli, [*words, "--format", "json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "USAGE"


HELP_OF_ALL = """
import click
from click.testing import CliRunner
from streammeta.cli.root import cli

def look(group, *path):
    with click.Context(group) as context:
        names = group.list_commands(context)
    for name in names:
        short = CliRunner().invoke(cli, [*path, name, "-h"], prog_name="streammeta")
        long = CliRunner().invoke(cli, [*path, name, "--help"], prog_name="streammeta")
        assert (short.exit_code, long.exit_code) == (0, 0), (path, name)
        assert short.output == long.output, (path, name)
        print(*path, name)
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            look(command, *path, name)
        else:
            words = ["streammeta", *path, *([] if name == "run" else [name])]
            assert " ".join(words) in long.output.partition("Example")[2], (path, name)
            # A controller prints one line, and its log is JSON.
            assert name == "controller" or "--format" in long.output, (path, name)

look(cli)
"""


LIST_OF_ALL = """
import sys
from streammeta.cli.framework.output import run_cli
from streammeta.cli.root import cli

run_cli(cli, ["--help"])
print([name for name in sys.modules if name.endswith("_command")], file=sys.stderr)
"""


@pytest.mark.process
def test_the_list_of_commands_imports_none_of_them() -> None:
    done = run([sys.executable, "-c", LIST_OF_ALL])
    assert "  quorum      Show and change the voters" in done.stdout
    assert done.stderr == "[]\n"


@pytest.mark.parametrize("width", [50, 80, 200])
def test_the_list_of_commands_says_of_each_what_its_own_help_does(width: int) -> None:
    page, own_help = click.HelpFormatter(width=width), click.HelpFormatter(width=width)
    with click.Context(cli) as context:
        cli.format_commands(context, page)
        click.Group.format_commands(cli, context, own_help)
    assert page.getvalue() == own_help.getvalue()


def run(
    command: Sequence[str], env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.process
def test_every_command_has_its_help_by_a_short_name_too_an_example_and_its_formats() -> None:
    """In a process of its own: click remembers the names of a command's first context."""
    done = run([sys.executable, "-c", HELP_OF_ALL])
    assert done.returncode == 0, done.stderr
    assert {"dev", "quorum add-voter", "reconcile apply"} <= set(done.stdout.splitlines())


@pytest.mark.process
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_for_shells(shell: str) -> None:
    env = {"_STREAMMETA_COMPLETE": f"{shell}_source", "PATH": "/usr/bin:/bin"}
    done = run(PROGRAM, env)
    assert (done.returncode, done.stderr) == (0, "")
    assert "_STREAMMETA_COMPLETE" in done.stdout


@pytest.mark.process
@pytest.mark.parametrize(("words", "exit_code"), [(("-V",), 2), (("ls", "/nodes"), 1)])
def test_the_program_fails_in_one_object_on_stdout(words: tuple[str, ...], exit_code: int) -> None:
    done = run([*PROGRAM, "shell", "--connect", "127.0.0.1:1", "--format=json", *words])
    answer = json.loads(done.stdout)
    assert (done.returncode, done.stderr, answer["ok"]) == (exit_code, "", False)
    assert set(answer["error"]) == {"code", "message", "hint"}


@pytest.mark.parametrize(
    ("origin", "requirement"),
    [
        ({}, "'streammeta[reconcile]'"),
        (
            {"url": "file:///opt/stream%20meta", "dir_info": {"editable": True}},
            "-e '/opt/stream meta[reconcile]'",
        ),
        ({"url": "file:///src/s", "dir_info": {}}, "'/src/s[reconcile]'"),
        (
            {"url": "file:///tmp/s-1.whl", "archive_info": {}},
            "'streammeta[reconcile] @ file:///tmp/s-1.whl'",
        ),
    ],
)
def test_the_command_that_installs_an_extra_fits_this_installation(
    monkeypatch: pytest.MonkeyPatch, origin: dict[str, object], requirement: str
) -> None:
    monkeypatch.setattr(installation, "_direct_url", lambda: origin)

    command = installation.install_command("reconcile")

    assert command == f"{sys.executable} -m pip install {requirement}"


WITHOUT = """
import sys
sys.modules |= dict.fromkeys({missing!r})
{body}
"""
OF_EXTRAS = {
    "s3": ("boto3", "botocore"),
    "cli": ("click", "grpc_health", "prompt_toolkit", "rich"),
    "controller": ("grpc_reflection", "pyarrow", "structlog", "uvloop"),
    "reconcile-spark": ("pandas", "psutil", "py4j", "pyspark"),
}
CHECK_CONFIG = [
    *("controller", "--check-config", "--node-id", "1", "--cluster-id", "c"),
    *("--listen", "127.0.0.1:1", "--data-dir", "/none", "--store", "file:///none"),
]
EVERY_MODULE = """
import importlib, pkgutil
import streammeta.client, streammeta.storage
for package in (streammeta.client, streammeta.storage):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if ".s3" not in found.name:
            importlib.import_module(found.name)
from streammeta.storage.errors import MissingPackageError
from streammeta.storage.object_store.opening import open_object_store
try:
    open_object_store("s3://bucket")
except MissingPackageError as error:
    sys.exit(str(error))
"""


def run_without(extras: tuple[str, ...], body: str) -> subprocess.CompletedProcess[str]:
    """Run Python code where nothing is installed that these extras bring."""
    missing = [package for extra in extras for package in OF_EXTRAS[extra]]
    code = WITHOUT.format(missing=missing, body=body)
    return run([sys.executable, "-c", code])


@pytest.mark.process
def test_storage_and_client_need_no_extra_and_an_s3_address_names_its_own() -> None:
    done = run_without(tuple(OF_EXTRAS), EVERY_MODULE)

    assert done.returncode == 1
    assert done.stderr.startswith("an s3:// address needs the package boto"), done.stderr
    assert "Install streammeta[s3]: " in done.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("missing", "words", "code", "said"),
    [
        (tuple(OF_EXTRAS), [], 2, "streammeta: the command line needs the package"),
        (("s3", "controller", "reconcile-spark"), ["quorum", "--help"], 0, ""),
        (("s3", "controller", "reconcile-spark"), ["s3", "url", "--bucket", "b"], 0, ""),
        (("controller",), CHECK_CONFIG, 1, "Install streammeta[controller]: "),
        (
            ("controller", "reconcile-spark"),
            ["reconcile", "apply", "--plan", "/none"],
            1,
            "Install streammeta[reconcile]: ",
        ),
    ],
)
def test_commands_name_extras(
    missing: tuple[str, ...], words: list[str], code: int, said: str
) -> None:
    done = run_without(
        missing,
        f"sys.argv = ['streammeta', *{words!r}]\nfrom streammeta.cli.main import main\nmain()",
    )

    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


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
        ("LIMIT_EXCEEDED", "request fewer items at once"),
        ("BUSY", "epeat the command in a moment"),
        ("DISK_FULL", "ree space on the full disks"),
        ("QUOTA_EXCEEDED", "raise the named limit"),
        ("AUDIT_UNAVAILABLE", "ake the controllers' audit log writable"),
    ],
)
def test_grpc_failure_has_a_hint(
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


COMPLETE = """
source <("$1" completion bash)
COMP_WORDS=({words}) COMP_CWORD={at}
_streammeta_completion "$1"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("streammeta quo", "quorum"),
        ("streammeta quorum desc", "describe"),
        ("streammeta version --format j", "json"),
        ("streammeta completion z", "zsh"),
    ],
)
def test_bash_completes_words_by_the_script(words: str, found: str) -> None:
    script = COMPLETE.format(words=words, at=len(words.split()) - 1)
    done = subprocess.run(
        ["bash", "-c", script, "bash", str(Path(sys.executable).parent / "streammeta")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [found], "")


def test_the_version_is_shown_with_its_feature_levels(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(cli, ["version", "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["version"] == metadata.version("streammeta")
    assert (told["lowest_feature_level"], told["highest_feature_level"]) == (
        SUPPORTED.lowest,
        SUPPORTED.highest,
    )


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


@click.command("brokers")
@with_output
def brokers(output: Output) -> None:
    """Print a table of ordinary width."""
    columns = ("node_id", "state", "epoch", "uploads_owed", "set_objects", "endpoint")
    output.rows("nodes", columns, [(1007, "active", 1_795_345_586_511, 0, 12, "c1.example:9090")])


def test_a_table_is_readable_at_80_columns_and_becomes_records_where_it_has_no_room(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for terminal, command in (("80", brokers), ("80", wide), ("40", brokers)):
        monkeypatch.setenv("COLUMNS", terminal)
        assert run_cli(command, ["--format", "table"]) == 0
        lines = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out).splitlines()
        is_table = any("─" in line for line in lines)
        assert is_table == (command is brokers and terminal == "80")
        if command is brokers:
            assert max(map(len, lines)) <= int(terminal)
    assert "node_id       1007" in lines
    assert "endpoint      c1.example:9090" in lines


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (OSError(errno.EADDRINUSE, "address in use"), "choose another address to listen on"),
        (OSError(errno.EADDRNOTAVAIL, "no such address"), "choose another address to listen on"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "that its server runs"),
        (socket.gaierror(-2, "Name or service not known"), "that its server runs"),
        (PermissionError(errno.EACCES, "denied", "/x"), "check the path"),
    ],
)
def test_the_next_step_fits_the_error(error: OSError, hint: str) -> None:
    assert hint in explain(error).hint


def test_a_listener_whose_error_has_the_cause_alone() -> None:
    error = OSError("http-listen: can't listen on 127.0.0.1:1")
    error.__cause__ = OSError(errno.EADDRINUSE, "address in use")
    assert "choose another address to listen on" in explain(error).hint


def test_a_kafka_broker_names_a_port_that_is_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        words = ["kafka", "--connect", "127.0.0.1:1", "--store", "file:///tmp", "--node-id", "1"]
        code = run_cli(cli, [*words, "--listen", f"127.0.0.1:{port}"])
    said = capsys.readouterr().err
    assert code == 1
    assert f"'127.0.0.1', {port}" in said
    assert "choose another address to listen on" in said
