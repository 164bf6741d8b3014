"""Reads sections of a checkpoint before they are asked for, in a thread of its own.

Reading a large section is mostly memory that is touched for the first time, checking and indexing
the one before is mostly computing; both release the interpreter's lock most of the time. Knows the
order in which sections will be asked for, and nothing of what they hold.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

from streammeta.controller.snapshot.checkpoint_file import CheckpointReader, Rooms

Columns: TypeAlias = dict[str, Any]

LARGE_BYTES = 1 << 20
"""No more than one section of this size or more is read ahead, because of the memory."""


class ReadAhead(Mapping[str, Columns]):
    """The sections of an open reader, which has no other use until this is closed.

    Each is handed out once as it was read ahead; asked for again it is read again.
    """

    def __init__(self, reader: CheckpointReader, order: Sequence[str], rooms: Rooms) -> None:
        """Begin; `order` names sections in the order they will be asked for, known or not."""
        self._entries = reader.entries
        self._read: Callable[[str], Columns] = reader.sections(rooms).__getitem__
        self._left = deque(name for name in order if name in reader.entries)
        self._ahead: dict[str, Future[Columns]] = {}
        self._thread = ThreadPoolExecutor(1, "checkpoint-reader")

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the section that is being read; drop what was read ahead."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()

    def __getitem__(self, name: str) -> Columns:
        """Return a section; raises as `CheckpointReader.columns` does."""
        section = self._ahead.pop(name, None) or self._thread.submit(self._read, name)
        self._go_on()
        return section.result()

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _go_on(self) -> None:
        while self._left and not any(map(self._is_large, self._ahead)):
            name = self._left.popleft()
            self._ahead[name] = self._thread.submit(self._read, name)

    def _is_large(self, name: str) -> bool:
        return self._entries[name].length >= LARGE_BYTES
