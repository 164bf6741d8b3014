"""Entries of the table for blocks, and what is wrong with the table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.docs.block_kinds import Kind
from tests.docs.block_table import TABLE
from tests.docs.code_blocks import GENERATED, Block, blocks


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
