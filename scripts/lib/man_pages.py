"""Manual pages of the commands, one for each command of the root, its subcommands in it.

Reads help and options from the commands themselves, so that a page can't say anything else. Run as
a program it writes them: python scripts/lib/man_pages.py FOLDER VERSION DATE
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import click

PROGRAM = "streammeta"


def main() -> int:
    """Write the pages into the folder that the command line names; return the exit code."""
    folder, version, date = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages(version, date).items():
        (folder / name).write_text(text)
    return 0


def pages(version: str, date: str) -> dict[str, str]:
    """Return the text of each page by its file's name, such as `streammeta-shell.1`."""
    from streammeta.cli.root import cli

    root = click.Context(cli, info_name=PROGRAM)
    found = {f"{PROGRAM}.1": _page(cli, root, version, date)}
    for name in cli.list_commands(root):
        command = cli.get_command(root, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=root)
        found[f"{PROGRAM}-{name}.1"] = _page(command, context, version, date)
    return found


def _page(command: click.Command, context: click.Context, version: str, date: str) -> str:
    title = context.command_path.replace(" ", "-")
    lines = [
        f'.TH "{_text(title.upper())}" 1 "{date}" "{PROGRAM} {version}" "{PROGRAM}"',
        *(".SH NAME", rf"{_text(title)} \- {_text(_summary(command))}"),
        *(".SH SYNOPSIS", *_synopsis(command, context)),
        *(".SH DESCRIPTION", *_help(command)),
        *(".SH OPTIONS", *_options(command, context)),
    ]
    if isinstance(command, click.Group):
        lines.append(".SH COMMANDS")
        is_root = context.parent is None
        lines.extend(_named(command, context) if is_root else _subcommands(command, context))
    lines += [
        *(".SH EXIT STATUS", "0 done, 1 failed, 2 called the wrong way."),
        *(".SH ENVIRONMENT", "Options are also read from variables"),
        rf"\fB{PROGRAM.upper()}_\fICOMMAND\fB_\fIOPTION\fR.",
    ]
    return "\n".join(lines) + "\n"


def _named(group: click.Group, context: click.Context) -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield from (".TP", rf"\fB{_text(f'{PROGRAM}-{name}')}\fR(1)", _text(_summary(command)))


def _subcommands(group: click.Group, context: click.Context) -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        inner = click.Context(command, info_name=name, parent=context)
        yield f".SS {_text(inner.command_path)}"
        yield from _synopsis(command, inner)
        yield ".PP"
        yield from _help(command)
        yield from _options(command, inner)
        if isinstance(command, click.Group):
            yield from _subcommands(command, inner)


def _summary(command: click.Command) -> str:
    return command.get_short_help_str(limit=200).rstrip(".")


def _synopsis(command: click.Command, context: click.Context) -> Iterator[str]:
    words = " ".join(command.collect_usage_pieces(context))
    yield rf"\fB{_text(context.command_path)}\fR {_text(words)}"


def _help(command: click.Command) -> Iterator[str]:
    """Yield the help: paragraphs are filled, those marked by a backspace stay as they are."""
    for position, paragraph in enumerate(inspect.cleandoc(command.help or "").split("\n\n")):
        if position:
            yield ".PP"
        lines = paragraph.split("\n")
        if lines[0] == "\b":
            yield from (".nf", *(_line(line) for line in lines[1:]), ".fi")
        else:
            yield from map(_line, lines)


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and record[1]:
            yield from (".TP", rf"\fB{_text(record[0])}\fR", _line(record[1]))


def _line(line: str) -> str:
    """Return a line of text that the formatter does not read as a request."""
    text = _text(line)
    return rf"\&{text}" if text.startswith((".", "'")) else text


def _text(text: str) -> str:
    return " ".join(text.split("\n")).replace("\\", r"\e").replace("-", r"\-")


if __name__ == "__main__":
    sys.exit(main())
