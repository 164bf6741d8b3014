"""Virtual brokers and compactors that use the real map, and the deletion of what is destroyed.

They choose what to ask by what some node's map says, stale or not, put an object's bytes into the
bucket before they commit it, and repeat what they got no answer to.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from streammeta.controller.errors import ErrorCode
from streammeta.controller.features import SUPPORTED
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.tables.values import ObjectState, OnConflict
from tests.metadata.random_requests import RandomRequests
from tests.metadata.slow_model import Model
from tests.sim.sim_clients import Session
from tests.sim.sim_map import MAP_KEY, MapWrite, state_of
from tests.sim.sim_service import Answered, Outcome, Refused, ignore
from tests.sim.sim_time import check

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
        return next(self._first, None) or self._requests.any(self._model)

    def _upload(self, request: Any) -> None:
        """No client commits what is not in the bucket yet."""
        bucket = self._world.ghost.ledger.map_watch.bucket
        if isinstance(request, r.CommitUploads):
            bucket.update(request.object_id.tolist())
        elif isinstance(request, r.CommitStreamSetObject):
            bucket.update((request.object_id, *request.stream_objects.object_id.tolist()))
        elif isinstance(request, r.CommitNamedObjects):
            bucket.update(one.object_id for one in request.objects)
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
