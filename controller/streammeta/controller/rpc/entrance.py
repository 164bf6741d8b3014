"""The way of every call into its handler, whatever it is of and whichever service.

A call is let in by the door before anything of it is read. What else is to be done about every
call, before or after it, is done here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias, TypeVar

from streammeta.controller.errors import ApiError
from streammeta.controller.rpc.request_guard import Context, abort
from streammeta.controller.trust.door import Door

_Input = TypeVar("_Input")
_Result = TypeVar("_Result")

Handler: TypeAlias = Callable[[_Input, Context], Awaitable[_Result]]
"""Takes the bytes of a request, or the messages of a stream as they come."""


class Entrance:
    """Wraps handlers, each by the full name of its method."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def wrap(self, method: str, handler: Handler[_Input, _Result]) -> Handler[_Input, _Result]:
        """Return a handler of calls that are let in first; a stream is, at its start."""

        async def call(data: _Input, context: Context) -> _Result:
            try:
                self._door.enter(method, context)
            except ApiError as error:
                await abort(context, error)
            return await handler(data, context)

        return call
