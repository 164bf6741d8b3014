"""A compacting process to be killed: it takes itself away, as kill -9 does, at the ordered step.

Run as `python -m tests.compaction.compaction_child SETTINGS`, a JSON object with the fields of
`Settings`. What it reports when it comes to its end is a JSON object on the standard output.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streammeta.client.compaction.config import CompactionConfig, CompactionTarget
from streammeta.client.compaction.sso_compactor import SetObjectCompactor
from streammeta.client.controllers.methods import Method, RequestT, ResponseT
from streammeta.client.model import NodeIdentity
from streammeta.client.parts import ControllerClient
from streammeta.storage.compaction.selection import SelectionConfig
from streammeta.storage.object_store.local import LocalObjectStore
from tests.compaction.compaction_steps import stepped
from tests.kit.doomed_child import Executioner

MIB = 1024 * 1024
STEPS = (
    *("get_range", "put", "start_multipart", "upload_part", "complete_multipart"),
    *("ListStreamSetObjects", "DescribeStreams", "PrepareObjects", "CommitStreamSetObject"),
)
"""What a compaction of enough data is made of; each is one step before it and one after it."""


@dataclass(frozen=True)
class Settings:
    """`step` and `at`: die at the `at`-th time of this step; "" for never."""

    endpoints: Sequence[str]
    bucket: str
    namespace: str
    node_id: int
    node_epoch: int
    force_split: bool = False
    step: str = ""
    at: int = 0
    ttl_ms: int = 60_000

    def encode(self) -> str:
        return json.dumps(asdict(self))


class DoomedClient(ControllerClient):
    """A client of which every call is a step."""

    executioner: Executioner

    async def call(
        self, method: Method[RequestT, ResponseT], request: RequestT, deadline: float | None = None
    ) -> ResponseT:
        self.executioner.pass_by(method.name)
        answer = await super().call(method, request, deadline)
        self.executioner.pass_by(method.name)
        return answer


async def live(settings: Settings) -> dict[str, Any]:
    DoomedClient.executioner = executioner = Executioner(settings.step, settings.at)
    store = stepped(LocalObjectStore(Path(settings.bucket)), executioner.made)
    node = NodeIdentity(node_id=settings.node_id, node_epoch=settings.node_epoch)
    config = CompactionConfig(
        memory_budget=16 * MIB,
        read_bytes=1 * MIB,
        part_bytes=5 * MIB,
        put_bytes=1 * MIB,
        id_ttl_s=settings.ttl_ms / 1000,
        selection=SelectionConfig(growth=1, split_size=2 * MIB),
    )
    async with DoomedClient(settings.endpoints, rng=random.Random(1)) as client:
        compactor = SetObjectCompactor(client, node, settings.namespace, store, config)
        target = CompactionTarget(settings.node_id, settings.node_epoch)
        report = await compactor.run_once(target, force_split=settings.force_split)
        compactor.close()
    return {"left_out": list(report.left_out), "failures": report.failures}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(live(Settings(**json.loads(sys.argv[1]))))))
