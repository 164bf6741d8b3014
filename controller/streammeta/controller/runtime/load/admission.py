"""Admission control for the controller's event loop, and work budgets for its turns.

Every call belongs to a class with a limit of calls in flight and of waiting calls. Further calls
are rejected immediately, because an unbounded queue only turns work into timeouts. Heartbeats and
commits hardly ever wait. Scans block the loop for milliseconds each, so few run at a time, and each
first yields to everything that has arrived meanwhile. `Admission` is the rule, without loop or
clock, and `Gate` lets coroutines wait for it.

Tasks that wake together would otherwise do all their work in one turn of the loop. `TurnBudget`
spreads it over several.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from streammeta.controller.errors import BusyError
from streammeta.controller.metadata.tables.values import page_size
from streammeta.controller.runtime.clock import Clock
from streammeta.rpc.method_facts import LISTS_LOOKUPS, RequestClass, Unnamed, Work


@dataclass(frozen=True, slots=True)
class ClassLimits:
    """Maximum numbers of calls of a class in flight and waiting."""

    running: int
    waiting: int


LIMITS: Final[Mapping[RequestClass, ClassLimits]] = {
    RequestClass.HEARTBEAT: ClassLimits(running=10_000, waiting=0),
    RequestClass.COMMIT: ClassLimits(running=10_000, waiting=10_000),
    RequestClass.CHANGE: ClassLimits(running=2_000, waiting=8_000),
    RequestClass.READ: ClassLimits(running=2_000, waiting=8_000),
    RequestClass.SCAN: ClassLimits(running=2, waiting=256),
    RequestClass.SNAPSHOT: ClassLimits(running=2, waiting=16),
}

RETRY_AFTER_MS = 500
"""Time after which fewer calls should be waiting, in milliseconds."""

ROUNDS_BEFORE_SCAN = 3
"""Event loop turns yielded before each scan. A request needs two from socket to decision."""

OPENED_PER_TURN = 64
"""Maximum number of waiting calls admitted in one event loop turn."""

LOOKUPS_OF_A_READ = 500
"""Look-ups above which a read costs as much as a scan: GetObjects queries, keys, ids."""

_PATIENT = (RequestClass.SCAN, RequestClass.SNAPSHOT)


def class_of(work: Work, request: Any) -> RequestClass:
    """Return the class of a decoded request: its method's, or SCAN if it costs many look-ups."""
    return RequestClass.SCAN if _lookups(work, request) > LOOKUPS_OF_A_READ else work.kind


def _lookups(work: Work, request: Any) -> float:
    """Return the look-ups that a request costs, infinity if it walks through the metadata."""
    if work.walks_with and getattr(request, work.walks_with):
        return math.inf
    has_lists = any(getattr(request, name) for name in work.lists)
    lookups = LISTS_LOOKUPS if has_lists else work.lookups
    count: int = len(getattr(request, work.items)) if work.items else 0
    if count:
        return count * lookups

    match work.unnamed:
        case Unnamed.NOTHING:
            return 0
        case Unnamed.PAGE:
            return lookups * page_size(request.page)
        case Unnamed.WALK:
            return math.inf


@dataclass(slots=True, eq=False)
class Ticket:
    """One call. Without `deadline_ms` it waits indefinitely."""

    kind: RequestClass
    deadline_ms: int | None
    is_running: bool = False


class Admission:
    """Calls in flight and waiting calls, by class."""

    def __init__(self, limits: Mapping[RequestClass, ClassLimits] = LIMITS) -> None:
        self._limits = limits
        self._running = dict.fromkeys(RequestClass, 0)
        self._refused = dict.fromkeys(RequestClass, 0)
        self._waiting: dict[RequestClass, deque[Ticket]] = {kind: deque() for kind in RequestClass}

    def running(self, kind: RequestClass) -> int:
        """Return the number of calls of a class in flight."""
        return self._running[kind]

    def waiting(self, kind: RequestClass) -> int:
        """Return the number of waiting calls of a class."""
        return len(self._waiting[kind])

    def refused(self, kind: RequestClass) -> int:
        """Return the number of calls of a class rejected since the start."""
        return self._refused[kind]

    def ask(self, kind: RequestClass, deadline_ms: int | None, now_ms: int) -> Ticket:
        """Request admission of a call.

        The call runs now if its ticket is running, else when `next` returns the ticket.

        Raises:
            BusyError: too many calls of its class are waiting.
            TimeoutError: its deadline has passed.
        """
        # The caller has given up, so any work for it would be lost.
        if deadline_ms is not None and deadline_ms <= now_ms:
            raise TimeoutError("the call's deadline had passed when it arrived")

        ticket, queue = Ticket(kind, deadline_ms), self._waiting[kind]
        # After waiting calls of its class, or an overload would starve the oldest.
        if not queue and self._has_room(kind):
            self._start(ticket)
            return ticket
        if len(queue) >= self._limits[kind].waiting:
            self._refused[kind] += 1
            raise BusyError(
                f"{self._running[kind]} calls of class {kind.name} are in flight and {len(queue)} "
                "are waiting, which is the limit: retry later",
                RETRY_AFTER_MS,
            )

        queue.append(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Release the slot of a call that has ended or stopped waiting."""
        if ticket.is_running:
            ticket.is_running = False
            self._running[ticket.kind] -= 1
        else:
            with contextlib.suppress(ValueError):
                self._waiting[ticket.kind].remove(ticket)

    def next(self, now_ms: int) -> Ticket | None:
        """Return the next ticket whose wait is over, or None.

        If `is_running`, the call runs from now on. Otherwise its deadline has passed and it never
        runs.
        """
        # In the order of RequestClass: heartbeats and commits come before scans.
        for kind, queue in self._waiting.items():
            # A late ticket is returned first, so that its caller learns of the timeout immediately.
            if queue and self._is_late(queue[0], now_ms):
                return queue.popleft()
            if queue and self._has_room(kind):
                ticket = queue.popleft()
                self._start(ticket)
                return ticket
        return None

    def _has_room(self, kind: RequestClass) -> bool:
        return self._running[kind] < self._limits[kind].running

    def _is_late(self, ticket: Ticket, now_ms: int) -> bool:
        return ticket.deadline_ms is not None and ticket.deadline_ms <= now_ms

    def _start(self, ticket: Ticket) -> None:
        ticket.is_running = True
        self._running[ticket.kind] += 1


class Gate:
    """Admission for coroutines of one event loop."""

    def __init__(self, clock: Clock, admission: Admission | None = None) -> None:
        self._clock = clock
        self.admission = admission or Admission()
        self._waiters: dict[Ticket, asyncio.Future[None]] = {}
        self._is_scheduled = False

    def admitted(self, kind: RequestClass, remaining_s: float | None = None) -> _Admitted:
        """Return a context for a call of class `kind`, entered once the call is admitted.

        Entering raises:
            BusyError: too many calls of its class are waiting.
            TimeoutError: `remaining_s` seconds passed before its turn.
        """
        return _Admitted(self, kind, remaining_s)

    async def enter(self, kind: RequestClass, remaining_s: float | None) -> Ticket:
        """Return the ticket of a call once it is admitted. Raises as `admitted` says."""
        now_ms = self._clock.monotonic_ms()
        deadline_ms = None if remaining_s is None else now_ms + int(remaining_s * 1000)
        ticket = self.admission.ask(kind, deadline_ms, now_ms)
        try:
            if not ticket.is_running:
                await self._turn_of(ticket)
            if kind in _PATIENT:
                for _ in range(ROUNDS_BEFORE_SCAN):
                    await asyncio.sleep(0)
        # Also on cancellation, or the slot would never be free again.
        except BaseException:
            self.leave(ticket)
            raise
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Release the slot of a call that has ended, and admit waiting calls."""
        self.admission.leave(ticket)
        # Nearly always nobody waits, and scheduling costs a turn.
        if self._waiters:
            self._schedule()

    async def _turn_of(self, ticket: Ticket) -> None:
        loop = asyncio.get_running_loop()
        waiter = self._waiters[ticket] = loop.create_future()
        alarm: asyncio.TimerHandle | None = None
        if ticket.deadline_ms is not None:
            wait_ms = max(0, ticket.deadline_ms - self._clock.monotonic_ms())
            # One millisecond more, because the clock truncates to milliseconds.
            alarm = loop.call_later((wait_ms + 1) / 1000, self._expire, ticket)
        try:
            await waiter
        finally:
            del self._waiters[ticket]
            if alarm is not None:
                alarm.cancel()

    def _expire(self, ticket: Ticket) -> None:
        waiter = self._waiters.get(ticket)
        if waiter is not None and not waiter.done():
            # Removed from the queue before its caller wakes, so that it can't be admitted in
            # between.
            self.admission.leave(ticket)
            waiter.set_exception(_late())

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._admit_waiting)

    def _admit_waiting(self) -> None:
        self._is_scheduled = False
        for _ in range(OPENED_PER_TURN):
            ticket = self.admission.next(self._clock.monotonic_ms())
            if ticket is None:
                return
            waiter = self._waiters[ticket]
            if waiter.done():
                continue  # its call was cancelled in this turn and is leaving
            if ticket.is_running:
                waiter.set_result(None)
            else:
                waiter.set_exception(_late())
        # More may be waiting than one turn admits.
        self._schedule()


class _Admitted:
    """Context of an admitted call.

    A class, because a generator costs more and every call has one.
    """

    __slots__ = ("_gate", "_kind", "_remaining_s", "_ticket")

    def __init__(self, gate: Gate, kind: RequestClass, remaining_s: float | None) -> None:
        self._gate = gate
        self._kind = kind
        self._remaining_s = remaining_s

    async def __aenter__(self) -> None:
        self._ticket = await self._gate.enter(self._kind, self._remaining_s)

    async def __aexit__(self, *_: object) -> None:
        self._gate.leave(self._ticket)


def _late() -> TimeoutError:
    return TimeoutError("the call's deadline passed while it waited for admission")


class TurnBudget:
    """Budget of work per event loop turn. Later turns pay for any excess of one task.

    The owner chooses the unit of cost.
    """

    def __init__(self, per_turn: int) -> None:
        self._per_turn = self._left = per_turn
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._is_scheduled = False

    async def take(self, cost: int) -> None:
        """Return in the first turn with budget left, which may be this one."""
        if self._left > 0 and not self._waiting:
            self._left -= cost
            self._schedule()
            return
        # In order, also after cheaper work, so that large messages are not starved.
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((cost, granted))
        await granted

    def _next_turn(self) -> None:
        self._is_scheduled = False
        # A debt of earlier turns is carried over, unused budget is not.
        self._left = min(self._per_turn, self._left + self._per_turn)
        while self._waiting and self._left > 0:
            cost, granted = self._waiting.popleft()
            if not granted.done():
                self._left -= cost
                granted.set_result(None)
        if self._left < self._per_turn:
            self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next_turn)
