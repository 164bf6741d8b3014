"""Compacting processes killed at every step, on real controllers, while readers read.

One cluster, one bucket: a broker writes, readers go through all streams again and again, and
compactors of the broker's node die and are started anew until one comes to its end.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client import ReaderConfig, WriterConfig
from streammeta.client.controllers.methods import DESCRIBE_OBJECTS, GET_NODES
from streammeta.client.parts import BrokerSession, ControllerClient, StreamReader, StreamWriter
from streammeta.storage.cluster_files.bucket_marker import is_own_key
from streammeta.storage.object_format.object_key import OwnKey, parse_key
from streammeta.storage.object_store.local import LocalObjectStore
from streammeta.v1 import common_pb2, nodes_pb2, objects_pb2
from tests.compaction.compaction_child import MIB, STEPS, Settings
from tests.compaction.compaction_world import payload_of
from tests.kit.doomed_child import run_child
from tests.kit.real_cluster import FAST, describe, leader_of, running_cluster
from tests.kit.seeds import seeds
from tests.kit.waiting import PATIENCE_S, until

NODE_ID = 1000
RECORD_BYTES = 24_000
STREAMS = 12
UPLOADS = WriterConfig(upload_bytes=1 * MIB, max_buffer_bytes=8 * MIB, linger_s=0.05)
FORGETFUL = ReaderConfig(block_cache_bytes=0, index_cache_bytes=0)
"""Of a reader that asks the bucket for what another would remember."""

LATEST = {"get_range": 50, "put": 8, "upload_part": 8, "complete_multipart": 4}
"""Up to which time a step is ordered to be the last one; 2 for the others."""


@functools.lru_cache(maxsize=4_000)
def payload(stream_id: int, offset: int) -> bytes:
    return payload_of(stream_id, offset, RECORD_BYTES)


@dataclass
class Scene:
    """A broker and what is acknowledged of what it has written: so many records of each stream."""

    cluster: LocalCluster
    client: ControllerClient
    session: BrokerSession
    writer: StreamWriter
    rng: random.Random
    counts: dict[int, int]
    rounds_read: int = 0

    @property
    def bucket(self) -> Path:
        return self.cluster.root / "bucket"

    async def write(self, records: int) -> None:
        """Append to streams drawn with a skew, so that some of them are large."""
        streams, ends = list(self.counts), dict(self.counts)
        for _ in range(records):
            stream_id = streams[int(len(streams) * self.rng.random() ** 3)]
            await self.writer.append(stream_id, payload(stream_id, ends[stream_id]))
            ends[stream_id] += 1
        await self.writer.flush()
        self.counts = ends

    async def read_all(self) -> None:
        """Read all streams from their beginning to at least where they end by now."""
        store = LocalObjectStore(self.bucket)
        async with StreamReader(self.client, store, self.session.namespace, FORGETFUL) as reader:
            for stream_id, count in dict(self.counts).items():
                at = 0
                async for record in reader.iterate(stream_id, 0):
                    assert record.base_offset == at, f"stream {stream_id} goes on at {record}"
                    assert record.payload == payload(stream_id, at), f"stream {stream_id} at {at}"
                    at += 1
                assert at >= count, f"stream {stream_id} ends at {at}, written were {count}"
        self.rounds_read += 1

    async def read_on(self) -> None:
        while True:
            await self.read_all()
            await asyncio.sleep(0.5)  # and leave some of the machine to others

    async def compact(self, step: str = "", at: int = 0, **more: Any) -> dict[str, Any] | None:
        """Run a compactor to its end; return what it reports, None if it was killed."""
        node = self.session.node
        settings = Settings(
            self.cluster.endpoints,
            str(self.bucket),
            self.session.namespace,
            node.node_id,
            node.node_epoch,
            step=step,
            at=at,
            **more,
        )
        was_killed, out = await run_child(
            "tests.compaction.compaction_child",
            settings.encode(),
            may_die=bool(step),
        )
        if was_killed:
            return None
        report: dict[str, Any] = json.loads(out)
        return report

    async def set_objects(self) -> int:
        answer = await self.client.call(GET_NODES, nodes_pb2.GetNodesRequest(node_ids=[NODE_ID]))
        return answer.nodes[0].stream_set_object_count

    async def states(self) -> dict[int, common_pb2.ObjectState.ValueType]:
        namespace = self.session.namespace
        found = (object_.key for object_ in LocalObjectStore(self.bucket).list_objects())
        keys = [key for key in found if not is_own_key(key, namespace)]
        parsed = [parse_key(key, namespace) for key in keys]
        ids = [line.object_id for line in parsed if isinstance(line, OwnKey)]
        assert len(ids) == len(keys)
        request = objects_pb2.DescribeObjectsRequest(object_ids=ids)
        request.page.page_size = 10_000
        answer = await self.client.call(DESCRIBE_OBJECTS, request)
        known = {object_.object_id: object_.state for object_ in answer.objects}
        return {id_: known.get(id_, common_pb2.OBJECT_STATE_REMOVED) for id_ in ids}


@asynccontextmanager
async def scene(cluster: LocalCluster, seed: int) -> AsyncIterator[Scene]:
    """Start a broker that has written some, and a reader beside it."""
    async with ControllerClient(cluster.endpoints, rng=random.Random(seed)) as client:
        session = await BrokerSession.open(client, NODE_ID, 1)
        ids = await session.create_streams([{}] * STREAMS)
        opened = (await session.open_streams(dict.fromkeys(ids, 0))).require_all()
        store = LocalObjectStore(cluster.root / "bucket")
        async with StreamWriter(session, store, UPLOADS) as writer:
            writer.attach(opened.values())
            made = Scene(
                cluster, client, session, writer, random.Random(seed), dict.fromkeys(ids, 0)
            )
            reading = asyncio.create_task(made.read_on())
            try:
                yield made
                assert not reading.done(), "the reader goes on whatever happens"
            finally:
                reading.cancel()
                outcome = (await asyncio.gather(reading, return_exceptions=True))[0]
                if not isinstance(outcome, asyncio.CancelledError):
                    raise AssertionError(f"seed {seed}: the reader failed") from outcome


async def replace_leader(cluster: LocalCluster) -> None:
    """Kill the controller that leads, and start it again when another one does."""
    leader = await asyncio.to_thread(leader_of, cluster)
    await asyncio.to_thread(cluster.children[leader].kill)
    others = [child for child in cluster.children if child != leader]
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while await asyncio.to_thread(lambda: describe(cluster, others[0]).leader_id) == leader:
        assert asyncio.get_running_loop().time() < deadline, "no other leads"
        await asyncio.sleep(0.02)
    await asyncio.to_thread(cluster.start, leader)


async def die_and_live(
    made: Scene, deaths: Sequence[tuple[str, int]], records: int, leader_deaths: float
) -> None:
    """Let compactors, and a share of leaders, die, the broker write on, one compactor finish."""
    await made.write(records)
    kills = 0
    for step, at in deaths:
        compacting = asyncio.create_task(
            made.compact(step, at, force_split=made.rng.random() < 0.2)
        )
        if made.rng.random() < leader_deaths:
            await asyncio.sleep(made.rng.random())  # somewhere in the compactor's life
            await replace_leader(made.cluster)
        kills += await compacting is None
        await made.write(records // 10)
    assert kills > len(deaths) / 2, f"{kills} of {deaths} were killed"
    report = await made.compact()
    assert report is not None
    assert not report["left_out"]
    assert not report["failures"]
    await made.read_all()
    assert await made.set_objects() <= 3
    known = await made.states()
    assert common_pb2.OBJECT_STATE_REMOVED not in known.values(), "what is forgotten is deleted"


def run(root: Path, voters: int, deaths: Sequence[tuple[str, int]], seed: int) -> None:
    leader_deaths = 0.3 if voters > 1 else 0.0

    async def play() -> None:
        with running_cluster(root, voters) as cluster:
            async with scene(cluster, seed) as made:
                await die_and_live(made, deaths, 500 if voters > 1 else 300, leader_deaths)
                assert made.rounds_read > 2

    asyncio.run(play())


@pytest.mark.process
def test_compactors_killed_while_readers_read_change_nothing_that_is_read(tmp_path: Path) -> None:
    deaths = [("upload_part", 3), ("CommitStreamSetObject", 1), ("CommitStreamSetObject", 2)]
    run(tmp_path, 1, deaths, 7)


@pytest.mark.process
async def test_an_upload_of_a_killed_compactor_is_dropped_after_its_id(tmp_path: Path) -> None:
    with running_cluster(tmp_path, 1, (*FAST, "--sweep-interval-ms", "100")) as cluster:
        async with scene(cluster, 5) as made:
            await made.write(300)
            store = LocalObjectStore(made.bucket)
            others = store.start_multipart("backup/of/somebody")
            assert await made.compact("upload_part", 2, ttl_ms=4_000) is None, "killed within one"
            await until(
                lambda: list(store.list_multipart_uploads()) == [others],
                "upload of the dead dropped, and no other",
                PATIENCE_S,
            )
            assert await made.compact() is not None
            await made.read_all()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", seeds(2, slow=2))
def test_compactors_killed_again_and_again(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    steps = [*STEPS, *(rng.choice(STEPS) for _ in range(16))]
    rng.shuffle(steps)
    deaths = [(step, rng.randint(1, LATEST.get(step, 2))) for step in steps]
    run(tmp_path, 3, deaths, seed)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_two_compacting_processes_of_one_node_at_once(tmp_path: Path) -> None:
    """What one of them has done the other finds gone; between them all of it is done, once."""
    with running_cluster(tmp_path, 1) as cluster:
        async with scene(cluster, 11) as made:
            for _ in range(3):
                await made.write(200)
                reports = await asyncio.gather(*(made.compact() for _ in range(3)))
                assert None not in reports
                await made.read_all()
            assert await made.set_objects() <= 4
            known = await made.states()
            assert common_pb2.OBJECT_STATE_REMOVED not in known.values()
