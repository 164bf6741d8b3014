"""Virtual clients, one call at a time: brokers, compactors and others that write, read and retry.

Each does one operation at a time. Answers get lost, so outcomes may stay unknown; what they record
is checked for linearizability at the end. Session reads, at any node, are compared with the ledger
as soon as they are answered.

Brokers and compactors choose their requests by some node's metadata, stale or not, put an object's
bytes into the bucket before they commit it, and repeat requests without an answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from streammeta.controller.errors import ErrorCode
from streammeta.controller.features import SUPPORTED
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.api.validation import TTL_MS_MAX
from streammeta.controller.metadata.tables.values import ObjectState, OnConflict
from tests.linearizability import models
from tests.linearizability.history import Handle
from tests.metadata.random_requests import RandomRequests
from tests.metadata.slow_model import Model
from tests.sim.sim_controller import Answered, Outcome, Refused, ignore
from tests.sim.sim_map import MAP_KEY, MapWrite, state_of
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


if TYPE_CHECKING:
    from tests.sim.sim_node import SimNode
    from tests.sim.sim_world import World

_DELAY_MS = 60
"""How long a destroyed object's bytes stay in the bucket."""
_PASS_MS = 40
_PREPARED_MIN = 4
_REPEATS = 0.4
"""Share of requests that repeat a commit that was made."""
_UPGRADED_BY_MS = 1000
_COMPACTOR_MAKES = (*("compact_set", "compact_stream") * 3, "upload", "trim")


class MapClient(Session):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._requests = RandomRequests(self._rng)
        self._model = Model()
        self._first = self._requests.start(self._model)
        self._target = self._some_target()

    def _act(self) -> None:
        service = self._world.nodes[self._target].service
        if self._world.nodes[self._target].core is not None:
            self._model.state = state_of(service.controller.store.map)
        request = self._some_request()
        self._upload(request)
        self._try(request, 3)

    def _some_request(self) -> Any:
        request = next(self._first, None) or self._requests.any(self._model)
        if isinstance(request, r.ExpireProducers):
            # A producer that is forgotten while it sends may be committed twice.
            return replace(request, idle_ms=TTL_MS_MAX)
        return request

    def _upload(self, request: Any) -> None:
        """No client commits what is not in the bucket yet."""
        bucket = self._world.ghost.ledger.map_watch.bucket
        if isinstance(request, r.CommitUploads):
            bucket.update(request.object_id.tolist())
        elif isinstance(request, r.CommitStreamSetObject):
            bucket.update((request.object_id, *request.stream_objects.object_id.tolist()))
        elif isinstance(request, r.CommitNamedObjects):
            bucket.update(object_.object_id for object_ in request.objects)
        elif isinstance(request, r.CommitStreamObject):
            bucket.add(request.object_id)

    def _try(self, request: Any, attempts: int) -> None:
        def go_on(outcome: Outcome | None) -> None:
            if isinstance(outcome, Answered):
                self._world.counts["map requests answered"] += 1
                answer: Any = outcome.answer
                if answer.answer is not None:
                    self._see(request, answer.answer)
                self.think()
                return
            hint = outcome.leader if isinstance(outcome, Refused) else None
            self._target = self._some_target() if hint is None else hint
            if attempts and self._world.clients_may_go_on:
                self._world.timeline.later(10, lambda: self._try(request, attempts - 1))
            else:
                self.think()

        self._ask(self._target, MAP_KEY, MapWrite(request), go_on)

    def _see(self, request: Any, answer: Any) -> None:
        """Look at the answer to a request; most clients only go on."""


class Upgrader(MapClient):
    """Asks for the next feature level, from some time on, whatever the nodes' versions."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._begins_at = self._rng.randrange(_UPGRADED_BY_MS)

    def _act(self) -> None:
        if self._world.timeline.now < self._begins_at:
            self.think()
        else:
            self._try(r.SetFeatureLevel(level=SUPPORTED.highest), 3)


class Compactor(MapClient):
    """Compacts what others upload as soon as it sees it, and uploads where there is nothing."""

    def _some_request(self) -> Any:
        state = self._model.state
        if sum(map(state.is_prepared, state.objects)) < _PREPARED_MIN:
            return self._requests.make("prepare", self._model)
        if not any(item.state is ObjectState.COMMITTED for item in state.objects.values()):
            return self._requests.make("upload", self._model)
        return self._requests.make(self._rng.choice(_COMPACTOR_MAKES), self._model)


class Repeater(MapClient):
    """Lets commits leave rows out, sends those rows again, and repeats what was answered before.

    A repeat of a commit that was made must get the first answer, row by row, whatever has become of
    its objects since.
    """

    def __init__(self, world: World, rng: random.Random) -> None:
        super().__init__(world)
        self._rng, self._requests = rng, RandomRequests(rng)
        self._first = iter(())
        self._made: list[tuple[r.CommitStreamSetObject, list[bool]]] = []

    def _some_request(self) -> Any:
        state = self._model.state
        if self._made and self._rng.random() < _REPEATS:
            return self._rng.choice(self._made)[0]
        for commit, verdicts in self._made:
            rows = commit.stream_objects
            ids = zip(rows.object_id.tolist(), rows.stream_id.tolist(), verdicts, strict=True)
            left_out = [("", item, stream) for item, stream, is_left_out in ids if is_left_out]
            state.rejected.update(dict.fromkeys(left_out, ErrorCode.OFFSET_NOT_MATCHED))
        request = self._requests.make(self._rng.choice(("upload", "resend")), self._model)
        if not isinstance(request, r.CommitStreamSetObject):
            return request
        return replace(request, on_conflict=OnConflict.ACCEPT_VALID)

    def _see(self, request: Any, answer: Any) -> None:
        """Note the answer to a commit, or compare it with the first one."""
        is_commit = isinstance(request, r.CommitStreamSetObject)
        if not is_commit or request.object_id >= 0 or len(request.compacted_object_ids):
            return
        first = next((verdicts for made, verdicts in self._made if made is request), None)
        if answer.error is ErrorCode.NONE:
            verdicts = [error != 0 for error in answer.stream_object_errors.tolist()]
            if first is None:
                self._made.append((request, verdicts))
                if any(verdicts):
                    self._world.count("commits that left rows out")
            else:
                self._world.count("commits repeated that were made")
            detail = f"{request}: {answer.stream_object_errors}, first {first}"
            check(first in (None, verdicts), "repeats get the first answer", detail)
        elif first is not None:
            is_of_node = answer.error.name.startswith("NODE_")
            check(is_of_node, "repeats get the first answer", f"{request}: {answer.error.name}")


class Janitor:
    """Deletes bytes for each node that believes to lead."""

    def __init__(self, world: World) -> None:
        self._world = world

    def begin(self) -> None:
        if self._world.clients_may_go_on:
            self._world.timeline.later(_PASS_MS, self._look)

    def _look(self) -> None:
        world = self._world
        for node in world.nodes:
            if node.claimed_epoch is None:
                continue
            controller = node.service.controller
            now, cluster_metadata = controller.log_time.now_ms(), controller.store.map
            due = cluster_metadata.destroyed(now - _DELAY_MS, 5, now)
            if due:
                self._delete_when_settled(node, due)
        self.begin()

    def _delete_when_settled(self, node: SimNode, object_ids: tuple[int, ...]) -> None:
        world = self._world

        def delete(_settled: None) -> None:
            world.counts["objects deleted"] += len(object_ids)
            watch = world.ghost.ledger.map_watch
            watch.check_deletion(object_ids)
            watch.bucket.difference_update(object_ids)
            done = MapWrite(r.RemoveObjects(object_ids=object_ids))
            world.call(node.node_id, MAP_KEY, done, None, ignore)

        service = node.service
        world.later_for(node, 1, lambda: service.begin(service.controller.settled(), delete))
