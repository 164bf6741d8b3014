"""Event loop around a quorum core: one event in at a time, and messages out when they may leave.

Events that occur during a step wait: the core and the state machine are never called from within
another call. Appended payloads go ahead of every other event, because their offsets are promised
and the core may append its own records with any event.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from streammeta.controller.ids import NodeId
from streammeta.controller.quorum.core import QuorumCore
from streammeta.controller.quorum.events import Append, Effect, Event, Send, Tick, TimeLost
from streammeta.controller.quorum.messages import (
    FetchRequest,
    Request,
    RequestHeader,
    Response,
    ResponseHeader,
)
from streammeta.controller.runtime.clock import Clock
from streammeta.controller.runtime.interfaces import PeerTransport, Reply

_LATE_MS = 500
"""Delay of a timer above which the process counts as not having run."""

_CallKey: TypeAlias = tuple[NodeId, int, int]


class CoreLoop:
    """Feeds a quorum core its events and ticks, on one event loop."""

    def __init__(
        self,
        core: QuorumCore,
        clock: Clock,
        *,
        take_appends: Callable[[], Iterable[Append]],
        carry_out: Callable[[Sequence[Effect]], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        """`on_error` receives any exception of the parts. The replica must end then."""
        self._core = core
        self._clock = clock
        self._take_appends = take_appends
        self._carry_out = carry_out
        self._on_error = on_error
        self._events: deque[Event] = deque()
        self._is_stepping = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0
        """Deadline of the current timer."""
        self.is_running = False

    def start(self) -> None:
        """Run the first turn."""
        self.is_running = True
        self.enter(lambda: self._carry_out(self._core.start(self._clock.monotonic_ms())))

    def stop(self) -> None:
        """Run no further turns."""
        self.is_running = False
        if self._timer is not None:
            self._timer.cancel()

    def feed(self, event: Event) -> None:
        """Pass an event to the core, now or after the current turn."""
        self._events.append(event)
        if not self._is_stepping:
            self._drain()

    def enter(self, work: Callable[[], None]) -> None:
        """Run `work` as a separate turn, unless the replica has stopped."""
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
        """Pass the appended payloads to the core, now or after the current turn."""
        if not self._is_stepping:
            self._drain()

    def _drain(self) -> None:
        self._is_stepping = True
        try:
            self._note_lost_time()
            while self.is_running:
                # Appends first: their offsets are promised, and any event may append a record of
                # the core.
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

    def _note_lost_time(self) -> None:
        """Report time in which this process did not run to the core, before any other event.

        Otherwise the core's deadlines would pass although the peers' messages of that time are
        still unread.
        """
        if self._timer is None:
            return
        lost_ms = self._clock.monotonic_ms() - self._timer_at
        if lost_ms > _LATE_MS and self.is_running:
            # The timer is still late, and the same time must not be reported twice.
            self._timer_at += lost_ms
            self._step(TimeLost(lost_ms))

    def _set_timer(self) -> None:
        """Wake up at the core's next deadline. An earlier timer stays.

        Most deadlines move later with every message. Replacing the timer each time would cost more
        than one early wake-up.
        """
        deadline = self._core.next_deadline()
        if deadline is None or not self.is_running:
            return
        if self._timer is not None:
            # An early wake-up costs one turn, and replacing the timer costs as much for every
            # message.
            if self._timer_at <= deadline:
                return
            self._timer.cancel()
        wait_ms = max(0, deadline - self._clock.monotonic_ms())
        self._timer_at = deadline
        # One millisecond more, because the clock truncates to milliseconds.
        self._timer = asyncio.get_running_loop().call_later((wait_ms + 1) / 1000, self._wake)

    def _wake(self) -> None:
        self.enter(self._note_lost_time)
        self._timer = None
        deadline = self._core.next_deadline()
        if deadline is not None and self._clock.monotonic_ms() < deadline:
            self._set_timer()
        else:
            self.feed(Tick())


class Outbox:
    """Messages of the core in order, each delayed until the write it depends on is durable.

    A request goes to the transport, and an answer to the peer's call if it still waits. A delayed
    message is dropped when a message of a later epoch overtakes it: a replica never speaks for an
    epoch that it has left.
    """

    def __init__(self, transport: PeerTransport) -> None:
        self._transport = transport
        self._durable_token = 0
        self._state_token = 0
        """Token of the last quorum-state that became durable before its turn."""
        self._delayed: deque[Send] = deque()
        self._epoch = 0
        """Newest epoch of a sent message."""
        self._replies: dict[_CallKey, Reply] = {}

    def send(self, effect: Send) -> None:
        """Send a message once the write it depends on is durable, unless its epoch is over then."""
        message = effect.message
        if self._delayed and isinstance(message, FetchRequest) and not effect.vouches_for_log:
            self._replace_held_fetch(effect.to)
        if self._must_wait(effect):
            self._delayed.append(effect)
        # A newer epoch was announced meanwhile, so this message could only mislead.
        elif message.header.epoch < self._epoch:
            # The peer still waits, and learns at once that there is no answer.
            if isinstance(message, Response):
                self._end(message, None)
        else:
            self._epoch = message.header.epoch
            if isinstance(message, Request):
                self._transport.send(message)
            else:
                self.answer(message)

    def expect(self, request: Request, reply: Reply) -> None:
        """Register `reply` for a request's answer. An earlier identical request gets no answer."""
        key = _call_key(request.header.sender.node_id, request.header)
        replaced = self._replies.get(key)
        self._replies[key] = reply
        # The peer repeats a request only after it has abandoned the earlier call.
        if replaced is not None:
            replaced(None)

    def answer(self, response: Response) -> None:
        """Pass an answer to the call that waits for it, if any."""
        self._end(response, response)

    def forget(self, request: Request, reply: Reply) -> None:
        """Drop `reply`, because its request no longer waits for an answer."""
        key = _call_key(request.header.sender.node_id, request.header)
        # A repeated request may have replaced it.
        if self._replies.get(key) is reply:
            del self._replies[key]

    def durable(self, token: int) -> None:
        """Send the messages that waited for writes up to `token`, which are durable now."""
        self._durable_token = token
        self._send_delayed()

    def state_durable(self, token: int) -> None:
        """Send the messages that waited for the quorum-state `token`, durable before its turn."""
        self._state_token = token
        self._send_delayed()

    def _end(self, response: Response, answer: Response | None) -> None:
        header = response.header
        reply = self._replies.pop(_call_key(header.receiver, header), None)
        if reply is not None:
            reply(answer)

    def _replace_held_fetch(self, to: NodeId) -> None:
        """Drop a delayed Fetch, which the core replaces with a newer one."""
        self._delayed = deque(
            held
            for held in self._delayed
            if held.to != to or not isinstance(held.message, FetchRequest)
        )

    def _must_wait(self, effect: Send) -> bool:
        is_state_durable = not effect.vouches_for_log and effect.after <= self._state_token
        return effect.after > self._durable_token and not is_state_durable

    def _send_delayed(self) -> None:
        # send puts messages that still wait back, in their order.
        held, self._delayed = self._delayed, deque()
        for effect in held:
            self.send(effect)

    def close(self) -> None:
        """Drop delayed messages, and end the waiting calls without an answer."""
        self._delayed.clear()
        replies, self._replies = self._replies, {}
        for reply in replies.values():
            reply(None)


def _call_key(caller: NodeId, header: RequestHeader | ResponseHeader) -> _CallKey:
    """Return the key that identifies one call of a peer."""
    return caller, header.incarnation, header.request_id
