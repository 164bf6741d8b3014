"""Anchors of audit logs in the map: written by the leader alone, and only forward."""

import asyncio
from collections.abc import AsyncIterator, Mapping

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from streammeta.controller.monitoring.status.peer_status import Answer
from streammeta.controller.process import audit_log
from streammeta.controller.process.audit_log import AuditAnchors, read_heads
from streammeta.controller.trust.audit.lines import NAMESPACE, Chain, expected_lines, read_anchor
from streammeta.v1 import kv_pb2, quorum_pb2
from tests.server.rpc_server import CLUSTER_ID, Rpcs, serving


class Scene:
    """A leader that anchors the chains of controllers."""

    def __init__(self, rpcs: Rpcs) -> None:
        self.rpcs = rpcs
        self.chains: dict[int, Chain] = {}
        self.anchors = self.of(CLUSTER_ID)

    def of(self, cluster_id: str) -> AuditAnchors:
        return AuditAnchors(self.rpcs.controller, cluster_id, lambda: 1, self.heads)

    async def heads(self) -> Mapping[int, Chain]:
        return self.chains

    async def anchored(self) -> dict[int, dict[int, str]]:
        request = kv_pb2.ListKVsRequest(namespace=NAMESPACE)
        entries = (await self.rpcs.ask(request)).entries
        return expected_lines({entry.key: entry.value for entry in entries}, CLUSTER_ID)


@pytest_asyncio.fixture
async def scene() -> AsyncIterator[Scene]:
    async with serving() as rpcs:
        yield Scene(rpcs)


async def test_the_ends_of_chains_are_anchored_as_they_grow(scene: Scene) -> None:
    scene.chains = {1: Chain(5, "5" * 64), 2: Chain()}
    await scene.anchors.anchor()
    assert await scene.anchored() == {1: {5: "5" * 64}}
    scene.chains = {1: Chain(9, "9" * 64), 2: Chain(1, "1" * 64)}
    await scene.anchors.anchor()
    assert await scene.anchored() == {1: {9: "9" * 64}, 2: {1: "1" * 64}}
    end_offset = scene.rpcs.log.next_offset
    await scene.anchors.anchor()
    assert scene.rpcs.log.next_offset == end_offset, "nothing is written if nothing has grown"


async def test_a_chain_that_was_cut_does_not_take_its_anchor_back(scene: Scene) -> None:
    scene.chains = {1: Chain(9, "9" * 64)}
    await scene.anchors.anchor()
    scene.chains = {1: Chain(4, "4" * 64)}
    await scene.anchors.anchor()
    assert await scene.anchored() == {1: {9: "9" * 64}}


async def test_a_restored_cluster_begins_its_anchors_anew(scene: Scene) -> None:
    scene.chains = {1: Chain(9, "9" * 64)}
    await scene.of("before").anchor()
    assert await scene.anchored() == {}
    scene.chains = {1: Chain(4, "4" * 64)}
    await scene.anchors.anchor()
    assert await scene.anchored() == {1: {4: "4" * 64}}


async def test_no_caller_changes_anchors(scene: Scene) -> None:
    scene.chains = {1: Chain(9, "9" * 64)}
    await scene.anchors.anchor()
    put = kv_pb2.PutKVsRequest(items=[kv_pb2.KVToPut(namespace=NAMESPACE, key="1", overwrite=True)])
    delete = kv_pb2.DeleteKVsRequest(keys=[kv_pb2.KVKey(namespace=NAMESPACE, key="1")])
    refused = ("INVALID_ARGUMENT", "INVALID_FIELD", {"field": "namespace"})
    assert await scene.rpcs.refusal("KVService/PutKVs", put) == refused
    assert await scene.rpcs.refusal("KVService/DeleteKVs", delete) == refused
    assert await scene.anchored() == {1: {9: "9" * 64}}


async def test_a_controller_that_does_not_lead_anchors_nothing(scene: Scene) -> None:
    scene.chains = {1: Chain(9, "9" * 64)}
    scene.rpcs.log.lose_leadership(truncate=False)
    with capture_logs() as logs:
        await scene.anchors.anchor()
    assert logs == []


async def test_a_defect_is_logged_and_anchoring_goes_on(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> Mapping[int, Chain]:
        asked.set()
        raise RuntimeError("a defect")

    monkeypatch.setattr(audit_log, "ANCHOR_INTERVAL_S", 0)
    asked = asyncio.Event()
    anchors = AuditAnchors(scene.rpcs.controller, CLUSTER_ID, lambda: 1, fail)
    with capture_logs() as logs:
        anchoring_task = asyncio.create_task(anchors.run())
        for _ in range(2):
            asked.clear()
            await asyncio.wait_for(asked.wait(), 60)
        anchoring_task.cancel()
    assert [line["reason"] for line in logs] == ["RuntimeError('a defect')"]


def test_a_controller_is_anchored_by_its_own_answer_alone() -> None:
    """An address that now leads to another controller would make verification fail for months."""

    def answer(node_id: int, cluster_id: str = CLUSTER_ID, seq: int = 9) -> Answer:
        view = quorum_pb2.DescribeQuorumResponse(
            cluster_id=cluster_id, node_id=node_id, audit_seq=seq, audit_hash=str(node_id) * 64
        )
        return Answer("c.example:9090", view)

    answers = {
        1: answer(1),
        2: answer(3),
        3: answer(3, "another"),
        4: answer(4, seq=0),
        5: Answer("c.example:9090", None, "silent"),
    }
    assert read_heads(answers, CLUSTER_ID) == {1: Chain(9, "1" * 64)}


@pytest.mark.parametrize("value", [b"", b"[]", b"{}", b'{"seq": 1}', b"[" * 100_000])
def test_a_value_of_others_is_no_anchor(value: bytes) -> None:
    assert read_anchor(value) is None
    assert expected_lines({"1": value}, CLUSTER_ID) == {}
