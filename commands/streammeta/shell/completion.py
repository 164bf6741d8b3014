"""What the Tab key offers: commands for the first word, paths where a command takes them.

Asks the tree for a bounded number of names and never fails: no answer means no offer.
"""

import re
from dataclasses import dataclass

from streammeta.controller.errors import ApiError
from streammeta.shell.commands import COMMANDS, ShellState
from streammeta.shell.glob import compile_component, escape
from streammeta.shell.paths import absolute, resolve
from streammeta.shell.tree import File

SUGGESTIONS_MAX = 200

_LAST_WORD = re.compile(r"(?:\\.|[^\s\\])*\\?$", re.DOTALL)
_PATH_COMMANDS = frozenset({"ls", "cd", "cat", "tree", "find"})


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Replace the last `replaced_length` characters of the line by `text`; people see `label`."""

    text: str
    replaced_length: int
    label: str


def suggestions(state: ShellState, line: str) -> list[Suggestion]:
    """What may follow at the end of `line`."""
    match = _LAST_WORD.search(line)
    word = match[0] if match else ""
    before = line[: len(line) - len(word)].split()
    if not before:
        return _commands(word)
    if before[0] == "help" and len(before) == 1:
        return _commands(word)
    if before[0] not in _PATH_COMMANDS:
        return []
    try:
        return _paths(state, word)
    except ApiError:
        return []


def _commands(word: str) -> list[Suggestion]:
    return [Suggestion(name, len(word), name) for name in COMMANDS if name.startswith(word)]


def _paths(state: ShellState, word: str) -> list[Suggestion]:
    parent, slash, start = word.rpartition("/")
    prefix = compile_component(start).literal
    if prefix is None:
        return []  # a pattern stands for what it matches; there is nothing to add
    place = absolute(state.here, parent + slash)
    for _, node in resolve(state.root, place):
        if isinstance(node, File):
            continue
        return [
            Suggestion(
                escape(child.name) + ("" if isinstance(child.node, File) else "/"),
                len(start),
                child.name,
            )
            for child in node.suggest(prefix, SUGGESTIONS_MAX)
        ]
    return []
