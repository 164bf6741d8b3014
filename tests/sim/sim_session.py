"""Calls of a virtual client, one at a time; answers that come too late are ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.sim.sim_service import Outcome
from tests.sim.sim_store import Request

if TYPE_CHECKING:
    from tests.sim.sim_world import World

_TIMEOUT_MS = 250


class Session:
    """What clients of the store and of the map share; each decides in `_act` what to ask."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rngs.clients
        self._target = 0
        self._call = 0

    def think(self) -> None:
        """Wait a little, then do something."""
        if self._world.clients_may_go_on:
            pause = 1 + self._rng.randrange(2 * self._world.profile.think_ms)
            self._world.timeline.later(pause, self._act)

    def _act(self) -> None:
        raise NotImplementedError

    def _some_target(self) -> int:
        return self._rng.randrange(len(self._world.nodes))

    def _ask(
        self,
        target: int,
        key: str,
        request: Request,
        take: Callable[[Outcome | None], None],
        at_least: int | None = None,
    ) -> None:
        """Ask a node; `take` gets the outcome, or None after the time-out."""
        self._call += 1
        call = self._call

        def once(outcome: Outcome | None) -> None:
            if call == self._call:
                self._call += 1
                take(outcome)

        self._world.call(target, key, request, at_least, once)
        self._world.timeline.later(_TIMEOUT_MS, lambda: once(None))
