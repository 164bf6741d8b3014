"""Commands that need the whole metadata or its log: `du`, `diff` and `tail`.

Like all commands they are generators from (state, words) to events. The metadata comes from the
state's source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, fields
from itertools import chain, islice

from streammeta.shell import events, usage
from streammeta.shell.changes import describe_change
from streammeta.shell.differences import KINDS, Difference, differences
from streammeta.shell.state import Command, MetadataCopy, MetadataSource, ShellState
from streammeta.shell.tree import Document, Table, Value

_NO_MAP = events.usage_problem("this tree has no metadata source", "open a cluster or a file")


def _du(state: ShellState, words: list[str]) -> Iterator[events.Event]:
    if state.source is None:
        yield _NO_MAP
        return
    by = words[0] if words else "state"
    # Only `tag` has a second word, its key.
    if by not in _USAGES or (by == "tag") != (len(words) == 2):
        yield events.usage_problem(
            f"du: can't count bytes by {' '.join(words)}",
            "try `du`, `du stream`, `du node`, `du tag KEY` or `du age`",
        )
        return
    copy = state.source.copy()
    yield events.Content(("du", *words), _about(copy, _USAGES[by](copy, words, state.source)))


_USAGES: Mapping[str, Callable[[MetadataCopy, list[str], MetadataSource], Table]] = {
    "state": lambda copy, _, __: usage.by_state(copy),
    "stream": lambda copy, _, __: usage.by_stream(copy),
    "node": lambda copy, _, __: usage.by_node(copy),
    "tag": lambda copy, words, _: usage.by_tag(copy, words[1]),
    "age": lambda copy, _, source: usage.by_age(copy, source.now_ms()),
}
"""Tables of bytes by the first word of `du`."""


def _about(copy: MetadataCopy, table: Table) -> Document:
    facts = (("map", copy.name), ("cluster_id", copy.cluster_id), ("end_offset", copy.end_offset))
    return Document(facts, (table,))


def _diff(state: ShellState, words: list[str]) -> Iterator[events.Event]:
    if state.source is None:
        yield _NO_MAP
        return
    address, *kinds = words

    # All kinds are checked first, because a copy takes long.
    for kind in kinds:
        if kind not in KINDS:
            yield events.usage_problem(
                f"diff: can't compare {kind}", f"choose from {', '.join(KINDS)}, or none for all"
            )
            return

    mine, other = state.source.copy(), state.source.other(address)
    # Compared nevertheless, because a restored cluster has a new id.
    if mine.cluster_id != other.cluster_id:
        yield events.Caption(
            f"The two copies belong to different clusters, {mine.cluster_id} and"
            f" {other.cluster_id}."
        )

    yield events.Content(("diff", *words), _compare(mine, other, kinds or list(KINDS)))


def _compare(mine: MetadataCopy, other: MetadataCopy, kinds: list[str]) -> Document:
    """Return the differences from the copy with the lower offset to the other."""
    # The older copy is `before`, in whichever order the user names them.
    is_later = (mine.end_offset, mine.name) > (other.end_offset, other.name)
    before, after = (other, mine) if is_later else (mine, other)
    tables, counts = [], []

    for kind in kinds:
        found = differences(kind, before, after)
        counts.append((kind, len({difference.id for difference in found})))
        names = tuple(field.name for field in fields(Difference))
        rows = tuple(map(astuple, found))
        tables.append(Table(f"{kind}_changes", names, rows))

    facts: tuple[tuple[str, Value], ...] = (
        ("before", before.name),
        ("before_offset", before.end_offset),
        ("after", after.name),
        ("after_offset", after.end_offset),
        ("equal", not any(count for _, count in counts)),
        *((f"{kind}_that_differ", count) for kind, count in counts),
    )
    return Document(facts, tuple(tables))


def _tail(state: ShellState, words: list[str]) -> Iterator[events.Event]:
    if state.source is None:
        yield _NO_MAP
        return
    if not all(word.isascii() and word.isdigit() for word in words):
        yield events.usage_problem(
            f"tail: {' '.join(words)}: expected a number of changes and an offset",
            "try `tail`, `tail 10` or `tail 10 12000`",
        )
        return
    count = int(words[0]) if words else None
    from_offset = int(words[1]) if len(words) > 1 else None
    changes = state.source.changes(from_offset)

    # The count bounds records. One log entry may have several.
    yield from islice(chain.from_iterable(map(describe_change, changes)), count)


MAP_COMMANDS: Mapping[str, Command] = {
    "du": Command(
        "du [stream|node|tag KEY|age]",
        "count the bytes of objects, by default by state",
        _du,
        0,
        2,
    ),
    "diff": Command(
        "diff MAP [streams] [objects] [nodes]",
        "compare with other metadata: `live`, a checkpoint, an export or a BACKUP@OFFSET",
        _diff,
        1,
        1 + len(KINDS),
    ),
    "tail": Command(
        "tail [COUNT [OFFSET]]",
        "print changes as they are committed, from now or from an offset",
        _tail,
        0,
        2,
        goes_on=True,
    ),
}
