"""`streammeta compact`: what it plans, what it does, in whose name, and how it ends."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from streammeta.cli.compact_command import CompactionRequest
from streammeta.cli.compaction_run import Targets, find_targets, run
from streammeta.cli.local_cluster import LocalCluster, start_child
from streammeta.cli.output import CommandError, Output, OutputFormat
from streammeta.client import (
    BrokerSession,
    ControllerClient,
    StreamReader,
    StreamWriter,
    WriterConfig,
)
from streammeta.client.compaction.config import CompactionTarget
from streammeta.client.methods import GET_NODES
from streammeta.client.model import NodeIdentity
from streammeta.storage.object_format.object_key import cluster_namespace, key_for
from streammeta.storage.object_store.address import open_object_store
from streammeta.storage.object_store.local import LocalObjectStore
from streammeta.v1 import nodes_pb2
from tests.kit.real_cluster import running_cluster, streammeta

STREAMS = 3
UPLOADS = 4
ROWS = 5
"""Records of a stream in each upload."""
PATIENCE_S = 60.0

Answer = dict[str, Any]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with running_cluster(tmp_path_factory.mktemp("compact"), 1) as running:
        yield running


@dataclass(frozen=True, slots=True)
class Broker:
    """One process of a node, with some open streams."""

    session: BrokerSession
    store: LocalObjectStore
    stream_ids: Sequence[int]
    writer: StreamWriter

    async def upload(self, count: int) -> None:
        """Make `count` set objects, each with `ROWS` records of every stream."""
        for _ in range(count):
            acks = [
                await self.writer.append(stream_id, b"%d/%d|" % (stream_id, row) + b"." * 200)
                for stream_id in self.stream_ids
                for row in range(ROWS)
            ]
            await self.writer.flush()
            for ack in acks:
                await ack

    async def set_objects(self) -> int:
        """Ask how many set objects the node has."""
        request = nodes_pb2.GetNodesRequest(node_ids=[self.session.node.node_id])
        answer = await self.session.client.call(GET_NODES, request)
        return answer.nodes[0].stream_set_object_count

    async def read(self) -> dict[int, list[bytes]]:
        """Read every stream from its beginning to its end."""
        client = self.session.client
        reader = StreamReader(client, self.store, self.session.namespace)
        try:
            return {
                stream_id: [bytes(record.payload) for record in records]
                async for stream_id, records in reader.read_streams(self.stream_ids)
            }
        finally:
            await reader.close()


@asynccontextmanager
async def broker(cluster: LocalCluster, node_id: int) -> AsyncIterator[Broker]:
    """Register node `node_id`, open new streams for it; at the end they are closed."""
    async with ControllerClient(cluster.endpoints, rng=random.Random(node_id)) as client:
        session = await BrokerSession.open(client, node_id, 1)
        stream_ids = await session.create_streams([{}] * STREAMS)
        opened = (await session.open_streams(dict.fromkeys(stream_ids, 1))).require_all()
        store = LocalObjectStore(Path(cluster.store_uri.removeprefix("file://")))
        config = WriterConfig(linger_s=60.0)  # an upload is made when the test says so
        async with StreamWriter(session, store, config) as writer:
            writer.attach(opened.values())
            yield Broker(session, store, stream_ids, writer)
        (await session.close_streams(dict.fromkeys(stream_ids, 1))).require_all()


def compact(cluster: LocalCluster, *words: str) -> Answer:
    """Run the command in this process: its one object, with `exit_code` added."""
    at = ("--connect", cluster.connect, "--store", cluster.store_uri)
    name = words[:1] if words[0] in ("plan", "run") else ()
    return streammeta("compact", *name, *at, *words[len(name) :])


async def upload(cluster: LocalCluster, node_id: int, uploads: int = UPLOADS) -> None:
    """Make set objects of a node, whose streams are closed then."""
    async with broker(cluster, node_id) as one:
        await one.upload(uploads)


def set_object_ids(cluster: LocalCluster, node_id: int) -> list[int]:
    """The ids of a node's set objects."""
    plan = compact(cluster, "plan", "--node", str(node_id))
    ids = [row["object_id"] for row in (*plan["sources"], *plan["left_out"])]
    return sorted(ids)


@pytest.mark.process
def test_what_was_planned_is_what_is_done(cluster: LocalCluster) -> None:
    asyncio.run(upload(cluster, 1001))
    node = ("--node", "1001", "--growth", "1")
    plan = compact(cluster, "plan", *node)
    assert plan == compact(cluster, "plan", *node), "planning changes nothing"
    assert (plan["ok"], plan["node_ids"]) == (True, [1001])
    assert (plan["commits"], plan["iterations"]) == (1, 1)
    assert (plan["objects_before"], plan["objects_after"]) == (UPLOADS, 1)
    assert plan["metadata_bytes_before"] == UPLOADS * (86 + STREAMS * 32)
    assert plan["metadata_bytes_after"] == 86 + STREAMS * 32
    assert plan["gets_per_cold_read_before"] == 2 * UPLOADS
    assert plan["gets_per_cold_read_after"] == 2
    assert 0.9 < plan["write_amplification"] <= 1
    assert len(plan["sources"]) == UPLOADS
    (made,) = plan["outputs"]
    assert (made["kind"], made["ranges"]) == ("set object", STREAMS)

    done = compact(cluster, *node)
    assert (done["ok"], done["exit_code"], done["commits"]) == (True, 0, 1)
    assert (done["sources"], done["set_objects"], done["stream_objects"]) == (UPLOADS, 1, 0)
    assert done["bytes_written"] == plan["bytes_to_write"] == made["object_size"]
    assert (done["bytes_read"], done["gets"]) == (plan["bytes_to_read"], plan["gets"])
    assert done["left_out"] == []
    assert [row["node_id"] for row in done["nodes"]] == [1001]

    after = compact(cluster, "plan", *node)
    assert (after["commits"], after["objects_before"], after["sources"]) == (0, 0, [])
    (left,) = after["left_out"]
    assert "time has not come" in left["reason"]
    assert after["gets_per_cold_read_before"] is None


@pytest.mark.process
def test_few_small_objects_wait_for_more_unless_told_otherwise(cluster: LocalCluster) -> None:
    asyncio.run(upload(cluster, 1002))
    plan = compact(cluster, "plan", "--node", "1002")
    assert (plan["commits"], plan["left_out_objects"]) == (0, UPLOADS)
    split = compact(cluster, "plan", "--node", "1002", "--force-split")
    assert (split["objects_before"], split["objects_after"]) == (UPLOADS, STREAMS)
    assert [row["kind"] for row in split["outputs"]] == ["stream object"] * STREAMS
    assert [row["end_offset"] for row in split["outputs"]] == [UPLOADS * ROWS] * STREAMS
    done = compact(cluster, "run", "--node", "1002", "--force-split", "--once")
    assert (done["sources"], done["set_objects"], done["stream_objects"]) == (UPLOADS, 0, STREAMS)
    assert set_object_ids(cluster, 1002) == []


@pytest.mark.process
def test_objects_without_live_offsets_are_removed_with_the_others(cluster: LocalCluster) -> None:
    async def upload_and_delete() -> None:
        async with broker(cluster, 1008) as one:
            await one.upload(2)
        async with broker(cluster, 1008) as two:
            await two.upload(2)
            deleted = await two.session.delete_streams(dict.fromkeys(one.stream_ids, 1))
            deleted.require_all()

    asyncio.run(upload_and_delete())
    plan = compact(cluster, "plan", "--node", "1008", "--growth", "1")
    assert (plan["commits"], plan["objects_before"], plan["objects_after"]) == (1, 4, 1)
    assert (len(plan["sources"]), plan["outputs"][0]["ranges"]) == (4, STREAMS)
    done = compact(cluster, "--node", "1008", "--growth", "1")
    assert (done["sources"], done["set_objects"]) == (4, 1)
    assert done["bytes_written"] == plan["bytes_to_write"]


@pytest.mark.process
def test_an_object_that_is_lost_is_named_and_the_others_are_compacted(
    cluster: LocalCluster,
) -> None:
    asyncio.run(upload(cluster, 1003, 5))
    first = set_object_ids(cluster, 1003)[0]
    key = key_for(first, cluster_namespace("test"))
    assert open_object_store(cluster.store_uri).delete_many([key]).deleted == (key,)
    done = compact(cluster, "--node", "1003", "--growth", "1")
    assert (done["exit_code"], done["sources"], done["set_objects"]) == (0, 4, 1)
    (left,) = done["left_out"]
    assert (left["node_id"], left["object_id"]) == (1003, first)
    assert str(first) in left["reason"]


@pytest.mark.process
def test_what_a_departed_node_has_left_is_compacted_for_it(cluster: LocalCluster) -> None:
    asyncio.run(upload(cluster, 1004))
    asyncio.run(upload(cluster, 1005, 1))
    at = ("--connect", cluster.connect, "--node-id", "1004")
    assert streammeta("node", "unregister", *at)["departed"]
    done = compact(cluster, "--gone", "--growth", "1")
    assert done["exit_code"] == 0
    rows = {row["node_id"]: row for row in done["nodes"]}
    assert rows[1004]["sources"] == UPLOADS
    assert rows[1004]["commits"] == 1


@pytest.mark.process
async def test_a_broker_goes_on_while_it_is_compacted_again_and_again(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """Its process is not fenced, its readers see every record; SIGTERM ends it in good order."""
    async with broker(cluster, 1006) as one:
        await one.upload(2)
        child = start_child(
            "compactor",
            [
                *(sys.executable, "-m", "streammeta.cli.main", "compact", "--node", "1006"),
                *("--connect", cluster.connect, "--store", cluster.store_uri),
                *("--growth", "1", "--interval", "50ms", "--format", "json"),
            ],
            tmp_path / "compactor.log",
        )
        try:
            for uploads in (3, 4, 5):
                await one.upload(1)
                await _until_compacted(one)
                read = await one.read()
                assert [len(rows) for rows in read.values()] == [uploads * ROWS] * STREAMS
        finally:
            child.process.terminate()
            said, _ = child.process.communicate(timeout=PATIENCE_S)
    answer = json.loads(said)
    assert (child.process.returncode, answer["ok"]) == (0, True), answer
    assert answer["passes"] >= 3
    assert answer["commits"] >= 3


@pytest.mark.process
async def test_stream_objects_of_a_live_node_are_merged_too(cluster: LocalCluster) -> None:
    async def compacted(*, force_split: bool, stream_objects: bool) -> Answer:
        request = CompactionRequest(
            connect=tuple(cluster.endpoints),
            timeout_s=PATIENCE_S,
            store=cluster.store_uri,
            node_ids=(1007,),
            gone=False,
            force_split=force_split,
            budget=64 << 20,
            split_size=8 << 20,
            growth=1,
            rate=0,
        )
        output = Output(OutputFormat.JSON)
        await run(request, None, output, stream_objects=stream_objects)
        return output.collected

    async with broker(cluster, 1007) as one:
        for _ in range(2):
            await one.upload(1)
            split = await compacted(force_split=True, stream_objects=False)
            assert (split["stream_objects"], split["merged_stream_objects"]) == (STREAMS, 0)
        merged = await compacted(force_split=False, stream_objects=True)
        assert (merged["commits"], merged["failures"]) == (0, [])
        assert merged["merged_stream_objects"] == 2 * STREAMS
        assert merged["made_stream_objects"] == STREAMS
        read = await one.read()
        assert [len(rows) for rows in read.values()] == [2 * ROWS] * STREAMS


async def _until_compacted(one: Broker) -> None:
    """Return once the broker's node has a single set object."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while (count := await one.set_objects()) != 1:
        assert asyncio.get_running_loop().time() < deadline, f"there are {count} set objects"
        await asyncio.sleep(0.02)


@pytest.mark.process
def test_an_unknown_node_and_a_controller_that_is_not_there(cluster: LocalCluster) -> None:
    unknown = compact(cluster, "plan", "--node", "77")
    assert (unknown["exit_code"], unknown["error"]["code"]) == (1, "NODE_EPOCH_NOT_EXIST")
    assert "node 77" in unknown["error"]["message"]
    silent = streammeta(
        *("compact", "--connect", "127.0.0.1:1", "--store", cluster.store_uri, "--all"),
        *("--timeout", "0.3"),
    )
    assert (silent["exit_code"], silent["error"]["code"]) == (1, "NO_CONTROLLER")
    assert "127.0.0.1:1" in silent["error"]["message"]


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--node", "1", "--all"),
        ("--all", "--gone"),
        ("--all", "--budget", "12"),
        ("--all", "--budget", "1MiB"),
        ("--all", "--interval", "5"),
        ("--all", "--once", "--interval", "5m"),
        ("--all", "--growth", "0.5"),
        ("plan", "--all", "--interval", "5m"),
        ("--store", "gs://bucket", "--all"),
    ],
)
def test_a_wrong_call_is_told_with_exit_code_2(words: tuple[str, ...]) -> None:
    name = words[:1] if words[:1] == ("plan",) else ("run",)
    at = ("--connect", "127.0.0.1:1", "--store", "file:///nowhere", "--timeout", "0.1")
    answer = streammeta("compact", *name, *at, *words[words[:1] == name :])
    assert (answer["exit_code"], answer["error"]["code"]) == (2, "USAGE")


class ListedNodes:
    """A client that answers GetNodes alone."""

    def __init__(self, *nodes: nodes_pb2.NodeDescription) -> None:
        self._nodes = nodes

    async def call(self, _method: object, _request: object) -> nodes_pb2.GetNodesResponse:
        return nodes_pb2.GetNodesResponse(nodes=self._nodes)


def node(node_id: int, state: nodes_pb2.NodeState.ValueType, **facts: Any) -> Any:
    """A node with one set object, whose epoch is ten times its id."""
    facts = {"stream_set_object_count": 1, **facts}
    return nodes_pb2.NodeDescription(node_id=node_id, node_epoch=10 * node_id, state=state, **facts)


def found(*nodes: Any, **choice: Any) -> Targets:
    return asyncio.run(find_targets(cast(ControllerClient, ListedNodes(*nodes)), **choice))


ACTIVE = node(1, nodes_pb2.NODE_STATE_ACTIVE)
FENCED = node(2, nodes_pb2.NODE_STATE_FENCED)
RECOVERED = node(3, nodes_pb2.NODE_STATE_FENCED, failover=True)
DEPARTED = node(4, nodes_pb2.NODE_STATE_UNKNOWN, departed=True)
EMPTY = node(5, nodes_pb2.NODE_STATE_ACTIVE, stream_set_object_count=0)


def test_nodes_are_spoken_for_with_their_own_epochs() -> None:
    every = found(RECOVERED, ACTIVE, FENCED, DEPARTED, EMPTY)
    assert every.targets == (
        CompactionTarget(3, 30, failover=True),
        CompactionTarget(1, 10),
        CompactionTarget(2, 20, failover=True),
        CompactionTarget(4, 40, failover=True),
    )
    assert every.writer == NodeIdentity(node_id=1, node_epoch=10)
    gone = found(RECOVERED, ACTIVE, FENCED, DEPARTED, gone=True)
    assert [one.node_id for one in gone.targets] == [3, 2, 4]
    # Ids are prepared by who is heard, or else by one that is only silent.
    assert gone.writer == NodeIdentity(node_id=1, node_epoch=10)
    silent = found(FENCED, DEPARTED, node_ids=[4])
    assert silent.targets == (CompactionTarget(4, 40, failover=True),)
    assert silent.writer == NodeIdentity(node_id=2, node_epoch=20)


def test_ids_cannot_be_prepared_without_a_live_node() -> None:
    with pytest.raises(CommandError, match="no live node") as raised:
        found(RECOVERED, DEPARTED, gone=True)
    assert raised.value.code == "NO_LIVE_NODE"
    assert found(ACTIVE, gone=True) == Targets((), None)
