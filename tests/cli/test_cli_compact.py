"""`streammeta compact`: what it plans and does, and its figures, held against sums by hand."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from streammeta.cli.brokers import compaction_view as view
from streammeta.cli.brokers.compaction_request import CompactionRequest
from streammeta.cli.brokers.compaction_run import Targets, find_targets, run
from streammeta.cli.framework.output import CommandError, Output, OutputFormat
from streammeta.cli.local.local_cluster import LocalCluster, start_child
from streammeta.client import StreamClient, StreamClientConfig, WriterConfig
from streammeta.client.compaction.config import CompactionConfig, CompactionTarget
from streammeta.client.compaction.report import Figures, GroupReport, OutputObject
from streammeta.client.controllers.methods import GET_NODES
from streammeta.client.model import NodeIdentity
from streammeta.client.parts import ControllerClient, StreamReader
from streammeta.storage.compaction.entries import Entry, EntryTable
from streammeta.storage.compaction.plan import CommitPlan, CompactionLimits, OutputKind
from streammeta.storage.compaction.planner import plan_compaction
from streammeta.storage.compaction.selection import GroupKind
from streammeta.storage.object_format.index_block import StreamRange
from streammeta.v1 import nodes_pb2
from tests.kit.hung_process import output_of
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

    client: StreamClient
    stream_ids: Sequence[int]

    async def upload(self, count: int) -> None:
        """Make `count` set objects, each with `ROWS` records of every stream."""
        for _ in range(count):
            acks = [
                await self.client.writer.append(stream, b"%d/%d|" % (stream, row) + b"." * 200)
                for stream in self.stream_ids
                for row in range(ROWS)
            ]
            await self.client.flush()
            await asyncio.gather(*acks)

    async def compacted(self) -> None:
        """Return once the node has a single set object."""
        request = nodes_pb2.GetNodesRequest(node_ids=[self.client.session.node.node_id])
        async with asyncio.timeout(PATIENCE_S):
            while True:
                (node,) = (await self.client.controllers.call(GET_NODES, request)).nodes
                if node.stream_set_object_count == 1:
                    return
                await asyncio.sleep(0.02)

    async def lengths(self) -> list[int]:
        """Read every stream from its beginning to its end; count its records."""
        namespace = self.client.session.namespace
        async with StreamReader(self.client.controllers, self.client.store, namespace) as reader:
            read = reader.read_streams(self.stream_ids)
            return [len(records) async for _, records in read]


@asynccontextmanager
async def broker(cluster: LocalCluster, node_id: int) -> AsyncIterator[Broker]:
    """Register node `node_id`, open new streams for it; at the end they are closed."""
    config = StreamClientConfig(writer=WriterConfig(linger_s=60.0))  # uploads are made when told
    place = (cluster.endpoints, cluster.store_uri)
    async with await StreamClient.open(*place, node_id=node_id, node_epoch=1, config=config) as one:
        stream_ids = await one.create_streams([{}] * STREAMS)
        (await one.open_streams(stream_ids)).require_all()
        yield Broker(one, stream_ids)
        (await one.close_streams(stream_ids)).require_all()


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
    assert "too young" in left["reason"]
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
async def test_a_broker_goes_on_during_compactions(cluster: LocalCluster, tmp_path: Path) -> None:
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
                await one.compacted()
                assert await one.lengths() == [uploads * ROWS] * STREAMS
        finally:
            child.process.terminate()
            said, _ = output_of(child.process)
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
        assert await one.lengths() == [2 * ROWS] * STREAMS


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

    async def pages(
        self, _method: object, _request: object
    ) -> AsyncIterator[nodes_pb2.GetNodesResponse]:
        yield nodes_pb2.GetNodesResponse(nodes=self._nodes)


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
    assert [target.node_id for target in gone.targets] == [3, 2, 4]
    # Ids are prepared by who is heard, or else by one that is only silent.
    assert gone.writer == NodeIdentity(node_id=1, node_epoch=10)
    silent = found(FENCED, DEPARTED, node_ids=[4])
    assert silent.targets == (CompactionTarget(4, 40, failover=True),)
    assert silent.writer == NodeIdentity(node_id=2, node_epoch=20)


def test_ids_cannot_be_prepared_without_a_live_node() -> None:
    with pytest.raises(CommandError, match="node") as raised:
        found(RECOVERED, DEPARTED, gone=True)
    assert raised.value.code == "NO_LIVE_NODE"
    assert found(ACTIVE, gone=True) == Targets((), None)


SOURCES = 3 * view.SHOWN_ROWS
COMMIT = view.CommitFigures(
    source_ids=tuple(range(SOURCES)),
    kind=GroupKind.MERGE,
    outputs=(
        view.OutputFigures(OutputKind.COMPACT, None, 4, 5, 1000),
        view.OutputFigures(OutputKind.SPLIT, (7, 100, 200), 1, 1, 500),
    ),
    cost=view.Cost(
        iterations=2,
        objects=view.Change(SOURCES, 2),
        metadata_bytes=view.Change(9000, 300),
        streams=4,
        cold_gets=view.Change(480, 8),
        gets=70,
        bytes_read=2000,
        bytes_written=1800,
        fresh_bytes=1200,
    ),
)
PLANS = [view.NodePlan(3, (COMMIT,), {99: "it is missing"}), view.NodePlan(4, (), {})]


def test_programs_get_everything() -> None:
    output = Output(OutputFormat.JSON)
    view.show_plan(output, PLANS)
    said = output.collected
    assert said["node_ids"] == [3, 4]
    assert (said["objects_before"], said["objects_after"]) == (SOURCES, 2)
    assert (said["metadata_bytes_before"], said["metadata_bytes_after"]) == (9000, 300)
    assert (said["gets_per_cold_read_before"], said["gets_per_cold_read_after"]) == (120, 2)
    assert said["write_amplification"] == 1.5
    assert [row["object_id"] for row in said["sources"]] == list(range(SOURCES))
    assert said["left_out"] == [{"node_id": 3, "object_id": 99, "reason": "it is missing"}]
    (row,) = said["plan"]
    assert (row["node_id"], row["commit"], row["kind"], row["sources"]) == (3, 1, "merge", SOURCES)
    assert (row["set_objects"], row["stream_objects"], row["iterations"]) == (1, 1, 2)
    set_object, stream_object = said["outputs"]
    assert (set_object["kind"], set_object["stream_id"], set_object["ranges"]) == (
        *("set object", None, 4),
    )
    assert set_object["object_size"] == 1000 + 5 * 36 + 48
    assert stream_object["kind"] == "stream object"
    held = [stream_object[name] for name in ("stream_id", "start_offset", "end_offset")]
    assert held == [7, 100, 200]


def test_people_get_the_beginning_of_a_long_table(capsys: pytest.CaptureFixture[str]) -> None:
    view.show_plan(Output(OutputFormat.TABLE), PLANS)
    said = capsys.readouterr().out
    assert f"... and {SOURCES - view.SHOWN_ROWS} more" in said
    shown = [line.split()[2] for line in said.splitlines() if line.split()[:2] == ["3", "1"]]
    assert [str(n) for n in range(view.SHOWN_ROWS)] == [cell for cell in shown if cell.isdigit()]
    assert "it is missing" in said
    assert "write_amplification:" in said
    view.show_plan(Output(OutputFormat.PLAIN), PLANS)
    assert f"3\t1\t{SOURCES - 1}\n" in capsys.readouterr().out


def test_totals_add_up_over_passes_but_for_what_failed() -> None:
    totals = view.Totals()
    report = GroupReport(
        GroupKind.MERGE,
        source_ids=[1, 2],
        made=[
            OutputObject(3, 10, (1, 2)),
            *(OutputObject(object_id, 10, (1, 2), StreamRange(7, 0, 5)) for object_id in (4, 5)),
        ],
        left_out={9: "damaged"},
        failures=["the store is away"],
        figures=Figures(bytes_read=10, commits=1),
    )
    totals.add(7, report)
    assert totals.failures == {7: "node 7: the store is away"}
    totals.begin_pass()
    split = [OutputObject(6, 10, (3,), StreamRange(7, 0, 5))]
    figures = Figures(bytes_read=5)
    totals.add(7, GroupReport(GroupKind.SPLIT, source_ids=[3], made=split, figures=figures))
    output = Output(OutputFormat.JSON)
    view.show_totals(output, totals)
    said = output.collected
    assert (said["passes"], said["commits"], said["bytes_read"]) == (2, 1, 15)
    assert (said["sources"], said["set_objects"], said["stream_objects"]) == (3, 1, 3)
    assert (said["left_out"], said["failures"]) == ([], [])
    assert [row["node_id"] for row in said["nodes"]] == [7]


MIB = 1024 * 1024
Held = list[tuple[int, int, int]]


def objects(*held: Held, unit: int = 1) -> tuple[EntryTable, list[view.ListedObject]]:
    """Objects 0, 1, ... with (stream, start, end) each, `unit` bytes an offset."""
    rows: list[Entry] = []
    listed: list[view.ListedObject] = []
    for object_id, entries in enumerate(held):
        position = 0
        for stream_id, start, end in entries:
            size = (end - start) * unit
            rows.append(Entry(object_id, stream_id, start, end, 1, position, size))
            position += size
        ranges = len({stream_id for stream_id, _, _ in entries})
        listed.append(
            view.ListedObject(object_id, object_id, position + 36 * len(entries) + 48, ranges)
        )
    return EntryTable.of_rows(rows), listed


def figures_of(commit: CommitPlan, listed: list[view.ListedObject]) -> view.CommitFigures:
    """The figures of a merge with the usual bounds."""
    return view.commit_figures(commit, listed, CompactionConfig(), GroupKind.MERGE)


def figures(
    held: tuple[EntryTable, list[view.ListedObject]], limits: CompactionLimits
) -> view.CommitFigures:
    """The figures of the one commit that becomes of all objects."""
    (commit,) = plan_compaction(held[0], limits).commits
    return figures_of(commit, held[1])


THREE_OBJECTS: tuple[Held, ...] = (
    [(0, 0, 20), (1, 30, 60), (3, 210, 230)],
    [(0, 20, 25), (1, 60, 120)],
    [(2, 400, 435), (2, 435, 500), (3, 230, 270)],
)


def test_the_example_of_three_objects() -> None:
    found = figures(objects(*THREE_OBJECTS), CompactionLimits(memory_budget=150, split_size=80))
    assert found.source_ids == (0, 1, 2)
    assert found.cost.iterations == 2
    assert found.cost.objects == view.Change(3, 4)
    assert [(one.kind, one.held, one.ranges, one.object_size) for one in found.outputs] == [
        (OutputKind.COMPACT, None, 2, 85 + 2 * 36 + 48),
        (OutputKind.SPLIT, (1, 30, 120), 1, 90 + 36 + 48),
        (OutputKind.SPLIT, (2, 400, 435), 1, 35 + 36 + 48),
        (OutputKind.SPLIT, (2, 435, 500), 1, 65 + 36 + 48),
    ]
    assert found.cost.metadata_bytes == view.Change(3 * 86 + 7 * 32, 4 * 86 + 5 * 32)
    # 7 pairs of a stream and its object before, 5 after: an index and a range of blocks each.
    assert (found.cost.streams, found.cost.cold_gets) == (4, view.Change(14, 10))
    # 5 reads of adjacent blocks, and 3 of indexes, which get all of objects so small.
    assert found.cost.gets == 5 + 3
    assert found.cost.bytes_read == 275 + (275 + 8 * 36 + 3 * 48)
    assert found.cost.bytes_written == 205 + 174 + 119 + 149
    assert found.cost.fresh_bytes == 275 + 8 * 36 + 3 * 48


def test_a_large_range_and_a_large_index_take_more_requests() -> None:
    """Readers fetch 4 MiB at once; what they guess to hold an index has some 225 small entries."""
    many = [(stream_id, 0, 1) for stream_id in range(300)]
    held = objects(many, [(0, 1, 1025)], unit=10 * 1024)
    found = figures(held, CompactionLimits(memory_budget=100 * MIB, split_size=8 * MIB))
    # Object 0: 2 for the index and 1 for blocks, 300 times; object 1: 1 and 3, for stream 0 alone.
    assert found.cost.cold_gets.before == 300 * 3 + 1 + 3
    # Stream 0 has an object of its own; the index of the others is as large as before.
    assert found.cost.cold_gets.after == 299 * 3 + 1 + 3


def test_write_amplification_counts_what_no_compaction_has_written() -> None:
    table, listed = objects([(0, 0, 100)], [(0, 100, 200)], unit=1000)
    (commit,) = plan_compaction(table, CompactionLimits()).commits
    fresh = figures_of(commit, listed).cost
    assert fresh.write_amplification == pytest.approx(1.0, abs=0.01)
    compacted = [view.ListedObject(0, -5, listed[0].object_size, 1), listed[1]]
    again = figures_of(commit, compacted).cost
    assert again.write_amplification == pytest.approx(2.0, abs=0.01)
    rewritten = [view.ListedObject(item.object_id, -5, item.object_size, 1) for item in listed]
    assert figures_of(commit, rewritten).cost.write_amplification is None


def test_sources_of_which_nothing_lives_only_go() -> None:
    found = figures_of(
        CommitPlan((), EntryTable.of_rows(()), ()), [view.ListedObject(4, 4, 1000, 2)]
    )
    assert (found.cost.objects, found.outputs) == (view.Change(1, 0), ())
    assert found.cost.metadata_bytes == view.Change(86 + 64, 0)
    assert (found.cost.bytes_written, found.cost.cold_gets) == (0, view.Change(0, 0))
    assert found.cost.gets_per_cold_read is None
