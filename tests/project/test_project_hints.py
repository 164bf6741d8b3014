"""Options and commands that messages name exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from streammeta.cli.root import cli

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "proto/streammeta/rpc",
    "proto/streammeta/tls",
    "storage",
    "reconcile",
    "controller",
    "broker_client",
    "brokers",
    "commands",
)

OTHERS = {
    # Java, Spark and pip have these.
    *("--master", "--add-opens", "--add-exports", "--enable-native-access", "--packages"),
    *("--add-modules", "--no-deps", "--help", "--version"),
}
"""Options of programs of others, and those that click adds."""

_OPTION = re.compile(r"(?<![\w\-{/}])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*(?![\w{-])")
_COMMAND = re.compile(r"`streammeta ([a-z][a-z0-9 -]*)")


def all_options(command: click.Command, parent: click.Context | None = None) -> set[str]:
    """Return the options of a command and of all below it."""
    found = {name for parameter in command.params for name in parameter.opts}
    found |= {name for parameter in command.params for name in parameter.secondary_opts}
    if isinstance(command, click.Group):
        context = click.Context(command, parent)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            found |= all_options(below, context)
    return found


def texts() -> Iterator[tuple[str, str]]:
    """Return every string of the product's modules, with its place."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                    continue
                if "var(--" not in node.value:  # a style sheet has variables
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


all_texts = cache(lambda: list(texts()))


def test_every_option_that_a_message_names_is_an_option_of_some_command() -> None:
    known = all_options(cli) | OTHERS
    unknown = {
        f"{place}: {option}"
        for place, text in all_texts()
        for option in _OPTION.findall(text)
        if option not in known
    }
    assert not unknown, "\n".join(sorted(unknown))


def test_every_command_that_a_message_names_exists() -> None:
    wrong = []
    for place, text in all_texts():
        for words in _COMMAND.findall(text):
            command: click.Command = cli
            context = click.Context(cli)
            for word in words.split():
                if not isinstance(command, click.Group) or word.startswith("-"):
                    break
                found = command.get_command(context, word)
                if found is None and not command.invoke_without_command:
                    wrong.append(f"{place}: streammeta {words}")
                if found is None:
                    break
                command, context = found, click.Context(found, context)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("create it or fix --s3-bucket", ["--s3-bucket"]),
        ("give --tls-ca, --tls-cert", ["--tls-ca", "--tls-cert"]),
        ("a--b and ---- are none", []),
    ],
)
def test_options_are_found_in_text(text: str, options: list[str]) -> None:
    assert _OPTION.findall(text) == options
