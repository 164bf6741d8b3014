"""Shares of the server: the work of one turn of the event loop, and each listener's part of bounds.

Clients cause work before anybody knows who they are. So all of it is counted where it arises and
drawn from one budget a turn, which leaves the rest of the turn to the quorum. Work that waits is
done by rounds: listeners take turns, then callers of a listener, then connections of a caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from streammeta.controller.grpc_server.limits import Limits

_MOST = 7 / 8
"""Share of a turn's work that is enough for another one."""

_DEBT_TURNS = 16
"""Idle turns that may follow work above the limit of one turn."""

_K = TypeVar("_K")
_V = TypeVar("_V")
_C = TypeVar("_C", bound="WaitingConnection")


class WaitingCall(Protocol):
    """A call that can wait for its turn."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes or goes."""

    def start(self) -> None:
        """Let the handler run."""


class WaitingConnection(Protocol):
    """A connection whose work can wait for a turn."""

    share: Share
    caller: Hashable
    """Certificate or host of the client."""


class Share:
    """One listener's part of the limits of its server, which no other listener uses up."""

    def __init__(self, limits: Limits) -> None:
        """Use the limits of the server, all of them until other listeners share them."""
        self._limits = limits
        self.connections = 0
        self.calls = 0
        """Calls under way."""
        self.held = 0
        """Bytes of requests that are not complete, or not taken by their handlers."""
        self.waiting: deque[WaitingCall] = deque()
        """Calls that wait to be begun."""
        self.priority: deque[WaitingCall] = deque()
        """The same of calls that other calls do not hold up."""
        self.divide(1)

    def divide(self, listeners: int) -> None:
        """Use an equal part of the limits that `listeners` share.

        The number of connections is not shared: each listener has its own limit.
        """
        self.calls_max = max(1, self._limits.calls // listeners)
        self.held_max = self._limits.held_bytes // listeners


class Budget:
    """Work that clients may cause in one turn of the event loop, on all connections together.

    To begin another turn takes a callback, more than the work of a lone message costs. So a turn
    begins with the rest of the one before while that is most of a turn's work.

    Work is not cut short. If it took more than a turn's bound, the next turns have less or nothing,
    so that over several turns the rest of the event loop, the quorum first, has its part. These
    turns are few: where a process was stopped for a while, its clients caused none of that time.
    """

    def __init__(self, units: int, seconds: float) -> None:
        """Allow `units` per turn, and at most `seconds` for them."""
        self._units, self._seconds = units, seconds
        self._low_units, self._low_s = units * _MOST, seconds * _MOST
        self.units = units
        """Remaining units, negative if the last piece of work exceeded them."""
        self._left_s = seconds

    def renew(self) -> None:
        """Begin another turn, which pays for excess work of the previous one."""
        # Only the debt is carried over. Unused work would allow a burst later.
        self.units = min(0, self.units) + self._units
        self._left_s = min(0.0, self._left_s) + self._seconds

    @property
    def is_spent(self) -> bool:
        """Whether no more work may be done in this turn."""
        return self.units <= 0 or self._left_s <= 0

    def spend(self, units: int, seconds: float = 0.0) -> bool:
        """Count work. Return whether the next turn must be renewed."""
        self.units -= units
        # Bounded, because a pause of the process is not the work of a client.
        self._left_s = max(self._left_s - seconds, -_DEBT_TURNS * self._seconds)
        return self.units < self._low_units or self._left_s < self._low_s


class TurnQueue(Generic[_C]):
    """Connections whose work waits, taken by rounds of listeners, callers and connections.

    So neither many connections of one caller, nor many callers of one listener, hold up the others.
    """

    def __init__(self) -> None:
        self._shares: dict[Share, dict[Hashable, deque[_C]]] = {}

    def __bool__(self) -> bool:
        return bool(self._shares)

    def push(self, connection: _C) -> None:
        """Queue a connection after the others of its caller."""
        callers = self._shares.setdefault(connection.share, {})
        callers.setdefault(connection.caller, deque()).append(connection)

    def pop(self) -> _C:
        """Return the connection whose turn it is."""
        share, callers = _take_first(self._shares)
        caller, waiting = _take_first(callers)
        connection = waiting.popleft()
        if waiting:
            # Inserted at the end again, which makes it the last of the round.
            callers[caller] = waiting
        if callers:
            self._shares[share] = callers
        return connection


def _take_first(groups: dict[_K, _V]) -> tuple[_K, _V]:
    key = next(iter(groups))
    return key, groups.pop(key)


def take_calls(lines: Iterable[deque[WaitingCall]], most: int) -> Iterator[WaitingCall]:
    """Take up to `most` calls that wait and are not over, from all lines by rounds."""
    waiting = [line for line in lines if line]
    while waiting and most:
        for line in tuple(waiting):
            # Calls that were cancelled while waiting use up no turn.
            while line and line[0].is_over:
                line.popleft()
            if line and most:
                most -= 1
                yield line.popleft()
            if not line:
                waiting.remove(line)
