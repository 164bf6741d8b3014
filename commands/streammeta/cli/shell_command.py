"""`streammeta shell`: walk the map as a tree, at a prompt or with one command."""

import shutil
import sys
from collections.abc import Iterable, Iterator

import click

from streammeta.cli.client import ControllerClient
from streammeta.cli.connecting import with_client
from streammeta.cli.output import (
    EXIT_FAILED,
    EXIT_USAGE,
    CommandError,
    Output,
    OutputFormat,
    with_output,
)
from streammeta.shell.commands import ShellState, execute
from streammeta.shell.events import Event, Problem, ProblemCode, json_value, text_lines
from streammeta.shell.live_tree import live_tree
from streammeta.shell.tree import Directory
from streammeta.v1.admin_pb2 import DescribeClusterRequest, DescribeClusterResponse
from streammeta.v1.admin_pb2_grpc import AdminServiceStub

COMMANDS_WITHOUT_CLUSTER = ("help", "history", "pwd", "exit")


@click.command(context_settings={"allow_interspersed_args": False})
@with_client()
@with_output
@click.argument("words", nargs=-1, metavar="[-- COMMAND ARGS...]")
def shell(
    client: ControllerClient,
    output: Output,
    words: tuple[str, ...],
) -> None:
    """Walk the map of a running cluster as a tree of files.

    With COMMAND runs it and ends, with exit code 1 if it failed; without, opens a prompt. Commands
    are ls, cd, pwd, cat, tree, find, history, help and exit; paths may hold ?, * and {a,b}.

    \b
    Examples:
      streammeta shell --connect 127.0.0.1:9091
      streammeta shell --connect 127.0.0.1:9091 -- cat /streams/3
      streammeta shell --connect 127.0.0.1:9091 --format json -- ls /nodes
    """
    if words and words[0] in COMMANDS_WITHOUT_CLUSTER:
        _run_once(live_tree(client), list(words), output)
    elif words:
        _describe(client)  # a path such as / is listed without asking, with or without cluster
        _run_once(live_tree(client), list(words), output)
    else:
        _open_prompt(client, output)


def _run_once(root: Directory, words: list[str], output: Output) -> None:
    problems: list[Problem] = []
    events = _without_problems(execute(ShellState(root), words), problems)
    if output.format is OutputFormat.JSON:
        output.summary({"command": words[0], **json_value(events)})
    else:
        is_table = output.format is OutputFormat.TABLE
        width = shutil.get_terminal_size().columns if is_table else None
        for line in text_lines(events, width):
            output.note(line)
    if problems:
        raise _as_error(problems)


def _without_problems(events: Iterable[Event], problems: list[Problem]) -> Iterator[Event]:
    for event in events:
        if isinstance(event, Problem):
            problems.append(event)
        else:
            yield event


def _as_error(problems: list[Problem]) -> CommandError:
    """One error for all: programs get the first one's code, people every message."""
    is_usage = problems[0].code is ProblemCode.USAGE
    return CommandError(
        problems[0].code,
        "; ".join(problem.message for problem in problems),
        problems[0].hint,
        exit_code=EXIT_USAGE if is_usage else EXIT_FAILED,
    )


def _describe(client: ControllerClient) -> DescribeClusterResponse:
    """Ask the cluster for its name, so that a wrong address shows at once; raises `CallError`."""
    return client.call(
        lambda channel: AdminServiceStub(channel).DescribeCluster, DescribeClusterRequest()
    )


def _open_prompt(client: ControllerClient, output: Output) -> None:
    if output.format is OutputFormat.JSON or not sys.stdin.isatty():
        raise CommandError(
            "USAGE",
            "a prompt needs a terminal and no --format json",
            "give a command, as in `streammeta shell --connect HOST:PORT -- ls /`",
            exit_code=EXIT_USAGE,
        )
    cluster = _describe(client)
    from streammeta.shell.prompt import run_interactive

    banner = f"Connected to cluster {cluster.cluster_id}. Try `help`; Ctrl-D leaves."
    run_interactive(live_tree(client), banner)
