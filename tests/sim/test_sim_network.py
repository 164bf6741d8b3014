"""The simulated network does to messages what it is told to; the event loop goes in order."""

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest

from streammeta.controller.errors import NotLeaderError
from streammeta.controller.ids import ClusterId, NodeId
from streammeta.controller.quorum import messages
from streammeta.controller.quorum.voters import ReplicaKey
from tests.quorum.peer_messages import ASK, GOOD
from tests.sim.sim_network import ONE_WAY_SHAPES, SHAPES, Network, two_way
from tests.sim.sim_node import SimNode
from tests.sim.sim_profiles import CALM, Profile
from tests.sim.sim_time import Timeline
from tests.sim.sim_world import World

NODES = [0, 1, 2, 3, 4]


def request(source: int, target: int) -> messages.Message:
    here, there = ReplicaKey(NodeId(source)), ReplicaKey(NodeId(target))
    header = replace(ASK, cluster_id=ClusterId("sim"), sender=here, receiver=there)
    return messages.BeginQuorumEpochRequest(header=header)


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


def test_requests_and_answers_are_lost_apart() -> None:
    fixture = Fixture(replace(CALM, lose_answer=1.0))
    answer = messages.BeginQuorumEpochResponse(
        header=replace(GOOD, sender=NodeId(1), receiver=NodeId(0))
    )
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


@pytest.mark.parametrize("kind", SHAPES)
def test_shapes_of_partitions_cut_both_directions(kind: str) -> None:
    for seed in range(20):
        cut = SHAPES[kind](NODES, random.Random(seed))
        assert cut == two_way(cut)
        assert all(a != b for a, b in cut)


@pytest.mark.parametrize("kind", ONE_WAY_SHAPES)
def test_one_way_cuts_leave_the_other_way_open(kind: str) -> None:
    for seed in range(20):
        cut = {(a, b) for a, b in ONE_WAY_SHAPES[kind](NODES, random.Random(seed)) if a != b}
        assert not cut & {(b, a) for a, b in cut}


class Calm:
    """One node of a calm world, in which nothing else happens."""

    def __init__(self) -> None:
        self.world = World(1, "calm")
        self.node: SimNode = self.world.nodes[0]
        self.node.start()
        self.seen: list[Any] = []

    def begin(self, call: Coroutine[Any, Any, Any]) -> None:
        def create() -> None:
            self.node.loop.create_task(call)

        self.world.act(self.node, create)

    def run(self, for_ms: int) -> None:
        self.world.timeline.run_until(lambda: False, for_ms)


@pytest.fixture
def calm() -> Iterator[Calm]:
    calm = Calm()
    yield calm
    calm.world.close()


def test_nothing_of_a_life_happens_after_its_crash(calm: Calm) -> None:
    async def call() -> None:
        try:
            await asyncio.sleep(0.01)
            calm.seen.append("still there")
        finally:
            calm.seen.append("closed")

    async def never_begun() -> None:
        calm.seen.append("begun")

    calm.begin(call())
    calm.run(3)
    calm.begin(never_begun())
    calm.node.crash(power=False)
    calm.run(100)
    assert calm.seen == ["closed"]


def test_errors_of_the_product_are_answers_and_all_others_end_the_run(calm: Calm) -> None:
    async def fail(error: Exception) -> None:
        raise error

    calm.begin(fail(NotLeaderError()))
    calm.run(5)
    calm.begin(fail(KeyError("a defect")))
    with pytest.raises(KeyError):
        calm.run(5)
