"""Two threads beside the one that works: one makes what comes next, one finishes what is done.

Of use where they spend their time in Arrow, numpy or the kernel, without Python's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, each made in a thread while the one before is in use; none is None."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item


class Behind:
    """Does one piece of work in a thread while the next is made ready; errors come later."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._under_way: Future[None] | None = None

    def take(self, work: Callable[[], None]) -> None:
        """Begin with `work` once that before is done; raises what this has raised."""
        if self._under_way is not None:
            self._under_way.result()
        self._under_way = self._pool.submit(work)

    def __enter__(self) -> Behind:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown()
        if kind is None and self._under_way is not None:
            self._under_way.result()
