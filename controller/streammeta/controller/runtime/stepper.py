"""Feeds a quorum core one event at a time, and wakes it when its next deadline comes.

What happens while an event is carried out waits until that is done: no call of the core or of the
state machine is made from within another. What was appended goes ahead of every other event: its
offsets are promised, and the core may append records of its own with any of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from streammeta.controller.quorum.core import QuorumCore
from streammeta.controller.quorum.events import Append, Effect, Event, Tick
from streammeta.controller.runtime.clock import Clock


class Stepper:
    """One replica's turns, on one event loop."""

    def __init__(
        self,
        core: QuorumCore,
        clock: Clock,
        *,
        take_appends: Callable[[], Iterable[Append]],
        carry_out: Callable[[Sequence[Effect]], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        """Take the core, what carries out its effects, and where appends come from.

        `on_error` is told of an exception from any, after which nothing is right any more.
        """
        self._core = core
        self._clock = clock
        self._take_appends = take_appends
        self._carry_out = carry_out
        self._on_error = on_error
        self._events: deque[Event] = deque()
        self._is_stepping = False
        self._timer: asyncio.TimerHandle | None = None
        self.is_running = False

    def start(self) -> None:
        """Take the first turn."""
        self.is_running = True
        self.enter(lambda: self._carry_out(self._core.start(self._clock.monotonic_ms())))

    def stop(self) -> None:
        """Take no further turn."""
        self.is_running = False
        if self._timer is not None:
            self._timer.cancel()

    def feed(self, event: Event) -> None:
        """Let the core take an event: now, or when the present turn is over."""
        self._events.append(event)
        if not self._is_stepping:
            self._drain()

    def enter(self, work: Callable[[], None]) -> None:
        """Do `work` as a turn of its own, unless the replica has stopped."""
        if not self.is_running:
            return
        self._is_stepping = True
        try:
            work()
        except Exception as error:  # noqa: BLE001 (an unexpected state ends the process)
            self._on_error(error)
        finally:
            self._is_stepping = False
        self._drain()

    def flush(self) -> None:
        """Let the core take what was appended: now, or when the present turn is over."""
        if not self._is_stepping:
            self._drain()

    def _drain(self) -> None:
        self._is_stepping = True
        try:
            while self.is_running:
                for append in self._take_appends():
                    self._step(append)
                if not self._events:
                    break
                self._step(self._events.popleft())
        except Exception as error:  # noqa: BLE001 (as above)
            self._on_error(error)
        finally:
            self._is_stepping = False
        self._set_timer()

    def _step(self, event: Event) -> None:
        self._carry_out(self._core.step(self._clock.monotonic_ms(), event))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._core.next_deadline()
        if deadline is None or not self.is_running:
            return
        wait_ms = max(0, deadline - self._clock.monotonic_ms())
        loop = asyncio.get_running_loop()
        # One millisecond more: the clock's milliseconds are truncated.
        self._timer = loop.call_later((wait_ms + 1) / 1000, self.feed, Tick())
