"""Call pipeline: authentication, rates, memory budgets, auditing and metrics around every handler.

A call is authenticated before any part of its request is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

from streammeta.controller.errors import ApiError, AuditUnavailableError
from streammeta.controller.rpc.calls import memory_budget
from streammeta.controller.rpc.calls.error_mapping import Context, abort
from streammeta.controller.rpc.calls.memory_budget import MemoryGuard
from streammeta.controller.rpc.calls.tally import RequestTally, UncalledConnections
from streammeta.controller.trust.audit.auditor import Auditor, note_caller
from streammeta.controller.trust.authenticator import (
    Authenticator,
    Caller,
    current_caller,
    fingerprint_shown,
)
from streammeta.controller.trust.rates import Rates
from streammeta.controller.trust.refusals import UnknownKeyError
from streammeta.rpc import tracing
from streammeta.rpc.method_facts import RequestClass
from streammeta.rpc.methods import SERVED_METHODS

_Input = TypeVar("_Input")
_Result = TypeVar("_Result")

Handler: TypeAlias = Callable[[_Input, Context], Awaitable[_Result]]
"""Takes the bytes of a request, or the messages of a stream as they come."""


def holder_of(caller: Caller, context: Context) -> str:
    """Return what a caller's use is counted under: its name, or its connection in plain text."""
    return context.peer() if caller.principal is None else caller.name


def unread_answers(
    bytes_max: int = memory_budget.ANSWER_MEMORY_BYTES,
) -> memory_budget.MemoryBudget:
    """Return a budget of answers that are not sent."""
    return memory_budget.MemoryBudget(bytes_max, what="unread answers")


def _traced(method: str, handler: Handler[_Input, _Result]) -> Handler[_Input, _Result]:
    """Trace the calls that come with a trace, if this controller traces at all."""
    # Decided once, at the start, so that calls without tracing cost nothing.
    if not tracing.is_on():
        return handler

    async def call(data: _Input, context: Context) -> _Result:
        metadata = context.invocation_metadata() or ()
        given = (value for key, value in metadata if key == tracing.TRACEPARENT_KEY)
        with tracing.serving("/".join(method.rsplit(".", 1)), str(next(given, ""))):
            return await handler(data, context)

    return call


class CallPipeline:
    """Wraps handlers, each by the full name of its method."""

    def __init__(
        self,
        authenticator: Authenticator,
        auditor: Auditor | None = None,
        memory: memory_budget.MemoryBudget | None = None,
        rates: Rates | None = None,
        guard: MemoryGuard | None = None,
        answers: memory_budget.MemoryBudget | None = None,
        connections: UncalledConnections | None = None,
        tally: RequestTally | None = None,
    ) -> None:
        """Build the pipeline. Without an `auditor` or a `guard` it omits their steps.

        `memory` is the budget of requests, `answers` the budget of unsent answers. `connections`
        learns the connection of each call over TLS, because only TLS connections are counted when
        they begin. `tally` counts all calls by method.
        """
        self._authenticator = authenticator
        self._auditor = auditor
        self._memory = memory_budget.MemoryBudget() if memory is None else memory
        self._rates = Rates() if rates is None else rates
        self._guard = guard
        self._answers = unread_answers() if answers is None else answers
        self._connections = connections
        self._tally = RequestTally() if tally is None else tally

    def wrap(
        self, method: str, handler: Handler[_Input, _Result], *, lasts: bool = False
    ) -> Handler[_Input, _Result]:
        """Return a handler that authenticates calls first.

        With `lasts` a call ends when a new policy no longer admits its caller.
        """
        handle = _until_denied(self._authenticator, method, handler) if lasts else handler
        facts, guard, connections = SERVED_METHODS[method], self._guard, self._connections
        # A broker whose heartbeats are rejected would be fenced.
        is_rated = facts.work is None or facts.work.kind is not RequestClass.HEARTBEAT
        answers_much = facts.answer_list is not None

        async def call(data: _Input, context: Context) -> _Result:
            caller = await self._authenticate(method, context)
            if connections is not None and caller.principal is not None:
                connections.called(context.peer())

            note_caller(caller.name, caller.fingerprint)
            # A stream counts its own messages as they arrive.
            size = len(data) if isinstance(data, bytes) else 0
            counts = size > memory_budget.SMALL_BYTES
            try:
                # Before the handler, because its work would be wasted on a caller that does not
                # read.
                if answers_much:
                    self._answers.require_room(holder_of(caller, context))
                # Memory before rates: a call rejected for memory must not use up the quota.
                if guard is not None and not guard.is_easy:
                    guard.require(facts.memory, size)
                if caller.policy.quotas and is_rated and isinstance(data, bytes):
                    self._rates.take(caller, size, asyncio.get_running_loop().time())
                if counts:
                    self._memory.require(holder_of(caller, context), size)
            except ApiError as error:
                await abort(context, error)

            if not counts:
                return await handle(data, context)
            try:
                return await handle(data, context)
            finally:
                self._memory.give_back(holder_of(caller, context), size)

        # Outside of authentication, so that rejected calls are recorded too.
        recorded = call if self._auditor is None else _recorded(self._auditor, method, call)
        whole = self._counted(recorded) if answers_much else recorded
        return self._tally.wrap(method, whole if lasts else _traced(method, whole), lasts=lasts)

    async def _authenticate(self, method: str, context: Context) -> Caller:
        """Return the caller of a call, or end the call."""
        try:
            try:
                return self._authenticator.authenticate(method, context)
            # The issuer may have rotated its keys a moment ago. One fetch and one more attempt.
            except UnknownKeyError:
                await self._authenticator.learn_keys()
                return self._authenticator.authenticate(method, context)
        except ApiError as error:
            if self._connections is not None:
                # A rejected caller has made a call, so its connection is not one without calls.
                self._connections.called(context.peer())
            if self._auditor is not None:
                # The principal of an authenticated caller without the role belongs into the audit
                # line.
                note_caller(getattr(error, "principal", ""), fingerprint_shown(context))
            await abort(context, error)

    def _counted(self, call: Handler[Any, Any]) -> Handler[Any, Any]:
        """Return a handler whose answers are counted until they are sent."""

        async def counted(data: Any, context: Context) -> bytes:
            given = await call(data, context)
            answer: bytes = given if isinstance(given, bytes) else given.SerializeToString()
            if (size := len(answer)) > memory_budget.SMALL_BYTES:
                holder = holder_of(current_caller(), context)
                try:
                    self._answers.require(holder, size)
                except ApiError as error:
                    answer = b""  # its caller may not read the refusal either
                    await abort(context, error)
                # gRPC calls it when the answer is sent, or its caller gone.
                sent: Any = partial(self._sent, holder, size)
                context.add_done_callback(sent)
            return answer

        return counted

    def _sent(self, holder: str, size: int, _: Context) -> None:
        self._answers.give_back(holder, size)


def _until_denied(
    authenticator: Authenticator, method: str, handler: Handler[_Input, _Result]
) -> Handler[_Input, _Result]:
    """Return a handler of calls that end when the authenticator's policy refuses their caller."""

    async def cancellable(data: _Input, context: Context) -> _Result:
        with authenticator.long_call(method, context) as call:
            try:
                return await handler(data, context)
            except asyncio.CancelledError:
                # The caller left or the controller stops. Nobody would read a status.
                if call.ended_by is None:
                    raise
                call.uncancel()
                await abort(context, call.ended_by)

    return cancellable


def _recorded(
    auditor: Auditor, method: str, call: Handler[_Input, _Result]
) -> Handler[_Input, _Result]:
    """Return a handler of calls that are recorded, however they end."""

    async def recorded(data: _Input, context: Context) -> _Result:
        record = auditor.arrived(method, context.peer())
        try:
            answer = await call(data, context)
        # Cancellation is an end too, and its outcome is unknown.
        except BaseException:
            record.failed()
            raise
        try:
            await record.answered(answer)
        except AuditUnavailableError as error:
            await abort(context, error)
        return answer

    return recorded
