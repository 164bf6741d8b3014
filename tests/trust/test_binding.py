"""Binding of brokers to their nodes: own, recovered and compacted ones, and no others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.registries.nodes import Node
from streammeta.controller.metadata.tables.values import NodeIdentity, RangeColumns, column
from streammeta.controller.trust.node_binding import NodeBinding, require_own_node
from streammeta.controller.trust.refusals import NotYourNodeError
from streammeta.tls.identity import Principal, Role
from tests.lifecycle.lifecycle_world import TIMEOUT_MS, A, B, C, Cluster

SILENCE_MS = TIMEOUT_MS + 2_000


def broker(node: NodeIdentity) -> Principal:
    return Principal("test", Role.BROKER, str(node.node_id))


class Brokers(Cluster):
    """A leader that knows who asks."""

    async def ask(self, caller: NodeIdentity, request: requests.WriteRequest) -> ErrorCode:
        answered = await self.world.controller.write(request, broker(caller))
        answer: Any = answered.answer
        found: ErrorCode = answer.errors[0] if hasattr(answer, "errors") else answer.error
        return found

    async def refused(self, caller: NodeIdentity, request: requests.WriteRequest) -> str:
        """Return who may, of a request that is refused and changes nothing."""
        before = self.world.log.next_offset, self.world.controller.cluster_metadata.state_hash()
        with pytest.raises(NotYourNodeError) as refused:
            await self.ask(caller, request)
        assert before == (
            self.world.log.next_offset,
            self.world.controller.cluster_metadata.state_hash(),
        )
        return refused.value.needs

    def closing(self, node: NodeIdentity) -> requests.CloseStreams:
        streams = (requests.StreamToClose(self.stream_id, 0),)
        return requests.CloseStreams(node=node, streams=streams)

    async def compaction(self, node: NodeIdentity, source: int) -> requests.WriteRequest:
        """Return the removal of an expired set object in the name of a node."""
        return requests.CommitStreamSetObject(
            node=node,
            object_id=-1,
            order_id=-1,
            object_size=0,
            compacted_object_ids=column([source]),
            failover=True,
        )


@pytest_asyncio.fixture
async def brokers() -> AsyncIterator[Brokers]:
    cluster = Brokers()
    yield await cluster.start()


def recovery(node: NodeIdentity) -> requests.GetOpeningStreams:
    return requests.GetOpeningStreams(node=node, failover=True)


NAMING_A = (
    requests.RegisterNode(node=NodeIdentity(A.node_id, 2)),
    requests.UnregisterNode(node=A),
    requests.CreateStreams(request_id="new", node=A, streams=(requests.NewStream(),)),
    requests.OpenStreams(node=A, streams=(requests.StreamToOpen(0, 1),)),
    requests.CloseStreams(node=A, streams=(requests.StreamToClose(0, 0),)),
    requests.TrimStreams(node=A, streams=(requests.StreamToTrim(0, 0, 0),)),
    requests.DeleteStreams(node=A, streams=(requests.StreamToDelete(0, 0),)),
    requests.GetOpeningStreams(node=NodeIdentity(A.node_id, 2)),
    recovery(A),
    requests.IssueProducerIds(node=A, count=1),
    requests.PrepareObjects(request_id="new", node=A, count=1, ttl_ms=60_000),
    requests.CommitNamedObjects(
        node=A,
        objects=(
            requests.NamedObjectToCommit(object_id=0, name="n", object_size=0, owner_stream_id=0),
        ),
    ),
    requests.DeleteNamedObjects(node=A, objects=(requests.NamedObjectToDelete(name="n"),)),
    requests.CommitStreamSetObject(node=A, object_id=0, order_id=0, object_size=1),
    requests.CommitStreamSetObject(node=A, object_id=0, order_id=0, object_size=1, failover=True),
    requests.CommitStreamObject(node=A, object_size=0, stream_id=0, stream_epoch=0),
    requests.CommitUploads(
        node=A,
        object_id=column([0]),
        object_size=column([1]),
        range_count=column([0]),
        ranges=RangeColumns(),
    ),
)


def test_every_request_that_names_a_node_is_tried() -> None:
    naming = {
        kind.__name__
        for kind in vars(requests).values()
        if isinstance(kind, type) and issubclass(kind, requests.WriteRequest) and is_of_node(kind)
    }
    by_the_leader_alone = {"SuperviseNode", "ReleaseStreams"}
    assert {type(request).__name__ for request in NAMING_A} == naming - by_the_leader_alone


def is_of_node(kind: type) -> bool:
    return "node" in getattr(kind, "__dataclass_fields__", {})


@pytest.mark.parametrize("request_", NAMING_A, ids=lambda request: type(request).__name__)
async def test_a_broker_speaks_for_no_other_node(
    brokers: Brokers, request_: requests.WriteRequest
) -> None:
    assert "broker/1001" in await brokers.refused(B, request_)


async def test_a_broker_speaks_for_its_own_node(brokers: Brokers) -> None:
    assert await brokers.ask(A, brokers.closing(A)) is ErrorCode.NONE
    assert await brokers.ask(A, requests.RegisterNode(node=NodeIdentity(1001, 2))) is ErrorCode.NONE


async def test_only_the_broker_that_was_told_to_recovers_a_node(brokers: Brokers) -> None:
    await brokers.run_for(2_000, A, B, C)
    await brokers.run_for(SILENCE_MS, B, C)
    (target,) = brokers.recovered_by().values()
    assigned, other = (B, C) if target == B.node_id else (C, B)
    needs = "broker/1001, or the recovery of node 1001 to be assigned to it"
    assert await brokers.refused(other, recovery(A)) == needs
    assert await brokers.ask(assigned, recovery(A)) is ErrorCode.NONE
    assert await brokers.refused(other, brokers.closing(A)) == needs
    # What no recovery does stays the node's own.
    await brokers.refused(assigned, requests.RegisterNode(node=NodeIdentity(1001, 2)))
    await brokers.refused(assigned, NAMING_A[3])
    await brokers.refused(assigned, NAMING_A[5])
    await brokers.refused(assigned, NAMING_A[-1])
    assert await brokers.ask(assigned, brokers.closing(A)) is ErrorCode.NONE


async def test_a_new_leader_lets_the_same_broker_go_on(brokers: Brokers) -> None:
    await brokers.run_for(2_000, A, B, C)
    await brokers.run_for(SILENCE_MS, B, C)
    (target,) = brokers.recovered_by().values()
    assigned, other = (B, C) if target == B.node_id else (C, B)
    await brokers.change_leader()
    assert await brokers.ask(assigned, recovery(A)) is ErrorCode.NONE
    await brokers.refused(other, brokers.closing(A))
    assert await brokers.ask(assigned, brokers.closing(A)) is ErrorCode.NONE


async def test_the_owners_return_ends_a_recovery(brokers: Brokers) -> None:
    await brokers.run_for(2_000, A, B, C)
    await brokers.run_for(SILENCE_MS, B, C)
    (target,) = brokers.recovered_by().values()
    assigned = B if target == B.node_id else C
    assert await brokers.ask(assigned, recovery(A)) is ErrorCode.NONE
    back = NodeIdentity(A.node_id, A.node_epoch + 1)
    assert await brokers.ask(A, requests.RegisterNode(node=back)) is ErrorCode.NONE
    # The process that it speaks for is gone, which it hears as before; the new one is none of its.
    assert await brokers.ask(assigned, brokers.closing(A)) is ErrorCode.NODE_EPOCH_EXPIRED
    assert await brokers.ask(assigned, recovery(A)) is ErrorCode.NODE_EPOCH_EXPIRED
    await brokers.refused(assigned, brokers.closing(back))
    await brokers.refused(assigned, recovery(NodeIdentity(A.node_id, 9)))
    assert await brokers.ask(A, brokers.closing(back)) is ErrorCode.NONE


async def test_set_objects_left_behind_are_compacted_by_the_broker_that_was_told_to(
    brokers: Brokers,
) -> None:
    source = await brokers.commit_set_object()
    await brokers.run_for(2_000, A, B, C)
    assert (await brokers.close(A)).errors == (ErrorCode.NONE,)
    trimmed = requests.DeleteStreams(
        node=A, streams=(requests.StreamToDelete(brokers.stream_id, 0),)
    )
    assert (await brokers.world.write(trimmed)).errors == (ErrorCode.NONE,)
    assert await brokers.ask(A, requests.UnregisterNode(node=A)) is ErrorCode.NONE
    compaction = await brokers.compaction(A, source)
    needs = "broker/1001, or the compaction of node 1001 to be assigned to it"
    assert await brokers.refused(B, compaction) == needs  # no node is told to yet
    await brokers.run_for(2_000, B, C)
    target = brokers.heartbeats.compacted_by(A.node_id)
    assigned, other = (B, C) if target == B.node_id else (C, B)
    assert await brokers.refused(other, compaction) == needs
    await brokers.refused(assigned, brokers.closing(A))
    await brokers.change_leader()
    assert await brokers.refused(assigned, compaction) == needs  # the new one has not shared out
    await brokers.run_for(SILENCE_MS, B, C)
    target = brokers.heartbeats.compacted_by(A.node_id)
    assigned = B if target == B.node_id else C
    assert await brokers.ask(assigned, compaction) is ErrorCode.NONE


GONE = NodeIdentity(1, 5)
NODE = Node(node_id=1, node_epoch=5, failover=True, recovered_by=2)
OWNER, RECOVERER, COMPACTOR = (Principal("test", Role.BROKER, name) for name in "123")
BINDING = NodeBinding(compacted_by=lambda _: 3)


def commit(*, failover: bool, compacted: tuple[int, ...] = ()) -> requests.CommitStreamSetObject:
    return requests.CommitStreamSetObject(
        node=GONE,
        object_id=7,
        order_id=7,
        object_size=1,
        failover=failover,
        compacted_object_ids=column(compacted),
    )


UPLOAD = commit(failover=True)
COMPACTION = commit(failover=True, compacted=(4,))
OWN_UPLOAD = commit(failover=False)
OWN_COMPACTION = commit(failover=False, compacted=(4,))


@pytest.mark.parametrize(
    ("caller", "allowed"),
    [
        (OWNER, (UPLOAD, COMPACTION, OWN_UPLOAD, OWN_COMPACTION)),
        (RECOVERER, (UPLOAD,)),
        (COMPACTOR, (COMPACTION,)),
    ],
    ids=["owner", "recoverer", "compactor"],
)
def test_a_broker_makes_only_the_commits_that_are_assigned_to_it(
    caller: Principal, allowed: tuple[requests.CommitStreamSetObject, ...]
) -> None:
    for request in (UPLOAD, COMPACTION, OWN_UPLOAD, OWN_COMPACTION):
        if request in allowed:
            BINDING.require(caller, [request], lambda _: NODE)
        else:
            with pytest.raises(NotYourNodeError):
                BINDING.require(caller, [request], lambda _: NODE)


def test_all_requests_of_a_batch_are_judged() -> None:
    with pytest.raises(NotYourNodeError):
        BINDING.require(RECOVERER, [UPLOAD, COMPACTION], lambda _: NODE)


@pytest.mark.parametrize("request_", [UPLOAD, COMPACTION])
def test_nobody_speaks_for_a_node_that_is_not_known(
    request_: requests.CommitStreamSetObject,
) -> None:
    for caller in (RECOVERER, COMPACTOR):
        with pytest.raises(NotYourNodeError):
            BINDING.require(caller, [request_], lambda _: None)


def test_a_call_of_a_broker_is_for_its_own_node() -> None:
    require_own_node(OWNER, 1)
    with pytest.raises(NotYourNodeError):
        require_own_node(OWNER, 2)
