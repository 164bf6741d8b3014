"""What surrounds the map in scenarios about the life of objects: a bucket, and the clean-up runs.

The bucket keeps nothing and writes down what it is asked to delete; where a scenario completes
deletes by hand it holds them until then. The retention of the scenarios is counted in generations:
an object is deleted by the second clean-up that comes more than the retention after the one before,
counted from its mark. The clean-up here has a delay; each run gets the delay that amounts to.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any

from streammeta.controller.lifecycle.deletion import Deletion
from streammeta.controller.lifecycle.sweeps import Expiry
from streammeta.storage.object_format.object_key import key_for
from tests.conformance.live_controller import LiveController
from tests.kit.waiting import ManualClock
from tests.lifecycle.lifecycle_world import RecordingStore

NAMESPACE = "DEFAULT"
DEFAULT_RETENTION_MS = 600_000
RUN_DEADLINE_S = 60.0
CHECK_MAX = 2_000
"""Objects one clean-up works off; also what deletion may do at once."""
OBJECTS_MAX = 1_000_000


class StorageWorld:
    """The bucket, expiry and deletion of one scenario."""

    def __init__(
        self, scenario: Mapping[str, Any], live: LiveController, clock: ManualClock
    ) -> None:
        self._live, self._clock = live, clock
        config = scenario.get("config") or {}
        self.store = RecordingStore()
        self.gate = threading.Event()
        """Holds deletes back while it is cleared."""
        self.gate.set()
        self.store.on_delete = lambda _: self.gate.wait(RUN_DEADLINE_S)
        self._retention_ms = int(config.get("object_retention_ms", DEFAULT_RETENTION_MS))
        self._rotated_ms = clock.now_ms
        self._by_hand = any(
            step.get("op") == "complete_storage_delete" for step in scenario.get("steps") or []
        )
        self._pending: asyncio.Task[None] | None = None

    async def expire(self) -> None:
        """Mark what is past its deadline, as the running controller does."""
        expiry = Expiry(self._live.controller, 1_000)
        task = asyncio.create_task(expiry.run())
        await self._drive(task, lambda: not self._is_expiry_due())

    def _is_expiry_due(self) -> bool:
        cluster_metadata = self._live.controller.cluster_metadata
        return bool(cluster_metadata.list_expired(self._clock.now_ms, limit=1))

    async def clean_up(self, marked: set[int]) -> bool:
        """Run the clean-up of destroyed objects once; False if the one before is unfinished.

        `marked` are marked in this very step, after the clean-up as the scenarios see it.
        """
        if self._pending is not None:
            return False
        now_ms, since_ms = self._clock.now_ms, self._rotated_ms
        if now_ms - since_ms <= self._retention_ms:
            return True
        before = len(self.store.requests)
        left = max(0, len(self._due(since_ms, marked)) - CHECK_MAX)
        if not left:
            self._rotated_ms = now_ms  # otherwise the next run goes on with the same objects
        if self._by_hand:
            self.gate.clear()
        deletion = Deletion(
            self._live.controller,
            self.store,
            NAMESPACE,
            self._clock,
            delay_ms=now_ms - since_ms,
            interval_ms=1_000,
            may_delete=lambda: True,
        )
        task = asyncio.create_task(deletion.run())
        if self._by_hand and self._due(since_ms, marked):
            await self._drive(task, lambda: len(self.store.requests) > before, cancel=False)
            self._pending = task
        else:
            await self._drive(task, lambda: len(self._due(since_ms, marked)) <= left)
        return True

    def _due(self, marked_before_ms: int, marked: set[int]) -> list[int]:
        cluster_metadata = self._live.controller.cluster_metadata
        due = cluster_metadata.destroyed(marked_before_ms, OBJECTS_MAX, self._clock.now_ms)
        return [object_id for object_id in due if object_id not in marked]

    async def complete(self) -> None:
        """Let the pending delete end, and the objects be forgotten."""
        self.gate.set()
        task, self._pending = self._pending, None
        if task is None:
            return
        wanted = {_object_of(key) for keys in self.store.requests for key in keys}
        cluster_metadata = self._live.controller.cluster_metadata

        def is_forgotten() -> bool:
            held = cluster_metadata.destroyed(2**62, OBJECTS_MAX, self._clock.now_ms)
            return not wanted.intersection(held)

        await self._drive(task, is_forgotten)

    async def close(self) -> None:
        self.gate.set()
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.gather(self._pending, return_exceptions=True)

    async def _drive(
        self, task: asyncio.Task[None], is_done: Callable[[], bool], *, cancel: bool = True
    ) -> None:
        """Commit what is appended until the condition holds."""
        live = self._live
        deadline = asyncio.get_running_loop().time() + RUN_DEADLINE_S
        for _ in range(20):  # what needs no thread ends within a few turns of the event loop
            await asyncio.sleep(0)
            live.commit()
        while not is_done() and not task.done():
            if asyncio.get_running_loop().time() > deadline:
                break
            live.commit()
            await asyncio.sleep(0.001)
        live.commit()
        await asyncio.sleep(0)
        if cancel or task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _object_of(key: str) -> int:
    object_id = int(key.rsplit("/", 1)[1])
    assert key_for(object_id, NAMESPACE) == key, f"{key} is not the key of object {object_id}"
    return object_id
