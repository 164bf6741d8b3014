"""Two threads beside the one that works: one makes what comes next, one finishes what is done.

Of use where they spend their time in Arrow, numpy or the kernel, without Python's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_DEPTH = 2
"""Pieces under way in a thread: with one alone it would wait for the other thread at each."""


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, made in a thread while those before are in use; none is None."""
    with ThreadPoolExecutor(1) as pool:
        coming = deque(pool.submit(next, items, None) for _ in range(_DEPTH))
        while (item := coming.popleft().result()) is not None:
            coming.append(pool.submit(next, items, None))
            yield item


class Behind:
    """Does pieces of work in a thread, in their order, while others are made ready.

    Errors come later, and are raised once; what was taken after them may be done.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._under_way: deque[Future[None]] = deque()

    def take(self, work: Callable[[], None]) -> None:
        """Have `work` done, once few enough pieces are left before it; raises what they raised."""
        if len(self._under_way) == _DEPTH:
            self._under_way.popleft().result()
        self._under_way.append(self._pool.submit(work))

    def __enter__(self) -> Behind:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown()
        if kind is None:
            for one in self._under_way:
                one.result()
