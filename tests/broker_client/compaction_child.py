"""A process that compacts many megabytes under a small budget; prints what that cost, as JSON.

Run as a program: a process of its own has no other memory to hide in. Arguments: a directory, the
memory budget, the bytes of all sources, the bytes of each, streams, payload of a record, and 1 to
read and write side by side.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

from streammeta.client import model
from streammeta.client.compaction.config import CompactionConfig, CompactionTarget
from streammeta.client.compaction.set_object_compactor import SetObjectCompactor
from streammeta.client.controller_client import ControllerClient
from streammeta.client.resources import give_back
from streammeta.controller.metadata import requests
from streammeta.controller.metadata.values import NodeIdentity, RangeColumns, column
from streammeta.storage.compaction.selection import SelectionConfig
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.local import LocalObjectStore
from tests.broker_client.memory_child import begin_new_peak, resident
from tests.compaction.compaction_world import CLUSTER_ID, NAMESPACE, LeadingMap
from tests.fake_bucket import fake_markers_of_process
from tests.kit.built_objects import ObjectBuilder

NODES = (1, 2)
"""The first one is compacted to have everything loaded, the other one to be measured."""


class Sources:
    """Set objects of equal streams, of which nothing is kept but the map and the files."""

    def __init__(self, store: LocalObjectStore, streams: int, record_bytes: int) -> None:
        self.map = LeadingMap()
        self._store = store
        self._streams = streams
        self._record_bytes = record_bytes

    async def register(self, node_id: int) -> None:
        node = NodeIdentity(node_id, 1)
        await self.map.write(requests.RegisterNode(node=node))
        new = (requests.NewStream(),) * self._streams
        created = await self.map.write(
            requests.CreateStreams(request_id=self.map.request_id(), node=node, streams=new)
        )
        items = tuple(requests.StreamToOpen(each, 1) for each in created.stream_ids)
        await self.map.write(requests.OpenStreams(node=node, streams=items))

    async def upload(self, node_id: int, object_bytes: int, number: int) -> None:
        """Write the `number`-th object of a node, with as many records of each stream."""
        node = NodeIdentity(node_id, 1)
        first = NODES.index(node_id) * self._streams
        records = max(1, object_bytes // self._streams // self._record_bytes)
        start, end = number * records, (number + 1) * records
        streams = list(range(first, first + self._streams))
        builder = ObjectBuilder(checksum=True)
        payload = bytes([number % 251]) * self._record_bytes
        for stream_id in streams:
            builder.write([RecordBatch(stream_id, 1, i, 1, payload) for i in range(start, end)])
        built = builder.finish()
        prepared = await self.map.write(
            requests.PrepareObjects(
                request_id=self.map.request_id(), node=node, count=1, ttl_ms=60_000
            )
        )
        object_id = prepared.first_object_id
        self._store.put(key_for(object_id, NAMESPACE), built.data)
        commit = requests.CommitStreamSetObject(
            node=node,
            object_id=object_id,
            order_id=object_id,
            object_size=built.size,
            crc32c=-1 if built.crc32c is None else built.crc32c,
            ranges=RangeColumns(
                stream_id=column(streams),
                start_offset=column([start] * self._streams),
                end_offset=column([end] * self._streams),
            ),
        )
        answer = await self.map.write(commit)
        assert answer.error == 0, answer


async def compact(
    client: ControllerClient, store: LocalObjectStore, config: CompactionConfig, node_id: int
) -> dict[str, Any]:
    """Run one cycle for a node; return its figures."""
    writer = model.NodeIdentity(node_id, 1)
    compactor = SetObjectCompactor(client, writer, NAMESPACE, store, config)
    report = await compactor.run_once(CompactionTarget(node_id, 1))
    compactor.close()
    assert not report.failures, report.failures
    assert not report.left_out, report.left_out
    figures = report.figures
    return {name: getattr(figures, name) for name in figures.__slots__}


async def run(
    root: Path,
    budget: int,
    total: int,
    object_bytes: int,
    streams: int,
    record_bytes: int,
    overlap: int,
) -> None:
    """Write the sources, compact them, and print how memory grew and how long it took."""
    store = LocalObjectStore(root)
    sources = Sources(store, streams, record_bytes)
    config = CompactionConfig(
        memory_budget=budget, overlap=bool(overlap), selection=SelectionConfig(growth=1)
    )
    for node_id, count in zip(NODES, (2, total // object_bytes), strict=True):
        await sources.register(node_id)
        for number in range(count):
            await sources.upload(node_id, object_bytes, number)
    async with sources.map.served() as client:
        await compact(client, store, config, NODES[0])
        gc.collect()
        give_back()
        before = resident("VmRSS")
        begin_new_peak()
        started, cpu = time.monotonic(), time.process_time()
        figures = await compact(client, store, config, NODES[1])
        figures["seconds"] = time.monotonic() - started
        figures["cpu_seconds"] = time.process_time() - cpu
        figures["peak"] = resident("VmHWM")
        figures["grown"] = figures["peak"] - before
    print(json.dumps(figures))


if __name__ == "__main__":
    fake_markers_of_process((CLUSTER_ID, NAMESPACE))
    asyncio.run(run(Path(sys.argv[1]), *map(int, sys.argv[2:])))
