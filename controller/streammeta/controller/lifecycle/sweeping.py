"""What nobody else clears up: objects of deleted streams, and set objects of nodes that are gone.

Both are decided by the map, a bounded part at a time, so that commits go on in between. Objects are
only marked here; `deletion` takes their bytes. Set objects of a node that is there are the business
of its own compaction.
"""

import asyncio

import structlog

from streammeta.controller.errors import ApiError
from streammeta.controller.lifecycle.heartbeats import read_nodes
from streammeta.controller.lifecycle.sessions import NodeState, Sessions
from streammeta.controller.metadata.answers import DestroyDeadSetObjectsAnswer
from streammeta.controller.metadata.requests import DestroyDeadSetObjects, SweepDeletedStreams
from streammeta.controller.runtime.controller import MetadataController

SWEEP_BATCH_MAX = 10_000
"""Stream objects destroyed in one log entry."""

LOOK_BATCH_MAX = 200
"""Set objects looked at in one step; each may hold thousands of ranges."""

_log = structlog.get_logger(component="lifecycle")


class StreamSweep:
    """Destroys what is left of deleted streams that were too large for one log entry."""

    def __init__(self, controller: MetadataController, interval_ms: int) -> None:
        self._controller = controller
        self._interval_ms = interval_ms

    async def run(self) -> None:
        """Sweep while there is something, look every interval, until cancelled."""
        while True:
            await self.sweep()
            await asyncio.sleep(self._interval_ms / 1000)

    async def sweep(self) -> None:
        """Sweep until nothing is left."""
        while self._controller.is_active and self._controller.cluster_map.has_sweepings():
            try:
                await self._controller.write(SweepDeletedStreams(limit=SWEEP_BATCH_MAX))
            except ApiError as error:
                _log.info("sweep_postponed", reason=str(error))
                return


class SetObjectSweep:
    """Destroys set objects without any live range whose nodes are fenced or have departed."""

    def __init__(
        self, controller: MetadataController, sessions: Sessions, interval_ms: int
    ) -> None:
        self._controller = controller
        self._sessions = sessions
        self._interval_ms = interval_ms

    async def run(self) -> None:
        """Go through all such nodes, every interval, until cancelled."""
        while True:
            await asyncio.sleep(self._interval_ms / 1000)
            await self.sweep()

    async def sweep(self) -> None:
        """Go through all such nodes once."""
        if not self._controller.is_active:
            return
        try:
            for node in read_nodes(self._controller):
                if node.stream_set_object_count and (node.departed or self._is_gone(node.node_id)):
                    await self._sweep_node(node.node_id)
        except ApiError as error:
            _log.info("sweep_postponed", reason=str(error))

    def _is_gone(self, node_id: int) -> bool:
        return self._sessions.state(node_id) is NodeState.FENCED

    async def _sweep_node(self, node_id: int) -> None:
        after, destroyed = -1, 0
        while True:
            request = DestroyDeadSetObjects(
                node_id=node_id, after_object_id=after, limit=LOOK_BATCH_MAX
            )
            answer = (await self._controller.write(request)).answer
            assert isinstance(answer, DestroyDeadSetObjectsAnswer)
            destroyed += answer.destroyed
            after = answer.next_after
            if after < 0:
                break
        if destroyed:
            _log.info("dead_set_objects_destroyed", node=node_id, count=destroyed)
