"""Read-ahead of a checkpoint's sections, in a separate thread.

Reading a large section mostly touches memory for the first time, while checking and indexing the
previous one mostly computes. Both release the interpreter's lock most of the time. The module knows
the order of the sections but not their contents.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

from streammeta.controller.snapshot.checkpoint_file import CheckpointReader
from streammeta.controller.snapshot.section_reading import ColumnBuffers

Columns: TypeAlias = dict[str, Any]

LARGE_BYTES = 1 << 20
"""At most one section of this size or more is read ahead, to limit memory."""


class ReadAhead(Mapping[str, Columns]):
    """The sections of an open reader, which must not be used otherwise until this is closed.

    A section that was read ahead is returned once. Later accesses read it again.
    """

    def __init__(
        self, reader: CheckpointReader, order: Sequence[str], buffers: ColumnBuffers
    ) -> None:
        """Start reading. `order` lists sections in order of access, whether they exist or not."""
        self._entries = reader.entries
        self._read: Callable[[str], Columns] = reader.sections(buffers).__getitem__
        self._left = deque(name for name in order if name in reader.entries)
        self._ahead: dict[str, Future[Columns]] = {}
        self._thread = ThreadPoolExecutor(1, "checkpoint-reader")

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the section being read, and drop sections read ahead."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()

    def __getitem__(self, name: str) -> Columns:
        """Return a section. Raises as `CheckpointReader.columns` does."""
        # One thread reads all sections, because they share the position of the file.
        section = self._ahead.pop(name, None) or self._thread.submit(self._read, name)
        self._read_next()
        return section.result()

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _read_next(self) -> None:
        # Small sections may wait in memory, but only one large one.
        while self._left and not any(map(self._is_large, self._ahead)):
            name = self._left.popleft()
            self._ahead[name] = self._thread.submit(self._read, name)

    def _is_large(self, name: str) -> bool:
        return self._entries[name].length >= LARGE_BYTES
