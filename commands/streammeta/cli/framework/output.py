"""Output contract of every command: formats, errors, exit codes, shared kinds of options.

- `table` is for people and the default on a terminal. `plain` prints tab-separated lines and is the
  default in a pipe. `json` prints exactly one object on standard output, also when the command
  fails.
- A failure in json is `{"ok": false, "error": {"code", "message", "hint"}}`, some with `details` in
  the error, together with the results found before the failure. In the other formats it is two
  lines on standard error: `streammeta: <message>` and the next step.
- Exit codes: 0 success, 1 failure, 2 usage error. A command with further codes lists them in its
  help.
- Durations and sizes are options such as 30s, 5m, 200MiB.
"""

import errno
import functools
import json
import re
import socket
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, NoReturn

import click
import grpc

from streammeta.cli.framework import client, profiles
from streammeta.controller.config import ConfigError
from streammeta.controller.errors import ApiError, LogOfBeforeError, NewerLogError
from streammeta.controller.journal.errors import DirectoryNotFormattedError, JournalError
from streammeta.rpc.failures import read_failure
from streammeta.shell.events import cell
from streammeta.storage import errors, installation
from streammeta.tls.files import TlsError


def say_progress(line: str, ends: str = "\n") -> None:
    """Show progress on standard error if that is a terminal."""
    if sys.stderr.isatty():
        click.echo(line + ends, err=True, nl=False)


class _Quantity(click.ParamType[int]):
    """Whole number with a unit, converted to the smallest unit."""

    units: Mapping[str, int]
    example: str

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Parse `value`. A default that is already a number is returned unchanged."""
        # Defaults of options are already numbers, and click converts them too.
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+)([A-Za-z]+)", str(value))
        if found is None or found[2] not in self.units:
            self.fail(
                f"{value!r} is not a {self.name}, expected for example {self.example}", param, ctx
            )
        return int(found[1]) * self.units[found[2]]


class Duration(_Quantity):
    """Duration such as 30m, in milliseconds."""

    name = "duration"
    units = MappingProxyType({"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000})
    example = "90s, 30m, 12h or 3d"


class Moment(click.ParamType[int]):
    """Time with its zone, such as 2026-05-01T12:00:00Z, in milliseconds since 1970."""

    name = "time"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Parse `value`. A number is already in milliseconds."""
        if isinstance(value, int):
            return value
        try:
            # fromisoformat also accepts times without a zone, which are rejected below.
            moment = datetime.fromisoformat(str(value))
        except ValueError:
            moment = None

        # Without a zone the same text would be another moment on another machine.
        if moment is None or moment.tzinfo is None:
            self.fail(
                f"{value!r} is not a time with its zone, expected for example 2026-05-01T12:00:00Z",
                param,
                ctx,
            )
        return round(moment.timestamp() * 1000)


class ByteCount(_Quantity):
    """Number of bytes such as 200MiB."""

    name = "size"
    units = MappingProxyType({"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30})
    example = "512KiB, 200MiB or 4GiB"


EXIT_FAILED = 1
EXIT_USAGE = 2
PIPED_TABLE_WIDTH = 200
NOTHING_FOUND: Mapping[str, Any] = MappingProxyType({})
TEXT_COLUMN_WIDTH_MIN = 12
"""Minimum width of a text column, in characters, before a table outgrows the terminal."""
COLUMN_PADDING = 3
"""Characters between two columns of a table."""


class OutputFormat(StrEnum):
    """Format of a command's output."""

    TABLE = "table"
    PLAIN = "plain"
    JSON = "json"


class CommandError(Exception):
    """Failure of a command: `code` for programs, the message and `hint` for people.

    `details` are for programs. People have seen them already.
    """

    def __init__(
        self,
        code: str,
        message: str,
        hint: str = "",
        *,
        exit_code: int = EXIT_FAILED,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.details = details
        self.code = code
        self.hint = hint
        self.exit_code = exit_code


EXPECTED_ERRORS = (
    *(CommandError, ApiError, ConfigError, errors.StorageError, JournalError, NewerLogError),
    *(LogOfBeforeError, grpc.RpcError, OSError, profiles.ProfileError, TlsError),
)
"""Errors that `command_output` explains. Any other exception is a defect."""


def explain(error: Exception) -> CommandError:
    """Return message and hint for one of `EXPECTED_ERRORS`."""
    # Subclasses come before their bases.
    match error:
        case CommandError():
            return error
        case client.CallError():
            return CommandError(error.code, str(error), error.hint)
        case grpc.RpcError():
            return explain(client.call_error(read_failure(error), "a controller"))
        case errors.MissingPackageError():
            return CommandError("MISSING_PACKAGE", str(error), "repeat the command afterwards")
        case errors.StorageError():
            return CommandError("STORAGE", str(error), "correct this and repeat the command")
        case JournalError():
            return CommandError("DATA_DIRECTORY", str(error), _directory_hint(error))
        case NewerLogError() | LogOfBeforeError():
            return _log_error(error)
        case profiles.ProfileError():
            return CommandError("PROFILE", str(error), "correct the file, or use --profile none")
        case TlsError():
            return CommandError(
                "TLS",
                str(error),
                "`streammeta certs show` shows the problems of a certificate",
            )
        case ConfigError():
            return CommandError("CONFIG", str(error), "correct the option and repeat")
        case OSError():
            return CommandError("OS", str(error), _os_hint(error))
        case _:
            from streammeta.controller.rpc.calls.error_mapping import (
                classify,  # needs the extra `controller`
            )

            _, code, _ = classify(error)
            return CommandError(code, str(error), "nothing was changed")


def _os_hint(error: OSError) -> str:
    """Return the next step by the kind of error. A listener's error has its own as cause."""
    cause = error.__cause__
    # A failed listener raises an error without a number, caused by the system's own error.
    number = error.errno or (cause.errno if isinstance(cause, OSError) else None)
    if number == errno.EIO:
        return _BAD_DISK
    if number in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
        return "stop the process that uses this address, or choose another address to listen on"
    # ConnectionError is an OSError too, but its cause is the network and no path.
    if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
        return "check the address, and that its server runs and is reachable from here"
    return _BAD_PATH


_BAD_PATH = "check the path, its permissions and free space"

_BAD_DISK = (
    "the disk can't read or write this file. Check the kernel's log and copy the directory"
    " to another disk. If the copy fails too, give this controller an empty directory, as"
    " after the loss of a disk"
)


def _log_error(error: NewerLogError | LogOfBeforeError) -> CommandError:
    if isinstance(error, LogOfBeforeError):
        hint = (
            "keep the directory, and start this controller on an empty one, formatted with --join"
        )
        return CommandError("LOG_OF_BEFORE", str(error), hint)
    hint = "no data is damaged or lost. The newer version can read the directory"
    return CommandError("NEWER_VERSION", str(error), hint)


def _directory_hint(error: JournalError) -> str:
    if isinstance(error, DirectoryNotFormattedError):
        return "see `streammeta storage format --help`"
    return "nothing in the directory was changed"


@dataclass(slots=True)
class Output:
    """Output of a command. In json it becomes one object, written when the command ends."""

    format: OutputFormat
    collected: dict[str, Any] = field(default_factory=dict)

    def summary(self, facts: Mapping[str, Any]) -> None:
        """Print named facts. In json they are members of the object itself."""
        if self.format is OutputFormat.JSON:
            self.collected.update(facts)
            return
        # Plain output is not aligned, so that programs can split each line at the first colon.
        separator = ": "
        width = max(map(len, facts), default=0) if self.format is OutputFormat.TABLE else 0
        for name, value in facts.items():
            click.echo(f"{name + separator:{width + len(separator)}}{cell(value)}")

    def rows(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Print a table. In json it is a list of objects called `name`."""
        if self.format is OutputFormat.JSON:
            self.collected[name] = [dict(zip(columns, row, strict=True)) for row in rows]
        elif self.format is OutputFormat.PLAIN:
            for row in (columns, *rows):
                click.echo("\t".join(map(cell, row)))
        else:
            _print_table(columns, rows)

    def text(self, name: str, text: str) -> None:
        """Print text unchanged. In json it is a member called `name`."""
        if self.format is OutputFormat.JSON:
            self.collected[name] = text
        else:
            click.echo(text)

    def note(self, text: str) -> None:
        """Print a line for people. json omits it."""
        if self.format is not OutputFormat.JSON:
            click.echo(text)


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    # Rich takes long to import, and only tables need it.
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    listed = [tuple(row) for row in rows]
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    needed = 0
    for index, column in enumerate(columns):
        values = [row[index] for row in listed]
        # Numbers are never wrapped, since half a number reads as another number.
        is_number = _is_numeric(values)
        longest = max(len(column), *(len(cell(value)) for value in values), 0)
        least = longest if is_number else min(longest, TEXT_COLUMN_WIDTH_MIN)
        needed += least + COLUMN_PADDING
        table.add_column(
            column,
            justify="right" if is_number else "left",
            overflow="fold",
            no_wrap=is_number,
            min_width=least,
        )
    for row in listed:
        # As Text, because Rich would read square brackets as markup.
        table.add_row(*(Text(cell(value)) for value in row))
    # Rich assumes 80 columns in a pipe, which would fold most tables.
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else PIPED_TABLE_WIDTH)
    # The terminal would wrap such lines, and columns that are cut in pieces can't be read.
    if needed > console.width and listed:
        _print_records(columns, listed)
    else:
        console.print(table)


def _print_records(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print each row as lines `column  value`, separated by blank lines."""
    width = max(map(len, columns))
    for number, row in enumerate(rows):
        if number:
            click.echo("")
        for column, value in zip(columns, row, strict=True):
            click.echo(f"{column:{width}}  {cell(value)}".rstrip())


def _is_numeric(values: Sequence[Any]) -> bool:
    """Return whether a column holds only numbers and blanks, so that it is never wrapped."""
    return all(value is None or isinstance(value, int | float) for value in values)


@contextmanager
def command_output(output_format: OutputFormat) -> Iterator[Output]:
    """Run a command's body under the contract: print its result or explain its failure."""
    output = Output(output_format)
    try:
        # A missing extra becomes a sentence with the command to install it.
        with installation.optional_packages("this command"):
            yield output
    except BrokenPipeError:
        raise  # the reader has seen enough: click ends the program quietly
    except EXPECTED_ERRORS as error:
        # Results found before the failure are still printed in json.
        fail(output_format, explain(error), output.collected)
    # Printed only at the end, so that standard output is exactly one object.
    if output_format is OutputFormat.JSON:
        click.echo(json.dumps({"ok": True, **output.collected}))


def fail(
    output_format: OutputFormat, error: CommandError, found: Mapping[str, Any] = NOTHING_FOUND
) -> NoReturn:
    """Write the failure and end the command with its exit code.

    `found` holds the results so far. In json they accompany the error.
    """
    _write_failure(output_format, error, found)
    raise click.exceptions.Exit(error.exit_code)


def _write_failure(
    output_format: OutputFormat, error: CommandError, found: Mapping[str, Any] = NOTHING_FOUND
) -> None:
    if output_format is OutputFormat.JSON:
        shown = {"code": error.code, "message": str(error), "hint": error.hint}
        details = {"details": error.details} if error.details else {}
        # Own keys come last: a result named "ok" or "error" must not hide the failure.
        click.echo(json.dumps({**found, "ok": False, "error": {**shown, **details}}))
        return
    click.echo(f"streammeta: {error}", err=True)
    if error.hint:
        click.echo(f"  {error.hint}", err=True)


format_option = click.option(
    "--format",
    "output_format",
    type=click.Choice([choice.value for choice in OutputFormat]),
    callback=lambda _context, _parameter, value: _chosen_format(value),
    help="Output format. [default: table on a terminal, else plain]",
)
"""Adds `--format`: argument `output_format: OutputFormat`."""


def with_output(command: client.Command) -> client.Command:
    """Add `--format`, and run the command under the contract: argument `output: Output`."""

    @functools.wraps(command)
    def run(*, output_format: OutputFormat, **others: Any) -> None:
        with command_output(output_format) as output:
            command(output=output, **others)

    return format_option(run)


def _chosen_format(value: str | None) -> OutputFormat:
    if value is not None:
        return OutputFormat(value)
    return OutputFormat.TABLE if sys.stdout.isatty() else OutputFormat.PLAIN


def run_cli(command: click.Command, arguments: Sequence[str] | None = None) -> int:
    """Run the whole program and return its exit code. The caller only exits with it.

    `arguments` defaults to the arguments of the process. Failures outside of `command_output`, such
    as a misspelt option, follow the same contract.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    # click reports misspelt options before it has parsed --format.
    output_format = _format_in(words)

    try:
        with installation.optional_packages("this command"):
            # standalone_mode would print errors by itself, and not as json.
            result = command.main(words, prog_name="streammeta", standalone_mode=False)
    # A subclass of UsageError, so it comes first.
    except click.exceptions.NoArgsIsHelpError as error:
        _write_missing_command(output_format, error)
        return EXIT_USAGE
    except click.UsageError as error:
        _write_failure(output_format, _usage_failure(error))
        return EXIT_USAGE
    except click.ClickException as error:
        _write_failure(output_format, CommandError("FAILED", error.format_message()))
        return EXIT_FAILED
    except click.Abort:
        _write_failure(output_format, CommandError("INTERRUPTED", "interrupted"))
        return EXIT_FAILED
    except EXPECTED_ERRORS as error:
        _write_failure(output_format, explain(error))
        return EXIT_FAILED
    except Exception as error:  # noqa: BLE001 - the last stop: a defect is still one object in json
        traceback.print_exc()
        message = f"defect in streammeta ({type(error).__name__}: {error})"
        _write_failure(
            output_format, CommandError("DEFECT", message, "report it together with the traceback")
        )
        return EXIT_FAILED

    # click hands back an exit code where a command asked for one, and a command's result elsewhere.
    return result if isinstance(result, int) else 0


def _write_missing_command(
    output_format: OutputFormat, error: click.exceptions.NoArgsIsHelpError
) -> None:
    """Answer a group without a command: people see its help, programs the error object."""
    if output_format is OutputFormat.JSON:
        path = error.ctx.command_path if error.ctx else "streammeta"
        missing = CommandError("USAGE", f"{path}: no command given", f"see `{path} --help`")
        _write_failure(output_format, missing)
    else:
        click.echo(error.format_message(), err=True)


def _usage_failure(error: click.UsageError) -> CommandError:
    path = error.ctx.command_path if error.ctx else "streammeta"
    return CommandError("USAGE", error.format_message(), f"see `{path} --help`")


def _format_in(words: Sequence[str]) -> OutputFormat:
    """Return the requested format, read before click has validated the words."""
    # Words after "--" are arguments, even if they look like options.
    options = words[: words.index("--")] if "--" in words else words
    chosen = [
        following if word == "--format" else word.removeprefix("--format=")
        for word, following in zip_longest(options, options[1:], fillvalue="")
        if word.startswith("--format")
    ]
    # The last one counts, as in click.
    return OutputFormat.JSON if chosen[-1:] == ["json"] else OutputFormat.PLAIN
