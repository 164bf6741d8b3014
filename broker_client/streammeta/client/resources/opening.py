"""Opening of a part with I/O: `await X.open(...)`, or `async with X.open(...) as x`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

Params = ParamSpec("Params")
PartT = TypeVar("PartT", bound=AbstractAsyncContextManager[Any])


class Opening(Coroutine[Any, Any, PartT], AbstractAsyncContextManager[PartT]):
    """A part that is being opened. Await it, or enter it to close the part at the end."""

    # A coroutine and not only an awaitable, so that `asyncio.run` and `create_task` accept it.

    def __init__(self, coroutine: Coroutine[Any, Any, PartT]) -> None:
        self._coroutine = coroutine
        self._part: PartT | None = None

    def send(self, value: Any) -> Any:
        """See `Coroutine.send`."""
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """See `Coroutine.throw`."""
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """Give up an opening that was not awaited. See `Coroutine.close`."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, PartT]:
        return self._coroutine.__await__()

    async def __aenter__(self) -> PartT:
        self._part = await self._coroutine
        await self._part.__aenter__()
        return self._part

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        assert self._part is not None
        return await self._part.__aexit__(kind, error, traceback)


def opening(
    open_part: Callable[Params, Coroutine[Any, Any, PartT]],
) -> Callable[Params, Opening[PartT]]:
    """Let the result of an `open` coroutine function also be entered."""

    @functools.wraps(open_part)
    def start(*args: Params.args, **kwargs: Params.kwargs) -> Opening[PartT]:
        return Opening(open_part(*args, **kwargs))

    return start
