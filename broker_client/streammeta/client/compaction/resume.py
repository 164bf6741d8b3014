"""Outputs that a compaction has uploaded and not committed, to be used by the next one.

Owns when that is safe. An output is made of certain bytes of certain objects, and objects never
change; so it may be used by any compaction that wants the same bytes in the same order, as long as
its id has not expired. The journal lives and dies with the process: after a crash the ids expire on
the controllers and the objects are deleted.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from streammeta.client.compaction.output_writer import WrittenObject
from streammeta.storage.compaction.entries import EntryTable


@dataclass(frozen=True, slots=True)
class _Kept:
    written: WrittenObject
    until: float


class OutputJournal:
    """What was written, by what it was made of. `clock` gives seconds that never go back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[bytes, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, sources: EntryTable) -> WrittenObject | None:
        """Return the object that is made of these blocks of the sources, if there is one."""
        kept = self._kept.get(_recipe(sources)) if self._kept else None
        return kept.written if kept is not None and self._clock() < kept.until else None

    def keep(self, sources: EntryTable, written: WrittenObject, valid_s: float) -> None:
        """Remember an object for the next `valid_s` seconds."""
        self._kept[_recipe(sources)] = _Kept(written, self._clock() + valid_s)

    def drop(self, object_ids: Iterable[int]) -> None:
        """Forget objects that were committed or are of no use, and those whose time is over."""
        gone, now = set(object_ids), self._clock()
        self._kept = {
            recipe: kept
            for recipe, kept in self._kept.items()
            if kept.written.object_id not in gone and now < kept.until
        }


def _recipe(sources: EntryTable) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for column in (sources.object_id, sources.position, sources.size):
        digest.update(column.tobytes())
    return digest.digest()
