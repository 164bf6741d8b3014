"""What has been answered already: bounded windows that make repeats harmless.

Entries come in by replay and leave in the order they came, so every replica forgets alike. Knows
neither what the answers mean nor what time it is.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

from controller.metadata.columns import Undo

REQUESTS_MAX = 32_768
"""Create and Prepare requests remembered."""
REJECTED_ROWS_MAX = 65_536
"""Rows left out of commits remembered."""
REMOVED_OBJECTS_MAX = 131_072
"""Committed objects remembered after they are removed."""

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class RequestKind(IntEnum):
    """Which call a remembered request was."""

    CREATE_STREAMS = 1
    PREPARE_OBJECTS = 2


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Two nodes may choose the same request id by accident; they are different requests."""

    kind: RequestKind
    node_id: int
    request_id: str


@dataclass(frozen=True, slots=True)
class IssuedIds:
    """The first answer: `count` ids from `first_id`; `deadline_ms` is -1 for streams."""

    first_id: int
    count: int
    deadline_ms: int = -1


class Window(Generic[_K, _V]):
    """The last `size` entries put in, oldest out first. Putting a key again keeps its place."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: OrderedDict[_K, _V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def get(self, key: _K) -> _V | None:
        """Return what was put under `key`, or None if it was never or has left."""
        return self._entries.get(key)

    def items(self) -> tuple[tuple[_K, _V], ...]:
        """Return the entries, oldest first."""
        return tuple(self._entries.items())

    def keys(self) -> tuple[_K, ...]:
        """Return the entries' keys, oldest first."""
        return tuple(self._entries)

    def load(self, entries: Iterable[tuple[_K, _V]]) -> None:
        """Fill an empty window, oldest first."""
        self._entries.update(entries)

    def put(self, key: _K, value: _V, undo: Undo) -> None:
        """Put an entry in, and the oldest out when there are too many."""
        if key in self._entries:
            before = self._entries[key]
            self._entries[key] = value
            undo.append(lambda: self._entries.__setitem__(key, before))
            return
        self._entries[key] = value
        undo.append(lambda: self._entries.__delitem__(key))
        if len(self._entries) > self._size:
            oldest, dropped = self._entries.popitem(last=False)
            undo.append(lambda: self._restore(oldest, dropped))

    def _restore(self, key: _K, value: _V) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key, last=False)
