"""Failed nodes are recovered, and departed ones compacted for, by active nodes."""

import random
from dataclasses import replace
from typing import Any, Self

import pytest

from streammeta.controller.errors import ErrorCode
from streammeta.controller.ids import NONE_ID
from streammeta.controller.lifecycle.assignments import plan_compactions, plan_recoveries
from streammeta.controller.lifecycle.broker_sessions import NodeState, Sessions, SupervisedNode
from streammeta.controller.lifecycle.failover import read_nodes
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.api.answers import NodeDescription
from streammeta.controller.metadata.api.requests import RecoveryTarget
from streammeta.controller.metadata.tables.values import NodeIdentity, column
from tests.kit.seeds import seeds
from tests.lifecycle.lifecycle_world import TIMEOUT_MS, A, B, C, Cluster


def node(node_id: int, *, owes: bool = False, **changes: object) -> NodeDescription:
    plain = NodeDescription(
        node_id=node_id,
        node_epoch=5,
        failover=False,
        wal_config="",
        tags=(),
        has_opening_streams=owes,
        stream_set_object_count=0,
        supervised=True,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def sessions(active: set[int], fenced: set[int], granted: frozenset[int] = frozenset()) -> Sessions:
    """Sessions in which these nodes are heard, silent, or only granted a session."""
    made = Sessions(TIMEOUT_MS)
    made.lead(0)
    known = [SupervisedNode(node_id, 5) for node_id in sorted(active | fenced)]
    for now_ms in range(1_000, 6 * TIMEOUT_MS, 1_000):
        for node_id in active:
            made.heartbeat(node_id, 5, now_ms)
        made.tick(now_ms, known)
    made.tick(now_ms, [*known, *(SupervisedNode(node_id, 5) for node_id in granted)])
    assert {id_ for id_ in active | fenced if made.state(id_) is NodeState.FENCED} == fenced
    return made


OWING = node(1, owes=True)
ASSIGNED = node(1, owes=True, recovered_by=2)


@pytest.mark.parametrize(
    ("nodes", "active", "fenced", "target"),
    [
        pytest.param([OWING, node(2), node(3)], {2, 3}, {1}, 2, id="owes streams"),
        pytest.param([node(1, pending_upload_count=3), node(2)], {2}, {1}, 2, id="owes uploads"),
        pytest.param([node(1), node(2)], {2}, {1}, None, id="owes nothing"),
        pytest.param([node(1, owes=True, locked=True), node(2)], {2}, {1}, None, id="locked"),
        pytest.param([ASSIGNED, node(2), node(3)], {2, 3}, {1}, None, id="assigned"),
        pytest.param([node(1, departed=True), node(2)], {2}, {1}, None, id="departed"),
        # A node that never sent a heartbeat is neither recovered nor a target.
        pytest.param(
            [OWING, node(2, owes=True, supervised=False)], set(), {1}, None, id="never heard"
        ),
        pytest.param([ASSIGNED, node(2), node(3)], {3}, {1, 2}, 3, id="target is silent"),
        pytest.param([ASSIGNED, node(2), node(3)], set(), {1, 2, 3}, NONE_ID, id="all are silent"),
        pytest.param([node(1, recovered_by=2), node(2)], {2}, {1}, NONE_ID, id="nothing left"),
        pytest.param(
            [replace(ASSIGNED, locked=True), node(2)], {2}, {1}, NONE_ID, id="locked meanwhile"
        ),
        pytest.param([ASSIGNED, node(2)], {1, 2}, set(), NONE_ID, id="heard again"),
    ],
)
def test_recoveries_begin_change_and_end(
    nodes: list[NodeDescription], active: set[int], fenced: set[int], target: int | None
) -> None:
    """`target` is that of the change for node 1, None if nothing changes."""
    changes = () if target is None else (RecoveryTarget(1, 5, target),)
    assert plan_recoveries(nodes, sessions(active, fenced), 1) == changes


def test_a_leaving_target_is_replaced() -> None:
    heard = sessions({2, 3}, {1})
    heard.heartbeat(2, 5, 6 * TIMEOUT_MS, wants_shutdown=True)
    assert plan_recoveries([ASSIGNED, node(2), node(3)], heard, 1) == (RecoveryTarget(1, 5, 3),)


def test_a_new_leader_lets_recoveries_go_on() -> None:
    """Its granted sessions say nothing: the process is silent, or fenced by its recovery."""
    granted = sessions({2, 3}, set(), granted=frozenset({1}))
    assert granted.state(1) is NodeState.ACTIVE
    for begun in (ASSIGNED, replace(ASSIGNED, failover=True), OWING):
        assert plan_recoveries([begun, node(2), node(3)], granted, 1) == ()
    orphaned = replace(OWING, failover=True)
    assert plan_recoveries([orphaned, node(2), node(3)], granted, 1) == (RecoveryTarget(1, 5, 2),)


@pytest.mark.parametrize("seed", seeds(10, slow=20))
def test_plans_are_complete_bounded_and_final(seed: int) -> None:
    """After a plan is carried out: nothing more changes, no node is overloaded, none idles."""
    rng = random.Random(seed)
    ids = range(1_000, 1_000 + rng.randrange(2, 40))
    fenced = {node_id for node_id in ids if rng.random() < 0.4}
    active = set(ids) - fenced
    per_target = rng.randrange(1, 4)
    nodes = [
        node(
            node_id,
            owes=rng.random() < 0.7,
            locked=rng.random() < 0.1,
            recovered_by=rng.choice([NONE_ID, NONE_ID, *ids]),
        )
        for node_id in ids
    ]
    nodes = [replace(n, recovered_by=NONE_ID if n.recovered_by == n.node_id else n.recovered_by)
             for n in nodes]  # fmt: skip
    heard = sessions(active, fenced)

    changes = {c.node_id: c.target_id for c in plan_recoveries(nodes, heard, per_target)}
    after = [replace(n, recovered_by=changes.get(n.node_id, n.recovered_by)) for n in nodes]

    failed = {
        n.node_id for n in after if n.node_id in fenced and n.has_opening_streams and not n.locked
    }
    assigned = {n.node_id: n.recovered_by for n in after if n.recovered_by != NONE_ID}
    load = [list(assigned.values()).count(target) for target in active]
    assert set(assigned) <= failed, f"seed {seed}"
    assert set(assigned.values()) <= active, f"seed {seed}"
    assert all(count <= per_target for count in load), f"seed {seed}"
    assert len(assigned) == min(len(failed), per_target * len(active)), f"seed {seed}"
    assert plan_recoveries(after, heard, per_target) == (), f"seed {seed}"
    for n in nodes:
        if n.node_id in failed and n.recovered_by in active and n.node_id in changes:
            kept = [m for m in nodes if m.recovered_by == n.recovered_by and m.node_id in failed]
            assert len(kept) > per_target, f"seed {seed}: {n.node_id} was moved for nothing"


A2 = NodeIdentity(A.node_id, 2)


def left(node_id: int, **changes: object) -> NodeDescription:
    """A node that holds three set objects and owes nothing."""
    return replace(node(node_id), **{"stream_set_object_count": 3, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "spared",
    [
        left(1, stream_set_object_count=0),
        left(1, has_opening_streams=True),
        left(1, pending_upload_count=1, failover=True),
        left(1, recovered_by=3, failover=True),
        left(1, locked=True),
        left(1, locked=True, failover=True),
        left(2),
        left(4, supervised=False),
        left(5),
    ],
    ids=[
        *("empty", "owes streams", "owes uploads", "recovered", "locked", "locked and fenced"),
        *("active", "never heard", "granted"),
    ],
)
def test_others_leave_the_objects_of(spared: NodeDescription) -> None:
    heard = sessions({2, 3}, {1}, granted=frozenset({5}))
    others = [identity for identity in (node(2), node(3)) if identity.node_id != spared.node_id]
    nodes = sorted([spared, *others], key=lambda identity: identity.node_id)
    assert plan_compactions(nodes, heard, {spared.node_id: 3}) == {}


def test_a_target_is_heard_stays_and_is_no_gone_node_itself() -> None:
    heard = sessions({2, 3}, {1}, granted=frozenset({5}))
    heard.heartbeat(2, 5, 60_000, wants_shutdown=True)
    nodes = [left(1), node(2), node(3, failover=True), node(4, supervised=False), node(5)]
    assert plan_compactions(nodes, heard, {1: 2}) == {}


@pytest.mark.parametrize("seed", seeds(10, slow=20))
def test_plans_are_complete_spread_and_stable(seed: int) -> None:
    rng = random.Random(seed)
    ids = range(1_000, 1_000 + rng.randrange(2, 40))
    gone = {node_id for node_id in ids if rng.random() < 0.5}
    active = set(ids) - gone
    nodes = [left(node_id) for node_id in ids]
    heard = sessions(active, gone)

    plan = plan_compactions(nodes, heard, {})

    where = f"seed {seed}"
    share = -(-len(gone) // len(active)) if active else 0
    assert set(plan) == (gone if active else set()), where
    assert set(plan.values()) <= active, where
    assert all(list(plan.values()).count(target) <= share for target in active), where
    assert plan_compactions(nodes, heard, plan) == plan, where
    assert plan_compactions(nodes, sessions(active, gone), {}) == plan, f"{where}: another leader"

    silent = set(rng.sample(sorted(active), min(len(active), 1)))
    after = plan_compactions(nodes, sessions(active - silent, gone), plan)
    kept = {n for n, target in plan.items() if target not in silent and len(active) > 1}
    assert all(after[node_id] == plan[node_id] for node_id in kept), f"{where}: moved for nothing"

    back = set(rng.sample(sorted(gone), min(len(gone), 2)))
    after = plan_compactions(nodes, sessions(active | back, gone - back), plan)
    share = -(-len(gone - back) // len(active | back))
    for target in active:
        before = [n for n, other in plan.items() if other == target and n not in back]
        moved = [n for n in before if after[n] != target]
        assert len(moved) == max(0, len(before) - share), f"{where}: {target}"


class Compacting(Cluster):
    """A cluster whose node A left one set object behind."""

    async def start(self) -> Self:
        await super().start()
        self.left = await self.commit_set_object()
        await self.run_for(2_000, A, B, C)
        return self

    async def leave(self) -> None:
        await self.close(A)
        await self.world.write(requests.UnregisterNode(node=A))

    async def told(self, *alive: NodeIdentity) -> dict[int, tuple[NodeIdentity, ...]]:
        """Return what each is told to compact, and check that the description says the same."""
        answers = {identity.node_id: (await self.beat(identity)).compactions for identity in alive}
        for described in read_nodes(self.world.controller):
            target = self.heartbeats.compacted_by(described.node_id)
            told = [
                t for t, gone in answers.items() if described.node_id in {n.node_id for n in gone}
            ]
            assert told == ([target] if target in answers else []), described.node_id
        return {target: gone for target, gone in answers.items() if gone}

    async def compact(self, writer: NodeIdentity, owner: NodeIdentity = A) -> Any:
        """Compact what A left into a stream object, in its name, with an id of `writer`."""
        _, error = await self.world.commit(
            {self.stream_id: (0, 10)},
            as_stream_object=True,
            writer=writer,
            node=owner,
            compacted_object_ids=column([self.left]),
            failover=writer != owner,
        )
        return error


@pytest.fixture
async def cluster() -> Compacting:
    return await Compacting().start()


async def test_a_departed_node_is_compacted_for_until_it_is_forgotten(cluster: Compacting) -> None:
    await cluster.leave()
    await cluster.run_for(TIMEOUT_MS + 1_000, B)
    assert await cluster.told(B) == {B.node_id: (A,)}

    assert await cluster.compact(B) is ErrorCode.NONE
    assert read_nodes(cluster.world.controller, (A.node_id,)) == ()
    await cluster.run_for(1_000, B)
    assert await cluster.told(B) == {}


async def test_a_silent_node_is_compacted_for_only_after_its_recovery(cluster: Compacting) -> None:
    await cluster.run_for(2 * TIMEOUT_MS, B)
    assert cluster.recovered_by() == {A.node_id: B.node_id}
    assert await cluster.told(B) == {}
    await cluster.world.write(requests.GetOpeningStreams(node=A, failover=True))
    await cluster.run_for(2_000, B)
    assert await cluster.told(B) == {}

    await cluster.close(A)
    await cluster.run_for(1_000, B)
    assert cluster.recovered_by() == {}
    assert await cluster.told(B) == {B.node_id: (A,)}
    assert await cluster.compact(B) is ErrorCode.NONE


async def test_a_node_that_is_heard_again_compacts_for_itself(cluster: Compacting) -> None:
    await cluster.close(A)
    await cluster.run_for(2 * TIMEOUT_MS, B)
    assert await cluster.told(B) == {B.node_id: (A,)}
    await cluster.run_for(1_000, A, B)
    assert await cluster.told(A, B) == {}
    assert await cluster.compact(A) is ErrorCode.NONE


async def test_a_new_process_gets_its_own_back_and_others_are_refused(cluster: Compacting) -> None:
    await cluster.leave()
    await cluster.run_for(TIMEOUT_MS + 1_000, B)
    assert await cluster.told(B) == {B.node_id: (A,)}

    await cluster.world.write(requests.RegisterNode(node=A2))
    assert await cluster.compact(B) is ErrorCode.NODE_EPOCH_EXPIRED
    await cluster.run_for(1_000, B)
    assert await cluster.told(B) == {}
    assert await cluster.compact(A2, A2) is ErrorCode.NONE


async def test_a_locked_nodes_objects_wait_for_it(cluster: Compacting) -> None:
    await cluster.close(A)
    await cluster.world.write(requests.SetNodeLock(node_id=A.node_id, locked=True))
    await cluster.run_for(2 * TIMEOUT_MS, B)
    assert await cluster.told(B) == {}
    await cluster.world.write(requests.SetNodeLock(node_id=A.node_id, locked=False))
    await cluster.run_for(1_000, B)
    assert await cluster.told(B) == {B.node_id: (A,)}


async def test_a_new_leader_hears_who_is_there_and_plans_the_same(cluster: Compacting) -> None:
    await cluster.leave()
    await cluster.run_for(TIMEOUT_MS + 1_000, B, C)
    before = await cluster.told(B, C)
    assert [gone for _, gone in sorted(before.items())] == [(A,)]
    end = cluster.world.log.next_offset

    await cluster.change_leader()
    await cluster.run_for(TIMEOUT_MS, B, C)
    assert await cluster.told(B, C) == {}
    await cluster.run_for(2_000, B, C)
    assert await cluster.told(B, C) == before
    assert cluster.world.log.next_offset <= end + 1, "only the leader's own entry is written"

    (target,) = before
    other = C if target == B.node_id else B
    await cluster.run_for(2 * TIMEOUT_MS, other)
    assert await cluster.told(other) == {other.node_id: (A,)}

    cluster.world.log.lose_leadership(truncate=False)
    assert cluster.heartbeats.compacted_by(A.node_id) == -1
