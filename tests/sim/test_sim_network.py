"""The simulated network does to messages what it is told to, and counts it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from streammeta.controller.ids import ClusterId, Epoch, NodeId, SnapshotId
from streammeta.controller.quorum import messages
from streammeta.controller.quorum.voters import ReplicaKey
from tests.sim.sim_network import ONE_WAY_SHAPES, SHAPES, Link, Network, two_way
from tests.sim.sim_profiles import CALM, Profile
from tests.sim.sim_time import Timeline

NODES = [0, 1, 2, 3, 4]


def request(source: int, target: int) -> messages.Message:
    return messages.BeginQuorumEpochRequest(
        header=messages.RequestHeader(
            cluster_id=ClusterId("sim"),
            sender=ReplicaKey(NodeId(source)),
            receiver=ReplicaKey(NodeId(target)),
            epoch=Epoch(1),
            incarnation=1,
            request_id=1,
        )
    )


def response_header(source: int, target: int) -> messages.ResponseHeader:
    return messages.ResponseHeader(
        sender=NodeId(source),
        receiver=NodeId(target),
        epoch=Epoch(1),
        leader_id=None,
        error=messages.QuorumError.NONE,
        incarnation=1,
        request_id=1,
    )


class Fixture:
    """A network whose ends are lists."""

    def __init__(self, profile: Profile = CALM, seed: int = 0) -> None:
        self.timeline = Timeline()
        self.arrived: list[tuple[int, messages.Message]] = []
        self.lost: list[messages.Message] = []
        self.counts: Counter[str] = Counter()
        self.network = Network(
            self.timeline,
            random.Random(seed),
            profile,
            self.counts,
            lambda message: self.arrived.append((self.timeline.now, message)),
            self.lost.append,
        )

    def settle(self, within_ms: int = 100_000) -> list[messages.Message]:
        self.timeline.run_until(lambda: False, within_ms)
        return [message for _, message in self.arrived]


def test_a_calm_network_delivers_each_message_once() -> None:
    fixture = Fixture()
    sent = [request(0, 1), request(1, 0)]
    for message in sent:
        fixture.network.send(message)
    assert sorted(map(str, fixture.settle())) == sorted(map(str, sent))


def test_requests_and_answers_are_lost_apart() -> None:
    fixture = Fixture(replace(CALM, lose_answer=1.0))
    answer = messages.BeginQuorumEpochResponse(header=response_header(1, 0))
    asked = request(0, 1)
    for message in (asked, answer) * 20:
        fixture.network.send(message)
    assert fixture.settle() == [asked] * 20
    assert fixture.counts["answers lost"] == 20
    # Some askers are told that no answer will come, others must find out.
    assert 0 < len(fixture.lost) < 20


def test_messages_are_doubled_and_delayed_beyond_later_ones() -> None:
    doubling = Fixture(replace(CALM, duplicate=1.0))
    doubling.network.send(request(0, 1))
    assert len(doubling.settle()) == 2
    delaying = Fixture(replace(CALM, delay=0.5))
    sent = [request(0, target) for target in range(30)]
    for message in sent:
        delaying.network.send(message)
    assert delaying.settle() != sent


def test_a_link_that_is_held_up_delivers_late_what_is_sent_over_it_in_that_time() -> None:
    fixture = Fixture()
    fixture.network.hold_up([(0, 1)], by_ms=300, for_ms=500)
    for source, target in ((0, 1), (1, 0)):
        fixture.network.send(request(source, target))
    fixture.settle(500)
    fixture.network.send(request(0, 1))
    fixture.settle(50)
    (unharmed, held_up, later) = (at for at, _ in fixture.arrived)
    assert (unharmed <= 10, held_up > 300, later <= 520) == (True, True, True)


def test_a_cut_blocks_its_direction_only_and_only_for_its_time() -> None:
    fixture = Fixture()
    fixture.network.cut({(0, 1)}, 500)
    fixture.network.send(request(0, 1))
    fixture.network.send(request(1, 0))
    assert fixture.settle(600) == [request(1, 0)]
    fixture.network.send(request(0, 1))
    assert fixture.settle()[1:] == [request(0, 1)]


def test_overlapping_cuts_heal_one_by_one() -> None:
    fixture = Fixture()
    fixture.network.cut({(0, 1)}, 10)
    fixture.network.cut({(0, 1), (0, 2)}, None)
    fixture.timeline.run_until(lambda: False, 50)
    fixture.network.send(request(0, 1))
    assert fixture.settle() == []
    fixture.network.calm_down(CALM)
    fixture.network.send(request(0, 1))
    assert fixture.settle() == [request(0, 1)]


def test_old_messages_come_back_at_times_as_those_of_another_cluster() -> None:
    fixture = Fixture()
    fixture.network.replay()  # there is none yet
    fixture.network.send(request(0, 1))
    fixture.settle()
    for _ in range(60):
        fixture.network.replay()
    clusters = Counter(
        message.header.cluster_id
        for _, message in fixture.arrived
        if isinstance(message.header, messages.RequestHeader)
    )
    assert len(fixture.arrived) == clusters.total() == 61
    assert clusters["sim"] > clusters["another"] > 0  # type: ignore[index]


def test_a_slow_link_delays_a_snapshot_by_its_size() -> None:
    fixture = Fixture()
    fixture.network.slow_down({(0, 1)}, 100_000)
    chunk = messages.FetchSnapshotResponse(
        header=response_header(0, 1),
        snapshot_id=SnapshotId(0, 0),  # type: ignore[arg-type]
        data=bytes(4000),
    )
    fixture.network.send(chunk)
    fixture.settle()
    assert fixture.arrived[0][0] >= 1000


def reachable(start: int, cut: set[Link]) -> set[int]:
    found, ahead = {start}, [start]
    while ahead:
        node = ahead.pop()
        for other in NODES:
            both = {(node, other), (other, node)}
            if other not in found and not both & cut:
                found.add(other)
                ahead.append(other)
    return found


@pytest.mark.parametrize("kind", SHAPES)
def test_shapes_of_partitions_cut_both_directions(kind: str) -> None:
    for seed in range(20):
        cut = SHAPES[kind](NODES, random.Random(seed))
        assert cut == two_way(cut)
        assert all(a != b for a, b in cut)


def test_bridges_rings_and_rivals_leave_everyone_reachable_through_others() -> None:
    for kind in ("bridge", "ring", "chain of rivals"):
        for seed in range(20):
            cut = SHAPES[kind](NODES, random.Random(seed))
            assert reachable(0, cut) == set(NODES), (kind, seed)


def test_rivals_have_the_five_links_of_the_example() -> None:
    cut = SHAPES["chain of rivals"](NODES, random.Random(0))
    assert len(cut) == 5 * 4 - 2 * 5


@pytest.mark.parametrize("kind", ONE_WAY_SHAPES)
def test_one_way_cuts_leave_the_other_way_open(kind: str) -> None:
    for seed in range(20):
        cut = {(a, b) for a, b in ONE_WAY_SHAPES[kind](NODES, random.Random(seed)) if a != b}
        assert not cut & {(b, a) for a, b in cut}
