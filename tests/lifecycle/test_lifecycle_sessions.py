"""Silence fences a node, and only a node: never all because the leader slept."""

import random

import pytest

from streammeta.controller.lifecycle.broker_sessions import (
    DOUBT_TIMEOUTS,
    SHORTEST_MS,
    SHUTDOWN_GRACE_MS,
    Heard,
    NodeState,
    Sessions,
    SupervisedNode,
)
from tests.kit.seeds import seeds

TIMEOUT_MS = 9_000
A, B, C = 1001, 1002, 1003
NODES = tuple(SupervisedNode(node_id, 1) for node_id in (A, B, C))


class Reign:
    """Sessions under a leader whose loop ticks every second, and brokers that may be heard."""

    def __init__(self, nodes: tuple[SupervisedNode, ...] = NODES) -> None:
        self.sessions = Sessions(TIMEOUT_MS)
        self.nodes = nodes
        self.now_ms = 50
        self.sessions.lead(self.now_ms)

    def run(self, duration_ms: int, heard: tuple[int, ...] = ()) -> list[int]:
        """Let time pass, a tick and a heartbeat of `heard` a second; return the fenced."""
        fenced: list[int] = []
        for _ in range(duration_ms // 1_000):
            self.now_ms += 1_000
            for node_id in heard:
                self.sessions.heartbeat(node_id, self.epoch(node_id), self.now_ms)
            fenced += self.sessions.tick(self.now_ms, self.nodes)
        return fenced

    def epoch(self, node_id: int) -> int:
        return next(node.node_epoch for node in self.nodes if node.node_id == node_id)

    def states(self) -> list[NodeState]:
        return [self.sessions.state(node_id) for node_id in (A, B, C)]


def test_a_silent_node_is_fenced_after_the_timeout_and_comes_back_when_heard() -> None:
    reign = Reign()
    reign.run(5_000, (A, B, C))
    assert reign.run(TIMEOUT_MS, (A, B)) == []
    assert reign.run(1_000, (A, B)) == [C]
    assert reign.states() == [NodeState.ACTIVE, NodeState.ACTIVE, NodeState.FENCED]
    assert reign.run(60_000, (A, B)) == []

    reign.run(1_000, (A, B, C))

    assert reign.states() == [NodeState.ACTIVE] * 3


def test_a_new_leader_grants_every_supervised_node_a_whole_session() -> None:
    reign = Reign()
    reign.run(20_000, (A, B))
    assert reign.sessions.state(C) is NodeState.FENCED

    reign.sessions.resign()
    assert reign.states() == [NodeState.UNKNOWN] * 3
    reign.sessions.lead(reign.now_ms)

    assert reign.run(TIMEOUT_MS, (A, B)) == []
    assert reign.sessions.state(C) is NodeState.ACTIVE
    assert not reign.sessions.is_heard(C)
    assert reign.run(2_000, (A, B)) == [C]


def test_when_nobody_is_heard_the_leader_doubts_itself_until_one_is() -> None:
    reign = Reign()
    reign.run(5_000, (A, B, C))
    assert reign.run(2 * TIMEOUT_MS) == []
    assert reign.sessions.is_in_doubt
    assert reign.states() == [NodeState.ACTIVE] * 3

    assert reign.run(1_000, (A,)) == []
    assert not reign.sessions.is_in_doubt
    # The path works again: the others have a whole session from here on, and no more.
    assert reign.run(TIMEOUT_MS - 1_000, (A,)) == []
    assert reign.run(2_000, (A,)) == [B, C]


@pytest.mark.parametrize("last", [(NODES[0],), NODES])
def test_nodes_that_are_really_dead_are_fenced_in_the_end(last: tuple[SupervisedNode, ...]) -> None:
    reign = Reign(last)
    reign.run(5_000, tuple(node.node_id for node in last))
    believed_ms = (1 + DOUBT_TIMEOUTS) * TIMEOUT_MS
    assert reign.run(believed_ms) == []
    assert reign.run(3_000) == [node.node_id for node in last]
    assert not reign.sessions.is_in_doubt


def test_the_heartbeat_of_a_fenced_node_ends_the_doubt() -> None:
    reign = Reign(NODES[:2])
    assert reign.run(12_000, (A,)) == [B]
    reign.run(2 * TIMEOUT_MS)
    assert reign.sessions.is_in_doubt

    assert reign.run(TIMEOUT_MS, (B,)) == []
    assert reign.run(3_000, (B,)) == [A]


def test_a_new_process_has_a_whole_session_to_be_heard() -> None:
    reign = Reign()
    assert reign.run(12_000, (A, B)) == [C]

    reign.nodes = (*NODES[:2], SupervisedNode(C, 2))
    assert reign.run(TIMEOUT_MS, (A, B)) == []
    assert reign.sessions.state(C) is NodeState.ACTIVE
    assert not reign.sessions.is_heard(C)
    assert reign.run(2_000, (A, B)) == [C]


def test_a_node_that_is_gone_from_the_map_is_forgotten() -> None:
    reign = Reign()
    reign.run(2_000, (A, B, C))
    reign.nodes = NODES[:2]
    reign.run(1_000, (A, B))
    assert reign.sessions.state(C) is NodeState.UNKNOWN


def leave(reign: Reign, node_id: int) -> None:
    reign.sessions.heartbeat(node_id, 1, reign.now_ms, wants_shutdown=True)


def test_a_leaving_node_may_be_silent_for_the_grace_time() -> None:
    reign = Reign()
    reign.run(5_000, (A, B, C))
    leave(reign, C)
    assert reign.run(SHUTDOWN_GRACE_MS, (A, B)) == []
    assert reign.sessions.state(C) is NodeState.CONTROLLED_SHUTDOWN
    assert reign.run(1_000, (A, B)) == [C]


def test_a_leaving_node_that_takes_its_time_is_not_fenced_and_may_stay_after_all() -> None:
    reign = Reign()
    for _ in range(100):
        leave(reign, C)
        assert reign.run(1_000, (A, B)) == []
    assert reign.sessions.state(C) is NodeState.CONTROLLED_SHUTDOWN

    reign.run(1_000, (A, B, C))

    assert reign.sessions.state(C) is NodeState.ACTIVE


def test_the_tick_is_often_enough_that_it_is_no_stall() -> None:
    for timeout_ms in (1, 50, 300, 2_000, 9_000, 600_000):
        sessions = Sessions(timeout_ms)
        sessions.lead(0)
        sessions.heartbeat(A, 1, 0)
        sessions.heartbeat(B, 1, 0)
        fenced: tuple[int, ...] = ()
        now_ms = 0
        while not fenced:
            now_ms += sessions.tick_ms
            sessions.heartbeat(A, 1, now_ms)
            fenced = sessions.tick(now_ms, NODES[:2])
            assert now_ms <= timeout_ms + 2 * sessions.tick_ms, timeout_ms
        assert fenced == (B,)


@pytest.mark.parametrize("seed", seeds(6, slow=14))
def test_whatever_happens_heard_nodes_are_not_fenced_and_dead_ones_are(seed: int) -> None:
    """Random ticks, stalls, deaths, reigns: fencing only after a timeout of silence as observed."""
    rng = random.Random(seed)
    reign = Reign()
    sessions = reign.sessions
    dead: set[int] = set()
    heard_ms = dict.fromkeys((A, B, C), reign.now_ms)
    for _ in range(2_000):
        step_ms = 30_000 if rng.random() < 0.01 else rng.randrange(200, 1_200)
        reign.now_ms += step_ms
        for node_id in (A, B, C):
            if node_id not in dead and rng.random() < 0.7:
                sessions.heartbeat(node_id, 1, reign.now_ms)
                heard_ms[node_id] = reign.now_ms
        for node_id in sessions.tick(reign.now_ms, NODES):
            silent_ms = reign.now_ms - heard_ms[node_id]
            assert silent_ms > TIMEOUT_MS, f"seed {seed}: {node_id} fenced after {silent_ms} ms"
            assert step_ms < 30_000, f"seed {seed}: fenced by a leader that stood still"
        chance = rng.random()
        if chance < 0.01:
            dead = {node_id for node_id in (A, B, C) if rng.random() < 0.5}
        elif chance < 0.015:
            sessions.resign()
            sessions.lead(reign.now_ms)
            heard_ms = dict.fromkeys((A, B, C), reign.now_ms)
    dead = {B, C} if seed % 2 else {A, B, C}
    alive = tuple({A, B, C} - dead)
    reign.run((2 + DOUBT_TIMEOUTS) * TIMEOUT_MS + 5_000, alive)
    gone = {node_id for node_id in dead if sessions.state(node_id) is NodeState.FENCED}
    assert gone == dead, f"seed {seed}"


def test_a_node_that_asks_for_a_shorter_session_is_fenced_sooner() -> None:
    sessions = Sessions(TIMEOUT_MS)
    sessions.lead(0)
    for node_id, wanted_ms in ((A, 0), (B, SHORTEST_MS), (C, 10 * TIMEOUT_MS)):
        sessions.heartbeat(node_id, 1, 0, wanted_ms=wanted_ms)
    fenced = {
        node_id: now_ms
        for now_ms in range(0, 2 * TIMEOUT_MS, 100)
        for node_id in _after_a_beat_of(A, sessions, now_ms)
    }
    assert fenced == {B: SHORTEST_MS + 100, C: TIMEOUT_MS + 100}


def _after_a_beat_of(node_id: int, sessions: Sessions, now_ms: int) -> tuple[int, ...]:
    sessions.heartbeat(node_id, 1, now_ms)
    return sessions.tick(now_ms, NODES)


def test_the_session_that_is_granted_lies_between_the_shortest_and_the_controllers_own() -> None:
    sessions = Sessions(TIMEOUT_MS)
    wanted = (0, 1, SHORTEST_MS, 5_000, TIMEOUT_MS + 1)
    granted = [SHORTEST_MS, SHORTEST_MS, 5_000, TIMEOUT_MS]
    assert [sessions.granted_ms(node_id) for node_id in wanted] == [TIMEOUT_MS, *granted]
    assert Sessions(500).granted_ms(SHORTEST_MS) == 500


def test_ticks_come_often_enough_for_the_shortest_session() -> None:
    sessions = Sessions(TIMEOUT_MS)
    sessions.lead(0)
    before = sessions.tick_ms
    sessions.heartbeat(A, 1, 0, wanted_ms=SHORTEST_MS)
    assert sessions.tick_ms == SHORTEST_MS // 9
    sessions.heartbeat(A, 1, 0)
    assert sessions.tick_ms == before == 1_000


def test_a_stall_of_the_leader_renews_the_short_sessions_that_it_may_have_silenced() -> None:
    sessions = Sessions(TIMEOUT_MS)
    sessions.lead(0)
    sessions.heartbeat(A, 1, 0)
    sessions.heartbeat(B, 1, 0, wanted_ms=SHORTEST_MS)
    assert sessions.tick(SHORTEST_MS + 100, NODES) == ()
    assert sessions.state(B) is NodeState.ACTIVE
    for now_ms in range(SHORTEST_MS + 200, 2 * SHORTEST_MS + 100, 100):
        assert sessions.tick(now_ms, NODES) == ()
    assert sessions.tick(2 * SHORTEST_MS + 200, NODES) == (B,)


def test_a_restarted_node_keeps_the_session_it_asked_for_until_it_is_heard() -> None:
    sessions = Sessions(TIMEOUT_MS)
    sessions.lead(0)
    sessions.heartbeat(B, 1, 0, wanted_ms=SHORTEST_MS)
    newer = (SupervisedNode(B, 2),)
    fenced = [
        (now_ms, node_id)
        for now_ms in range(100, TIMEOUT_MS, 100)
        for node_id in _heard_by_another(sessions, now_ms, newer)
    ]
    assert fenced == [(SHORTEST_MS + 200, B)]


def _heard_by_another(
    sessions: Sessions, now_ms: int, nodes: tuple[SupervisedNode, ...]
) -> tuple[int, ...]:
    sessions.heartbeat(A, 1, now_ms)
    return sessions.tick(now_ms, (SupervisedNode(A, 1), *nodes))


def test_a_node_that_closed_is_fenced_as_any_other_and_told_apart() -> None:
    reign = Reign()
    reign.run(5_000, (A, B, C))
    reign.sessions.heartbeat(C, 1, reign.now_ms, closes=True)
    assert reign.run(TIMEOUT_MS + 1_000, (A, B)) == [C]
    assert reign.sessions.state(C) is NodeState.FENCED
    assert reign.sessions.counts() == {NodeState.ACTIVE: 2, NodeState.CONTROLLED_SHUTDOWN: 1}
    closed, heard = reign.sessions.heard(C), reign.sessions.heard(A)
    assert closed is not None
    assert heard is not None
    assert (closed.has_closed, closed.is_exact, heard.has_closed) == (True, True, False)
    assert closed.age_ms > TIMEOUT_MS > heard.age_ms
    reign.sessions.heartbeat(C, 1, reign.now_ms)
    assert reign.sessions.heard(C) == Heard(0, is_exact=True, has_closed=False)


def test_a_node_that_was_not_heard_in_this_term_has_no_exact_time() -> None:
    reign = Reign()
    reign.run(2_000, (A, B))
    heard = reign.sessions.heard(C)
    assert heard is not None
    assert not heard.is_exact
    assert reign.sessions.heard(99) is None
