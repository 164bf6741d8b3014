"""Virtual brokers and compactors that use the real map, and the deletion of what is destroyed.

They choose what to ask by what some node's map says, stale or not, put an object's bytes into the
bucket before they commit it, and repeat what they got no answer to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streammeta.controller.features import SUPPORTED
from streammeta.controller.metadata import requests as r
from streammeta.controller.metadata.values import ObjectState
from tests.metadata.random_requests import RandomRequests
from tests.metadata.slow_model import Model
from tests.sim.sim_clients import Session
from tests.sim.sim_map import MAP_KEY, MapWrite, state_of
from tests.sim.sim_service import Answered, Outcome, Refused, ignore

if TYPE_CHECKING:
    from tests.sim.sim_node import SimNode
    from tests.sim.sim_world import World

_DELAY_MS = 60
"""How long a destroyed object's bytes stay in the bucket."""
_PASS_MS = 40
_PREPARED_MIN = 4
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
                self.think()
                return
            hint = outcome.leader if isinstance(outcome, Refused) else None
            self._target = self._some_target() if hint is None else hint
            if attempts and self._world.clients_may_go_on:
                self._world.timeline.later(10, lambda: self._try(request, attempts - 1))
            else:
                self.think()

        self._ask(self._target, MAP_KEY, MapWrite(request), go_on)


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
            now, cluster_map = controller.log_time.now_ms(), controller.store.map
            due = cluster_map.destroyed(now - _DELAY_MS, 5, now)
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
