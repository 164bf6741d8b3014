"""Heartbeats: they keep a node's session with the controllers alive while its process has data.

A node that has ever sent one is missed when it falls silent: after the session timeout it is
fenced, and its open streams are recovered by others. So they go on as long as streams are open, and
end when a newer process or a recovery has taken the node over, which the owner is told.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from streammeta.client.arguments import check_callable, check_session
from streammeta.client.errors import (
    BrokerClientError,
    ControllerUnavailableError,
    NodeEpochExpiredError,
    NodeFencedError,
    NodeNotRegisteredError,
    UnsupportedError,
)
from streammeta.client.session import BrokerSession
from streammeta.client.unclosed import warn_unclosed
from streammeta.v1 import common_pb2, nodes_pb2

FIRST_INTERVAL_S = 2.0
"""Time between heartbeats until an answer says how long a session lasts."""

HEARTBEATS_PER_SESSION = 4
"""So many fit into one session timeout: three may be lost."""

_log = logging.getLogger(__name__)


class Heartbeat:
    """Sends a session's heartbeats from `start` to `stop`.

    `on_taken_over` is told the refusal when this process may not speak for its node any more.
    """

    def __init__(
        self,
        session: BrokerSession,
        on_taken_over: Callable[[BrokerClientError], None],
        rng: random.Random | None = None,
    ) -> None:
        check_session(session)
        check_callable("on_taken_over", on_taken_over, "a function of one argument, the refusal")
        self._session = session
        self._on_taken_over = on_taken_over
        self._rng = rng or random.Random()
        self._interval_s = FIRST_INTERVAL_S
        self._recoveries: tuple[nodes_pb2.Recovery, ...] = ()
        self._compactions: tuple[common_pb2.NodeIdentity, ...] = ()
        self._task: asyncio.Task[None] | None = None
        self._is_stopped = False

    def __del__(self) -> None:
        if getattr(self, "_task", None) is not None and not self._is_stopped:
            node = self._session.node
            warn_unclosed(
                self,
                f"the heartbeats of node {node.node_id}, which is fenced when they are missed",
                "`await heartbeat.stop()` when its streams are closed",
            )

    @property
    def recoveries(self) -> tuple[nodes_pb2.Recovery, ...]:
        """Nodes whose data this one is to recover, as the last answer said."""
        return self._recoveries

    @property
    def compactions(self) -> tuple[common_pb2.NodeIdentity, ...]:
        """Nodes that are gone and whose objects this one is to compact, as the last answer said."""
        return self._compactions

    def start(self) -> None:
        """Begin, at once with a first heartbeat, unless it has begun."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End; nothing is sent that says so."""
        self._is_stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        is_of_use = True
        while is_of_use:
            is_of_use = await self._beat()
            await asyncio.sleep(self._interval_s * self._rng.uniform(0.9, 1.1))

    async def _beat(self) -> bool:
        """Send one; return whether there is any use in the next."""
        try:
            answer = await self._session.heartbeat()
        except ControllerUnavailableError as error:
            _log.warning("no heartbeat got through: %s", error)
        except (NodeEpochExpiredError, NodeFencedError, NodeNotRegisteredError) as error:
            _log.warning("the node was taken over: %s", error)
            self._on_taken_over(error)
            return False
        except UnsupportedError:
            return False  # controllers without sessions
        except BrokerClientError as error:
            _log.warning("a heartbeat was refused: %s", error)
        else:
            if answer.session_timeout_ms > 0:
                self._interval_s = answer.session_timeout_ms / 1000 / HEARTBEATS_PER_SESSION
            self._recoveries = tuple(answer.recoveries)
            self._compactions = tuple(answer.compactions)
        return True
