"""Code blocks of the documentation's pages, and their entries in the table of blocks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.docs.block_kinds import Kind
from tests.docs.block_table import TABLE

ROOT = Path(__file__).resolve().parents[2]

PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docker/README.md")
"""Pages beside those in docs/."""

GENERATED = "docs/reference/commands.md"
"""Page made from the commands' own help; its blocks are usage lines and the examples."""

_PROGRAM = re.compile(r"(\S+/bin/)?streammeta")
_FENCE = re.compile(r"( *)```(\w*)")


@dataclass(frozen=True)
class Block:
    """A block of code: its page, the number of its first line there, language and text."""

    page: str
    line: int
    language: str
    text: str

    @property
    def first(self) -> str:
        """The first line, by which the table finds the block."""
        return self.text.partition("\n")[0].strip()

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> list[Block]:
    """Return all blocks of README, docs and the pages of `PAGES`."""
    paths = [*(ROOT / page for page in PAGES), *sorted((ROOT / "docs").rglob("*.md"))]
    return [block for path in paths for block in _blocks_of(path)]


def _blocks_of(path: Path) -> Iterator[Block]:
    page, lines = str(path.relative_to(ROOT)), path.read_text().splitlines()
    at = 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        is_indented = re.match(r" {4}\S", lines[at]) and not lines[at - 1].strip()
        if not fence and not is_indented:
            at += 1
            continue
        start = at + 1 if fence else at
        at = start
        while at < len(lines) and not (
            lines[at].strip().startswith("```")
            if fence
            else lines[at].strip() and not lines[at].startswith("    ")
        ):
            at += 1
        cut = len(fence[1]) if fence else 4
        text = "\n".join(line[cut:] for line in lines[start:at]).strip("\n")
        yield Block(page, start + 1, fence[2] if fence else "", text)
        at += 1 if fence else 0


def commands(text: str) -> list[str]:
    """Return the lines of a shell block: continued ones joined, without comments."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [line.strip() for line in joined.splitlines() if shlex.split(line, comments=True)]


def streammeta_commands(line: str) -> list[list[str]]:
    """Return the words of each `streammeta` command in a line of a shell block.

    What the shell puts in place of a variable or a pattern stays as it is written.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    simple: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("();<>|&"):
            simple.append([])
        else:
            simple[-1].append(word)
    return [
        words[at + 1 :]
        for words in simple
        for at, word in enumerate(words)
        if _PROGRAM.fullmatch(word) and (at == 0 or words[at - 1] == "--")
    ]


@dataclass(frozen=True)
class Entries:
    """The kind of each block in the order of the table, and sentences about what has no partner."""

    kinds: Mapping[Block, Kind]
    problems: Sequence[str]


def find_entries(found: Sequence[Block], table: Mapping[str, Mapping[str, Kind]]) -> Entries:
    """Find the entry of each block; a block without one is a problem, and so is the reverse."""
    left = list(found)
    kinds: dict[Block, Kind] = {}
    problems: list[str] = []
    for page, entries in table.items():
        for key, kind in entries.items():
            begins = " ".join(re.sub(r" \(\d\)$", "", key).split())
            block = next((b for b in left if b.page == page and _text(b).startswith(begins)), None)
            if block is None:
                problems.append(f"block_table.py: no block of {page} begins with {key!r}")
                continue
            kinds[block] = kind
            left.remove(block)
    problems += [
        f"{block} has no entry in block_table.py; say how it is tested: {_text(block)[:60]!r}"
        for block in left
    ]
    return Entries(kinds, problems)


def entries_of_pages() -> Entries:
    """Return the entries of all pages but the generated one."""
    return find_entries([block for block in blocks() if block.page != GENERATED], TABLE)


def _text(block: Block) -> str:
    return " ".join(block.text.replace("\\\n", " ").split())
