"""Who is to recover whose data: deterministic, bounded per target, stable while it can go on."""

import random
from dataclasses import replace

import pytest

from streammeta.controller.lifecycle.assignments import NOBODY, plan_recoveries
from streammeta.controller.lifecycle.sessions import NodeState, Sessions, SupervisedNode
from streammeta.controller.metadata.answers import NodeDescription
from streammeta.controller.metadata.requests import RecoveryTarget

TIMEOUT_MS = 9_000


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
    assert {one for one in active | fenced if made.state(one) is NodeState.FENCED} == fenced
    return made


def test_a_fenced_node_that_owes_something_is_recovered_by_an_active_one() -> None:
    heard = sessions({2, 3}, {1})
    assert plan_recoveries([node(1, owes=True), node(2), node(3)], heard, 1) == (
        RecoveryTarget(1, 5, 2),
    )
    pending = node(1, pending_upload_count=3)
    assert plan_recoveries([pending, node(2), node(3)], heard, 1) == (RecoveryTarget(1, 5, 2),)


@pytest.mark.parametrize(
    "spared",
    [
        node(1),
        node(1, owes=True, locked=True),
        node(1, owes=True, recovered_by=2),
        node(1, departed=True),
    ],
    ids=["owes nothing", "locked", "assigned", "departed"],
)
def test_nothing_changes_for(spared: NodeDescription) -> None:
    assert plan_recoveries([spared, node(2), node(3)], sessions({2, 3}, {1}), 1) == ()


def test_a_node_that_never_sent_a_heartbeat_is_neither_recovered_nor_a_target() -> None:
    unknown = node(2, owes=True, supervised=False)
    assert plan_recoveries([node(1, owes=True), unknown], sessions(set(), {1}), 1) == ()


def test_a_target_that_is_not_active_any_more_is_replaced() -> None:
    nodes = [node(1, owes=True, recovered_by=2), node(2), node(3)]
    assert plan_recoveries(nodes, sessions({3}, {1, 2}), 1) == (RecoveryTarget(1, 5, 3),)
    assert plan_recoveries(nodes, sessions(set(), {1, 2, 3}), 1) == (RecoveryTarget(1, 5, NOBODY),)


def test_a_leaving_target_is_replaced() -> None:
    heard = sessions({2, 3}, {1})
    heard.heartbeat(2, 5, 6 * TIMEOUT_MS, wants_shutdown=True)
    nodes = [node(1, owes=True, recovered_by=2), node(2), node(3)]
    assert plan_recoveries(nodes, heard, 1) == (RecoveryTarget(1, 5, 3),)


@pytest.mark.parametrize(
    "over",
    [
        node(1, recovered_by=2),
        node(1, owes=True, locked=True, recovered_by=2),
    ],
    ids=["nothing left", "locked"],
)
def test_an_assignment_that_is_over_ends(over: NodeDescription) -> None:
    nodes = [over, node(2)]
    assert plan_recoveries(nodes, sessions({2}, {1}), 1) == (RecoveryTarget(1, 5, NOBODY),)


def test_a_node_that_is_heard_again_keeps_its_data() -> None:
    nodes = [node(1, owes=True, recovered_by=2), node(2)]
    assert plan_recoveries(nodes, sessions({1, 2}, set()), 1) == (RecoveryTarget(1, 5, NOBODY),)


def test_a_new_leader_lets_recoveries_go_on() -> None:
    """Its granted sessions say nothing: the process is silent, or fenced by its recovery."""
    granted = sessions({2, 3}, set(), granted=frozenset({1}))
    assert granted.state(1) is NodeState.ACTIVE
    for begun in (
        node(1, owes=True, recovered_by=2),
        node(1, owes=True, recovered_by=2, failover=True),
    ):
        assert plan_recoveries([begun, node(2), node(3)], granted, 1) == ()
    assert plan_recoveries([node(1, owes=True), node(2), node(3)], granted, 1) == ()
    orphaned = node(1, owes=True, failover=True)
    assert plan_recoveries([orphaned, node(2), node(3)], granted, 1) == (RecoveryTarget(1, 5, 2),)


def test_several_are_recovered_at_once_spread_and_bounded() -> None:
    nodes = [node(i, owes=i <= 5) for i in range(1, 9)]
    heard = sessions({6, 7, 8}, {1, 2, 3, 4, 5})
    assert [change.target_id for change in plan_recoveries(nodes, heard, 1)] == [6, 7, 8]
    assert [change.target_id for change in plan_recoveries(nodes, heard, 2)] == [6, 7, 8, 6, 7]


@pytest.mark.parametrize("seed", range(30))
def test_plans_are_complete_bounded_and_final(seed: int) -> None:
    """After a plan is carried out: nothing more changes, nobody is overloaded, nobody idles."""
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
            recovered_by=rng.choice([NOBODY, NOBODY, *ids]),
        )
        for node_id in ids
    ]
    nodes = [replace(n, recovered_by=NOBODY if n.recovered_by == n.node_id else n.recovered_by)
             for n in nodes]  # fmt: skip
    heard = sessions(active, fenced)

    changes = {c.node_id: c.target_id for c in plan_recoveries(nodes, heard, per_target)}
    after = [replace(n, recovered_by=changes.get(n.node_id, n.recovered_by)) for n in nodes]

    failed = {
        n.node_id for n in after if n.node_id in fenced and n.has_opening_streams and not n.locked
    }
    assigned = {n.node_id: n.recovered_by for n in after if n.recovered_by != NOBODY}
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
