"""Virtual clients, one call at a time: they write, read, retry, give up, and note answers.

Each does one operation at a time. Answers get lost, so outcomes may stay unknown; what they record
is checked for linearizability at the end. Session reads, at any node, are compared with the ledger
as soon as they are answered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.linearizability import models
from tests.linearizability.history import Handle
from tests.sim.sim_service import Answered, Outcome, Refused
from tests.sim.sim_store import Answer, Request, Store
from tests.sim.sim_time import check

if TYPE_CHECKING:
    from tests.sim.sim_world import World

VALUE_KEYS = ("k0", "k1", "k2")
LIST_KEYS = ("s0", "s1")
_ATTEMPTS = 6

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


class Client(Session):
    def __init__(self, world: World, number: int) -> None:
        super().__init__(world)
        self._number = number
        self._target = self._some_target()
        self._versions: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        self._seen_offset = 0

    # -- what to do

    def _act(self) -> None:
        rng = self._rng
        drawn = rng.random()
        if drawn < 0.15:
            self._read_in_session()
        elif drawn < 0.35:
            self._begin(*self._some_read())
        elif drawn < 0.6:
            self._begin(*self._some_commit())
        else:
            self._begin(*self._some_write())

    def _some_read(self) -> tuple[str, Request]:
        rng = self._rng
        if rng.random() < 0.6:
            return rng.choice(VALUE_KEYS), models.Get()
        return rng.choice(
            LIST_KEYS
        ), models.ReadEnd() if rng.random() < 0.5 else models.ReadObjects()

    def _some_commit(self) -> tuple[str, Request]:
        key = self._rng.choice(LIST_KEYS)
        start = self._ends.get(key)
        if start is None:
            return key, models.ReadEnd()
        return key, models.CommitRange(self._world.next_number(), start, start + 1)

    def _some_write(self) -> tuple[str, Request]:
        rng = self._rng
        key = rng.choice(VALUE_KEYS)
        version = self._versions.get(key) if rng.random() < 0.4 else None
        if rng.random() < 0.2:
            return key, models.Delete(version)
        return key, models.Put(f"v{self._world.next_number()}", version)

    # -- operations

    def _begin(self, key: str, request: Request) -> None:
        handle = self._world.recorder.invoke(f"client {self._number}", key, request)
        self._try(handle, key, request, _ATTEMPTS)

    def _try(self, handle: Handle, key: str, request: Request, attempts: int) -> None:
        """Ask the node that is thought to lead."""

        def take(outcome: Outcome | None) -> None:
            if outcome is None:
                self._on_unknown(handle, key, request, attempts)
            else:
                self._on_outcome(handle, key, request, attempts, outcome)

        self._ask(self._target, key, request, take)

    def _on_outcome(
        self, handle: Handle, key: str, request: Request, attempts: int, outcome: Outcome
    ) -> None:
        if isinstance(outcome, Answered):
            self._world.counts["operations answered"] += 1
            self._world.recorder.complete(handle, outcome.answer)
            self._learn(key, request, outcome)
            self.think()
        elif not isinstance(outcome, Refused):
            self._on_unknown(handle, key, request, attempts)
        elif attempts and self._world.clients_may_go_on:
            self._target = self._other_target(outcome.leader)
            self._world.timeline.later(
                5 + self._rng.randrange(20), lambda: self._try(handle, key, request, attempts - 1)
            )
        else:
            self._world.recorder.fail(handle)
            self.think()

    def _on_unknown(self, handle: Handle, key: str, request: Request, attempts: int) -> None:
        """Commits may be repeated, for they name their object; other writes are left unknown."""
        self._world.counts["outcomes unknown"] += 1
        self._target = self._other_target(None)
        if isinstance(request, models.CommitRange) and attempts and self._world.clients_may_go_on:
            self._try_after_unknown(handle, key, request, attempts - 1)
            return
        self._world.recorder.ambiguous(handle)
        self._ends.pop(key, None)
        self.think()

    def _try_after_unknown(
        self, handle: Handle, key: str, request: models.CommitRange, attempts: int
    ) -> None:
        """Repeat until answered: from now on a refusal does not mean that nothing happened."""

        def go_on(outcome: Outcome | None) -> None:
            if isinstance(outcome, Answered) and not isinstance(outcome.answer, models.NotAtEnd):
                self._on_outcome(handle, key, request, 0, outcome)
            elif attempts and self._world.clients_may_go_on:
                leader = outcome.leader if isinstance(outcome, Refused) else None
                self._target = self._other_target(leader)
                self._world.timeline.later(
                    10, lambda: self._try_after_unknown(handle, key, request, attempts - 1)
                )
            else:
                self._world.recorder.ambiguous(handle)
                self._ends.pop(key, None)
                self.think()

        self._ask(self._target, key, request, go_on)

    def _other_target(self, hint: int | None) -> int:
        if hint is not None and self._rng.random() < 0.9:
            return hint
        return self._some_target()

    def _learn(self, key: str, request: Request, outcome: Answered) -> None:
        self._seen_offset = max(self._seen_offset, outcome.offset)
        match outcome.answer:
            case models.KVAnswer(version=version, applied=applied):
                self._versions[key] = version
                if applied and isinstance(request, models.Delete):
                    self._versions[key] = 0
            case models.End(offset=offset):
                self._ends[key] = offset
            case models.Objects(object_ids=object_ids):
                self._ends[key] = len(object_ids)
            case models.NotAtEnd():
                self._ends.pop(key, None)
            case _:
                assert isinstance(request, models.CommitRange)
                self._ends[key] = request.end

    # -- session reads

    def _read_in_session(self) -> None:
        key, request = self._some_read()
        node = self._some_target()
        at_least = self._seen_offset

        def on_outcome(outcome: Outcome | None) -> None:
            if isinstance(outcome, Answered):
                self._world.counts["session reads answered"] += 1
                self._check_session_read(key, request, at_least, outcome)
            self.think()

        self._ask(node, key, request, on_outcome, at_least)

    def _check_session_read(
        self, key: str, request: Request, at_least: int, outcome: Answered
    ) -> None:
        check(
            outcome.offset >= at_least,
            "sessions read their writes",
            f"client {self._number} has seen {at_least}, was answered as of {outcome.offset}",
        )
        self._seen_offset = max(self._seen_offset, outcome.offset)
        expected = self._as_of(key, request, outcome.offset)
        check(
            outcome.answer == expected,
            "session reads show the committed past",
            f"client {self._number} read {key} as of {outcome.offset}: {outcome.answer}, "
            f"committed was {expected}",
        )

    def _as_of(self, key: str, request: Request, offset: int) -> Answer:
        past = Store()
        held = self._world.ghost.ledger.held_at(key, offset)
        if held is not None:
            past.hold(key, held)
        return past.answer(key, request)
