"""The simulated network does to messages what it is told to; the event loop goes in order."""

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest

from streammeta.controller.errors import NotLeaderError
from streammeta.controller.ids import ClusterId, NodeId, SnapshotId
from streammeta.controller.quorum import messages
from streammeta.controller.quorum.voters import ReplicaKey
from tests.quorum.peer_messages import ASK, GOOD
from tests.sim.sim_network import ONE_WAY_SHAPES, SHAPES, Link, Network, two_way
from tests.sim.sim_node import SimNode
from tests.sim.sim_profiles import CALM, Profile
from tests.sim.sim_time import Timeline
from tests.sim.sim_world import World

NODES = [0, 1, 2, 3, 4]


def request(source: int, target: int) -> messages.Message:
    here, there = ReplicaKey(NodeId(source)), ReplicaKey(NodeId(target))
    header = replace(ASK, cluster_id=ClusterId("sim"), sender=here, receiver=there)
    return messages.BeginQuorumEpochRequest(header=header)


def response_header(source: int, target: int) -> messages.ResponseHeader:
    return replace(GOOD, sender=NodeId(source), receiver=NodeId(target))


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


def test_calls_made_in_a_turn_are_carried_out_in_order_in_the_next(calm: Calm) -> None:
    async def call(name: str) -> None:
        calm.seen.append(name)
        await asyncio.sleep(0)
        calm.seen.append(name)

    calm.begin(call("a"))
    calm.begin(call("b"))
    assert calm.seen == []
    calm.run(5)
    assert calm.seen == ["a", "b", "a", "b"]


def test_timers_go_by_the_clock_of_the_node(calm: Calm) -> None:
    async def wait() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.sleep(0.1)
        calm.seen.append(round((loop.time() - began) * 1000))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await loop.create_future()
        calm.seen.append(round((loop.time() - began) * 1000))

    calm.begin(wait())
    calm.run(99)
    assert calm.seen == []
    calm.run(300)
    first, second = calm.seen
    assert 100 <= first <= 102
    assert 150 <= second <= 155


def test_a_paused_node_goes_on_when_it_wakes_up(calm: Calm) -> None:
    async def call() -> None:
        calm.seen.append(calm.world.timeline.now)

    calm.begin(call())
    calm.world.pause(calm.node, 50)
    calm.run(100)
    assert calm.seen == [50]


def test_a_thread_is_a_step_some_time_later(calm: Calm) -> None:
    async def call() -> None:
        began = calm.world.timeline.now
        calm.seen.append(await asyncio.to_thread(lambda: "done"))
        calm.seen.append(calm.world.timeline.now > began)

    calm.begin(call())
    calm.run(1000)
    assert calm.seen == ["done", True]


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


def test_no_loop_is_left_running(calm: Calm) -> None:
    calm.run(50)
    calm.world.close()
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()
