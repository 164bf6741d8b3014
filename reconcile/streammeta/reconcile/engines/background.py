"""Background threads of a pipeline: prefetch the next items, and write finished ones.

They help where the work happens in Arrow, numpy or the kernel, without Python's global lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_DEPTH = 2
"""Items in flight in a thread. With one, the threads would wait for each other at every item."""


def prefetch(items: Iterator[T]) -> Iterator[T]:
    """Yield the items, computing the next ones in a thread. No item may be None."""
    with ThreadPoolExecutor(1) as pool:
        coming = deque(pool.submit(next, items, None) for _ in range(_DEPTH))
        while (item := coming.popleft().result()) is not None:
            coming.append(pool.submit(next, items, None))
            yield item


class BackgroundWriter:
    """Runs pieces of work in a thread, in order, while the caller prepares the next ones.

    A later call raises the error of an earlier piece, once. Pieces after it may have run.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._under_way: deque[Future[None]] = deque()

    def submit(self, work: Callable[[], None]) -> None:
        """Queue `work`, waiting while the queue is full. Raises the error of an earlier piece."""
        if len(self._under_way) == _DEPTH:
            self._under_way.popleft().result()
        self._under_way.append(self._pool.submit(work))

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown()
        # After an error in the block, that error counts.
        if kind is None:
            for future in self._under_way:
                future.result()
