"""Manual pages of the commands, one for each command and subcommand, in the form of click-man.

Run as a program it writes them: python scripts/lib/man_pages.py FOLDER VERSION DATE
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from click_man.man import ManPage


def main() -> int:
    """Write the pages into the folder that the command line names; return the exit code."""
    folder, version, date = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages(version, date).items():
        (folder / name).write_text(text)
    return 0


def pages(version: str, date: str) -> dict[str, str]:
    """Return the text of each page by its file's name, such as `streammeta-s3-check.1`."""
    from streammeta.cli.root import cli

    root = click.Context(cli, info_name="streammeta", show_default=True)
    return {
        f"{context.command_path.replace(' ', '-')}.1": _page(context, version, date)
        for context in _contexts(root)
    }


def _contexts(context: click.Context) -> Iterator[click.Context]:
    yield context
    for inner in _inner(context):
        yield from _contexts(inner)


def _inner(context: click.Context) -> Iterator[click.Context]:
    group = context.command
    if not isinstance(group, click.Group):
        return
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield click.Context(command, info_name=name, parent=context)


def _page(context: click.Context, version: str, date: str) -> str:
    # click-man itself reads `group.commands`, which is empty in groups that load on demand.
    page = ManPage(context.command_path)
    page.version, page.date = version, date
    page.short_help = _short_help(context)
    page.synopsis = " ".join(context.command.collect_usage_pieces(context))
    page.description = _description(context.command.help or "")
    records = (option.get_help_record(context) for option in context.command.params)
    page.options = [(names, _escape(text)) for names, text in filter(None, records)]
    page.commands = [(inner.info_name, _short_help(inner)) for inner in _inner(context)]
    return str(page)


def _short_help(context: click.Context) -> str:
    return context.command.get_short_help_str(limit=200).rstrip(".")


def _description(text: str) -> str:
    """Return a help text with its verbatim paragraphs, marked by a backspace, left unfilled."""
    text = _escape(inspect.cleandoc(text))
    return re.sub(r"^\x08\n((?:.+\n?)+)", r".nf\n\1\n.fi", text, flags=re.MULTILINE)


def _escape(text: str) -> str:
    """Return text of which the formatter reads no character as an instruction."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    return re.sub(r"^(?=[.'])", r"\\&", text, flags=re.MULTILINE)


if __name__ == "__main__":
    sys.exit(main())
