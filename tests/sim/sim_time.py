"""Virtual time, clocks at different speeds, one event loop a life, the trace, and violations.

A life's callbacks run in turns on the simulator's timeline, in the order of the calls for them.
Threads are imitated: their work runs at once, at a later moment. A crash drops all pending work.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, TypeVarTuple

from streammeta.controller.errors import ApiError

EVENTS_MAX = 100_000
"""More events than any run needs: something goes round in circles."""


class Timeline:
    """Actions waiting for their virtual millisecond."""

    def __init__(self) -> None:
        self.now = 0
        self.events = 0
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0

    def later(self, delay: int, action: Callable[[], None]) -> None:
        """Run `action` after `delay` virtual milliseconds, after all that was due then already."""
        self._sequence += 1
        heapq.heappush(self._queue, (self.now + delay, self._sequence, action))

    def run_until(self, done: Callable[[], bool], within_ms: int) -> bool:
        """Let things happen until `done`; return whether it was in time."""
        queue, deadline = self._queue, self.now + within_ms
        while not done():
            if not queue or queue[0][0] > deadline:
                return False
            self.now, _, action = heapq.heappop(queue)
            action()
            self.events += 1
            check(self.events < EVENTS_MAX, "no busy loop", f"{EVENTS_MAX} events")
        return True


@dataclass(frozen=True, slots=True)
class NodeClock:
    """A monotonic clock that began elsewhere and is a little fast or slow."""

    offset: int
    rate: int = 1000
    """Milliseconds it shows in a thousand."""

    def show(self, now: int) -> int:
        """What it shows at virtual time `now`."""
        return self.offset + now * self.rate // 1000

    def when(self, shown: int) -> int:
        """The first virtual time at which it shows `shown` or more."""
        return -((self.offset - shown) * 1000 // self.rate)


class Violation(Exception):  # noqa: N818 (the simulator's word for it)
    """An invariant does not hold; the message begins with its name."""


def check(condition: object, invariant: str, detail: str) -> None:
    """Raise unless the condition holds; for hot paths, test first and call `violated`."""
    if not condition:
        violated(invariant, detail)


def violated(invariant: str, detail: str) -> NoReturn:
    raise Violation(f"{invariant}: {detail}")


KEPT = 50
"""Lines that a failure prints."""


class Trace:
    """Lines of one run; taken only when a run is looked at, for they cost much."""

    def __init__(self, kept: int = KEPT) -> None:
        self.lines: deque[str] = deque(maxlen=kept)
        self._hash = hashlib.sha256()

    def add(self, line: str) -> None:
        self.lines.append(line)
        self._hash.update(line.encode())

    def digest(self) -> str:
        """A hash of every line there ever was."""
        return self._hash.hexdigest()


if TYPE_CHECKING:
    from tests.sim.sim_node import SimNode

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

_LATE_TURNS = 0.1
"""Share of turns that come a millisecond after they were asked for, behind other events."""


class SimLoop(asyncio.AbstractEventLoop):
    """The loop; it is the running one for as long as the node does something."""

    def __init__(self, node: SimNode) -> None:
        self._node = node
        self._rng = node.world.rngs.loops
        self._ready: deque[asyncio.Handle] = deque()
        self._turn_is_due = False
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._is_closed = False

    def enter(self) -> asyncio.AbstractEventLoop | None:
        """Be the running loop from now on; return which was, to be given to `leave`."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        return before

    def leave(self, before: asyncio.AbstractEventLoop | None) -> None:
        asyncio._set_running_loop(before)

    def close(self) -> None:
        """Forget everything that was to come: the process is gone."""
        self._is_closed = True
        self._ready.clear()
        tasks, self._tasks = list(self._tasks), {}
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with suppress(RuntimeError, ValueError):  # it waits once more, or is what crashes
                task.get_coro().close()

    # -- callbacks

    def time(self) -> float:
        return self._node.now() / 1000

    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        if not self._turn_is_due and not self._is_closed:
            self._turn_is_due = True
            self._node.later(int(self._rng.random() < _LATE_TURNS), self._turn)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self,
        delay: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        due = self._node.clock.when(-int(-when * 1000 // 1))

        def ring() -> None:
            if not handle.cancelled():
                self._run(handle)

        self._node.later(max(0, due - self._node.world.timeline.now), ring)
        return handle

    def _turn(self) -> None:
        """Run what is ready now; what that makes ready has to wait for the next turn."""
        count = len(self._ready)
        for _ in range(count):
            handle = self._ready.popleft()
            if not handle.cancelled():
                self._run(handle)
            if self._is_closed:
                return
        self._turn_is_due = False
        if self._ready:
            self._turn_is_due = True
            self._node.later(int(self._rng.random() < _LATE_TURNS), self._turn)

    def _run(self, handle: asyncio.Handle) -> None:
        # Not by its own method, which would keep exceptions from the simulator.
        handle._context.run(handle._callback, *handle._args)  # type: ignore[attr-defined]

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Needs nothing: a cancelled timer does nothing when it is due."""

    # -- tasks, futures, threads

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, **options)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled():
            error = task.exception()
            if error is not None and not isinstance(error, ApiError):
                raise error

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*_Ts], _T], *args: *_Ts
    ) -> asyncio.Future[_T]:
        """Do in one step, some time later, what a thread would do meanwhile."""
        future: asyncio.Future[_T] = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 (told to the waiting caller)
                if not future.cancelled():
                    future.set_exception(error)
            else:
                if not future.cancelled():
                    future.set_result(result)

        self._node.later(3 * self._node.world.disk_delay(), work)
        return future

    # -- what asyncio asks

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._is_closed

    def is_closed(self) -> bool:
        return self._is_closed

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Say that an exception had no receiver."""
        if not self._is_closed and "exception" in context:
            raise context["exception"]
