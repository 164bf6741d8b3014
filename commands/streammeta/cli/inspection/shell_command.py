"""`streammeta shell`: browse the metadata as a tree, at a prompt or with one command."""

import contextlib
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NoReturn

import click

from streammeta.cli.framework.client import DEADLINE_S, ControllerClient, describe_cluster
from streammeta.cli.framework.connecting import Endpoints, connecting, timeout_option
from streammeta.cli.framework.output import (
    EXIT_FAILED,
    EXIT_USAGE,
    EXPECTED_ERRORS,
    CommandError,
    Output,
    OutputFormat,
    explain,
    with_output,
)
from streammeta.cli.inspection.metadata_sources import MetadataSources
from streammeta.shell import commands, tree
from streammeta.shell.events import Event, Problem, ProblemCode, json_value, text_lines
from streammeta.shell.live_tree import live_tree
from streammeta.shell.state import ShellState
from streammeta.tls.files import CallerFiles

COMMANDS_WITHOUT_MAP = ("help", "history", "pwd", "exit")


# Options after the first word belong to the shell's command, not to this one.
@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--file",
    "address",
    metavar="MAP",
    help="Browse this metadata: a checkpoint file, the folder of a Parquet export, or"
    " BACKUP_URI@OFFSET.",
)
@connecting(Endpoints.OPTIONAL)
@timeout_option(DEADLINE_S)
@with_output
@click.argument("words", nargs=-1, metavar="[-- COMMAND ARGS...]")
def shell(
    *,
    address: str | None,
    connect: tuple[str, ...] | None,
    tls: CallerFiles | None,
    timeout_s: float,
    output: Output,
    words: tuple[str, ...],
) -> None:
    """Browse the metadata of a running cluster, or of files, as a tree of files.

    With COMMAND the shell runs it and exits, with code 1 if it failed. Without COMMAND it opens a
    prompt. Commands are ls, cd, pwd, cat, tree, find, du, diff, tail, history, help and exit. Paths
    may contain ?, * and {a,b}. Output longer than the terminal goes through the pager that PAGER
    names.

    \b
    Examples:
      streammeta shell --connect 127.0.0.1:9091
      streammeta shell --connect 127.0.0.1:9091 -- cat /streams/3
      streammeta shell --connect 127.0.0.1:9091 -- find --tag topic=orders
      streammeta shell --connect 127.0.0.1:9091 --format json -- tail 10
      streammeta shell --file 00000000000000001234-0000000005.checkpoint -- du stream
      streammeta shell --file ./map --connect 127.0.0.1:9091 -- diff live streams
    """
    if address is None and connect is None:
        raise click.MissingParameter(
            "Or use --file.", param_hint="'--connect'", param_type="option"
        )
    with contextlib.ExitStack() as parts:
        client = None
        if connect is not None:
            client = parts.enter_context(ControllerClient(connect, timeout_s, tls))
        sources = parts.enter_context(contextlib.closing(MetadataSources(client, address)))
        if words:
            _run_once(sources, client, words, output)
        else:
            _open_prompt(sources, client, output)


def _root(sources: MetadataSources, client: ControllerClient | None) -> tree.Directory:
    return sources.tree() if sources.address is not None else live_tree(_require_client(client))


def _require_client(client: ControllerClient | None) -> ControllerClient:
    assert client is not None, "a shell without a file has a cluster"
    return client


def _run_once(
    sources: MetadataSources, client: ControllerClient | None, words: Sequence[str], output: Output
) -> None:
    # These commands need no metadata, so they also work without a cluster.
    if words[0] in COMMANDS_WITHOUT_MAP:
        root: tree.Directory = live_tree(_Nobody())
    else:
        if sources.address is None:
            describe_cluster(_require_client(client))  # a path such as / is listed without asking
        root = _root(sources, client)

    # Rejected before anything runs, because json is written at the end only.
    if words[0] == "tail" and len(words) == 1 and output.format is OutputFormat.JSON:
        raise CommandError(
            "USAGE",
            "tail: without a number of changes it never ends, so json has no object to print",
            "add a number, as in `tail 10`",
            exit_code=EXIT_USAGE,
        )

    problems: list[Problem] = []
    state = ShellState(root, source=sources)
    # Problems are set aside: other paths are still shown, and the failure comes last.
    events = _without_problems(commands.execute(state, list(words)), problems)

    if output.format is OutputFormat.JSON:
        output.summary({"command": words[0], **json_value(events)})
    elif output.format is OutputFormat.TABLE:
        lines = text_lines(events, shutil.get_terminal_size().columns)
        command = commands.COMMANDS.get(words[0])
        # Output that never ends must appear at once, but show_lines first collects a screenful.
        show = write_lines if command is not None and command.goes_on else show_lines
        show(lines)
    else:
        for line in text_lines(events):
            output.note(line)

    # Events are generated while they are printed, so the problems are complete only here.
    if problems:
        raise _as_error(problems)


class _Nobody:
    """Caller for commands that send no request."""

    def call(self, *_: object) -> NoReturn:
        """See `live_tree.Caller`."""
        raise AssertionError("the command sends no request")


def _without_problems(events: Iterable[Event], problems: list[Problem]) -> Iterator[Event]:
    for event in events:
        if isinstance(event, Problem):
            problems.append(event)
        else:
            yield event


def _as_error(problems: list[Problem]) -> CommandError:
    """Return one error for all: programs get the first code, people every message."""
    is_usage = problems[0].code is ProblemCode.USAGE
    return CommandError(
        problems[0].code,
        "; ".join(problem.message for problem in problems),
        problems[0].hint,
        exit_code=EXIT_USAGE if is_usage else EXIT_FAILED,
    )


def _open_prompt(sources: MetadataSources, client: ControllerClient | None, output: Output) -> None:
    if output.format is OutputFormat.JSON or not sys.stdin.isatty():
        raise CommandError(
            "USAGE",
            "a prompt needs a terminal and no --format json",
            "add a command, as in `streammeta shell --connect HOST:PORT -- ls /`",
            exit_code=EXIT_USAGE,
        )
    if sources.address is None:
        banner = f"Connected to cluster {describe_cluster(_require_client(client)).cluster_id}."
    else:
        # Read now, so that a damaged file fails before the prompt appears.
        copy = sources.copy()
        banner = f"Metadata of cluster {copy.cluster_id} below offset {copy.end_offset}."
    # The prompt's packages load slowly, and a single command does not need them.
    from streammeta.shell.prompt import run_interactive

    run_interactive(
        _root(sources, client),
        f"{banner} Try `help`. Ctrl-D exits.",
        source=sources,
        show=show_lines,
        explain=explain_for_prompt,
    )


def explain_for_prompt(error: Exception) -> tuple[str, str]:
    """Return message and next step of a failure, as the command prints them after `--`."""
    # A defect in one command must not end the prompt.
    if not isinstance(error, EXPECTED_ERRORS):
        return f"defect in streammeta ({type(error).__name__}: {error})", "report it"
    explained = explain(error)
    return str(explained), explained.hint


_LESS = "FRX"
"""Options for `less` unless the user has set some: keep colours and leave the text visible."""


def show_lines(lines: Iterable[str]) -> None:
    """Print lines, through a pager if standard output is a terminal that is too short for them.

    The pager pulls the lines, so the rest is never fetched if the user quits early.
    """
    # A pager in a pipe would wait for a key that nobody presses.
    if not sys.stdout.isatty():
        write_lines(lines)
        return
    rest = iter(lines)
    # One line is reserved for the prompt. One more item decides whether the text fits.
    first = list(islice(rest, shutil.get_terminal_size().lines - 1))
    following = next(rest, None)
    if following is None:
        write_lines(first)
        return
    # Only a default: the user's own options for less have precedence.
    os.environ.setdefault("LESS", _LESS)
    click.echo_via_pager(f"{line}\n" for line in chain(first, [following], rest))


def write_lines(lines: Iterable[str]) -> None:
    """Print lines as they arrive."""
    for line in lines:
        click.echo(line)
