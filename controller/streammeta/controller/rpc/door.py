"""What every service shares: submit a request to the loop, wait no longer than the caller does.

Turns exceptions into statuses at one place. Knows no particular request.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from streammeta.controller.errors import InvalidRequestError
from streammeta.controller.rpc.status import Context, abort

TIMEOUT_S_MAX = 60.0
"""Longest a call may wait here, whatever deadline its caller set."""

_ANSWER_BEFORE_S = 0.05
"""Time for the answer to travel, in seconds: a caller that gives up first hears no reason."""
_SHARE_OF_DEADLINE = 0.95
"""Share of a short deadline after which a call is answered."""

UnaryHandler = Callable[[Any, Context], Awaitable[Message]]
StreamHandler = Callable[[Any, Context], Awaitable[None]]
"""Answers one request with many messages, each by `context.write`."""

_Result = TypeVar("_Result")


def guarded(handler: UnaryHandler) -> UnaryHandler:
    """Wrap a unary handler: its exceptions become statuses, the caller's deadline is kept."""

    async def call(request: Message, context: Context) -> Message:
        remaining = context.time_remaining()
        timeout_s = TIMEOUT_S_MAX
        if remaining is not None:
            answer_by = max(remaining - _ANSWER_BEFORE_S, remaining * _SHARE_OF_DEADLINE)
            timeout_s = min(answer_by, TIMEOUT_S_MAX)
        try:
            async with asyncio.timeout(timeout_s):
                return await handler(request, context)
        except Exception as error:  # noqa: BLE001 - the one place that answers for every defect
            await abort(context, error)

    return call


def parsed(
    handler: Callable[[Any, Context], Awaitable[_Result]], parse: Callable[[bytes], Message]
) -> Callable[[bytes, Context], Awaitable[_Result]]:
    """Wrap a handler: bytes that don't parse are the caller's mistake, and answered so."""

    async def call(data: bytes, context: Context) -> _Result:
        try:
            message = parse(data)
        except DecodeError:
            malformed = f"{len(data)} bytes that are no message of this call; send one"
            await abort(context, InvalidRequestError("message", malformed))
        except InvalidRequestError as error:
            await abort(context, error)
        return await handler(message, context)

    return call
