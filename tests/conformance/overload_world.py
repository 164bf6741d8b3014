"""The sessions of two brokers, as scenarios about an overloaded controller see them.

A controller that hears no node doubts itself and fences none; when it hears one again the others
get a whole session's time. So it is overloaded, in the scenarios' word, as long as a broker that
stays silent would not be fenced. One broker makes itself heard, the other never does.
"""

from __future__ import annotations

import copy

from streammeta.controller.lifecycle.broker_sessions import NodeState, Sessions, SupervisedNode

HEARD = SupervisedNode(0, 1)
SILENT = SupervisedNode(1, 1)
NODES = (HEARD, SILENT)
DEFAULT_WINDOW_MS = 30_000


class OverloadWorld:
    """Sessions on a time of their own, which runs on while the controller stands still."""

    def __init__(self, window_ms: int = DEFAULT_WINDOW_MS) -> None:
        self._sessions = Sessions(window_ms)
        self._now_ms = 0
        self._was_overloaded = False
        self._sessions.lead(self._now_ms)
        self._sessions.tick(self._now_ms, NODES)

    def advance(self, ms: int) -> None:
        """Let time pass, with the looks at the sessions that belong to it."""
        end_ms = self._now_ms + ms
        while self._now_ms < end_ms:
            self._now_ms = min(end_ms, self._now_ms + self._sessions.tick_ms)
            self._sessions.tick(self._now_ms, NODES)

    def overload(self) -> None:
        """Hear no node for so long that the controller doubts itself."""
        self._was_overloaded = True
        for node in NODES:
            self._sessions.heartbeat(node.node_id, node.node_epoch, self._now_ms)
        while not self._sessions.is_in_doubt:
            self.advance(self._sessions.tick_ms)

    def success(self) -> None:
        self._sessions.heartbeat(HEARD.node_id, HEARD.node_epoch, self._now_ms)

    def is_overload(self) -> bool:
        """Return whether the silent broker goes on unfenced."""
        if not self._was_overloaded:
            return False
        if self._sessions.is_in_doubt:
            return True
        ahead = copy.deepcopy(self._sessions)
        ahead.tick(self._now_ms + 1, NODES)
        return ahead.state(SILENT.node_id) is not NodeState.FENCED
