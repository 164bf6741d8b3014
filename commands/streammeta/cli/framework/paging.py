"""Output on a terminal: short output directly, longer output through the user's pager."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from itertools import chain, islice

import click

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
