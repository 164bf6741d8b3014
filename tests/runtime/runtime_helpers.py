"""A controller over a log in memory, and requests for it."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from streammeta.controller.metadata.cluster_map import ClusterMap
from streammeta.controller.metadata.requests import CreateStreams, NewStream, RegisterNode
from streammeta.controller.metadata.values import NodeIdentity
from streammeta.controller.runtime.controller import MetadataController
from tests.runtime.memory_log import MemoryLog

NODE = NodeIdentity(7, 1)
REGISTER = RegisterNode(node=NODE)


class StillClock:
    """Time that stands where the test puts it."""

    now_ms = 1_000_000

    def monotonic_ms(self) -> int:
        return self.now_ms

    def wall_ms(self) -> int:
        return self.now_ms


def create(request_id: str, count: int = 1) -> CreateStreams:
    return CreateStreams(request_id=request_id, node=NODE, streams=(NewStream(),) * count)


def new_controller() -> tuple[MetadataController, MemoryLog]:
    controller = MetadataController(ClusterMap(), StillClock())
    log = MemoryLog(controller)
    controller.bind(log)
    return controller, log


async def submit(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a request and let it run until it waits."""
    task = asyncio.create_task(work)
    for _ in range(5):
        await asyncio.sleep(0)
    return task


async def committed(log: MemoryLog, work: Coroutine[Any, Any, Any]) -> Any:
    task = await submit(work)
    log.commit()
    return await task
