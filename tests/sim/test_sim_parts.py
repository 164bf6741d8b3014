"""The simulator's own clocks, disks, network, store and ghost work as they should."""

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streammeta.controller.errors import NotLeaderError
from streammeta.controller.ids import ClusterId, EndOffset, Epoch, NodeId, SnapshotId
from streammeta.controller.journal.errors import BadSnapshotError
from streammeta.controller.metadata.api.requests import GetNextNodeId
from streammeta.controller.quorum import messages
from streammeta.controller.quorum.messages import Batch, BatchKind, encode_voters
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from streammeta.controller.records.codec import decode_records, encode_records
from streammeta.controller.runtime.persistence.state_hashes import RollingHash
from tests.linearizability.models import CommitRange, Put
from tests.quorum.peer_messages import ASK, GOOD
from tests.sim.sim_disk import SimDisk, StoppedError
from tests.sim.sim_ghost import Ghost
from tests.sim.sim_map import MAP_KEY, MapWrite
from tests.sim.sim_network import ONE_WAY_SHAPES, SHAPES, Network, two_way
from tests.sim.sim_node import SimNode
from tests.sim.sim_profiles import CALM, Profile
from tests.sim.sim_store import Keyed, Store, StoreImage, decode_image, encode_image, record_of
from tests.sim.sim_time import Timeline, Violation
from tests.sim.sim_world import World

NO_VOTERS = VoterSet()


# -- the store


def decided(store: Store, key: str, request: Any, offset: int) -> object:
    decision = store.decide(Keyed(key, request), 0, offset)
    if decision.records:
        store.apply(offset, decision.records)
    return decision.answer


def image_at(store: Store, end_offset: int, voters: VoterSet = NO_VOTERS) -> StoreImage:
    return store.image(SnapshotId(EndOffset(end_offset), Epoch(1)), voters, b"\1")


def test_undoing_restores_state_and_hash() -> None:
    store = Store()
    decided(store, "k", Put("a"), 0)
    store.forget_undo(1)
    before, digest = image_at(store, 1), store.freeze().digest()
    decided(store, "k", Put("b"), 3)
    decided(store, "s", CommitRange(1, 0, 1), 4)
    assert store.freeze().digest() != digest
    store.undo_to(1)
    assert image_at(store, 1) == before
    assert (store.applied_end_offset, store.freeze().digest()) == (1, digest)
    store.undo_to(0)
    assert image_at(store, 1) == before  # it was committed


def test_a_store_of_an_image_has_the_map() -> None:
    source = Store()
    answer: Any = decided(source, MAP_KEY, MapWrite(GetNextNodeId(request_id="x")), 0)
    assert answer.answer.node_id == source.map.freeze().sections()["counters"]["last_node_id"][0]
    target = Store.of(decode_image(encode_image(image_at(source, 1), random.Random(0))))
    assert target.freeze().digest() == source.freeze().digest()
    source.undo_to(0)
    assert source.freeze().digest() == Store().freeze().digest()


def test_every_flipped_bit_and_every_cut_of_a_snapshot_is_noticed() -> None:
    store = Store()
    decided(store, "k", Put("a"), 0)
    data = encode_image(image_at(store, 1), random.Random(0))
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1
        with pytest.raises(BadSnapshotError):
            decode_image(bytes(flipped))
        with pytest.raises(BadSnapshotError):
            decode_image(data[:position])


# -- the ghost


class Pair:
    """A ghost of two voters, with logs to put batches into."""

    def __init__(self) -> None:
        self.keys = [ReplicaKey(NodeId(node)) for node in range(3)]
        voters = VoterSet(tuple(Voter(key, f"node{key.node_id}:1") for key in self.keys[:2]))
        self.voters = voters
        self.ghost = Ghost(voters)
        for key in self.keys:
            self.ghost.on_new_replica(key, voters)

    def append(self, node: int, batch: Batch, *, durable: bool = True) -> None:
        self.ghost.on_append(self.keys[node], (batch,), 0, None)
        if durable:
            self.ghost.on_durable(self.keys[node], batch.end_offset)

    def commit(self, node: int, end: int, epoch: int = 1) -> None:
        self.ghost.on_commit(self.keys[node], end, epoch, is_leader=True)


def payload(value: str) -> bytes:
    return encode_records([record_of("put", "k", value)])


def data(base: int, epoch: int = 1, value: str = "v") -> Batch:
    return Batch(EndOffset(base), Epoch(epoch), BatchKind.DATA, (payload(value),))


def test_a_commit_needs_a_flushed_majority() -> None:
    pair = Pair()
    pair.append(0, data(0))
    pair.append(1, data(0), durable=False)
    pair.append(2, data(0))  # no voter
    with pytest.raises(Violation, match="flushed on a majority"):
        pair.commit(0, 1)
    pair = Pair()
    pair.append(0, data(0))
    pair.append(1, data(0))
    pair.commit(0, 1)


def test_what_is_committed_stays() -> None:
    pair = Pair()
    for node in (0, 1):
        pair.append(node, data(0))
    pair.commit(0, 1)
    with pytest.raises(Violation, match="never truncated"):
        pair.ghost.on_truncate(pair.keys[1], 0, 1)
    pair.append(2, data(0, 2))
    with pytest.raises(Violation, match="state machine safety"):
        pair.ghost.on_commit(pair.keys[2], 1, 2, is_leader=False)


def test_a_batch_of_an_offset_and_epoch_is_always_the_same() -> None:
    pair = Pair()
    pair.append(0, data(0))
    with pytest.raises(Violation, match="log matching"):
        pair.append(1, data(0, value="other"))


def test_an_epoch_has_one_leader_who_has_what_earlier_ones_committed() -> None:
    pair = Pair()
    pair.ghost.on_leader(pair.keys[0], 1, 1)
    with pytest.raises(Violation, match="election safety"):
        pair.ghost.on_leader(pair.keys[1], 1, 1)
    for node in (0, 1):
        pair.append(node, data(0))
    pair.commit(0, 1)
    pair.ghost.on_elected(pair.keys[1], 2)
    pair.ghost.on_elected(pair.keys[2], 1)  # late, but it owes nothing to its own epoch
    with pytest.raises(Violation, match="leader completeness"):
        pair.ghost.on_elected(pair.keys[2], 2)


@pytest.mark.parametrize(
    ("removed", "committed", "leads_from", "invariant"),
    [
        ([], 1, 0, None),
        ([], 1, 1, "no change before an own batch"),
        ([], 0, 0, "one uncommitted voter set"),
        ([NodeId(0)], 1, 0, "differ by one"),
    ],
)
def test_voter_sets_change_one_by_one_and_only_when_the_last_is_committed(
    removed: list[NodeId], committed: int, leads_from: int, invariant: str | None
) -> None:
    pair = Pair()
    changed = pair.voters.with_voter(Voter(pair.keys[2], "node2:1"))
    for node_id in removed:
        changed = changed.without_node(node_id)

    def change(base: int, voters: VoterSet, committed: int, leads_from: int) -> None:
        batch = Batch(EndOffset(base), Epoch(1), BatchKind.CONTROL, (encode_voters(voters),))
        pair.ghost.on_append(pair.keys[0], (batch,), committed, leads_from)

    change(0, pair.voters, 0, 0)
    with pytest.raises(Violation, match=invariant) if invariant else nullcontext():
        change(1, changed, committed, leads_from)


def test_what_a_ledger_holds_tells_its_past() -> None:
    ledger = Pair().ghost.ledger
    ledger.at(0, data(0, value="a"), 1)
    ledger.at(1, data(2, value="b"), 1)
    assert [ledger.held_at("k", end) for end in (0, 1, 3)] == [None, ("a", 1), ("b", 3)]
    assert ledger.entry_from(1) == (2, payload("b"))
    assert ledger.entry_from(3) is None
    copy, log_hash = Store(), RollingHash()
    copy.apply(0, decode_records(payload("a")))
    log_hash.extend(0, payload("a"))
    ledger.check_state("a replica", 1, copy.hash, log_hash.value)
    with pytest.raises(Violation, match="equal states"):
        ledger.check_state("a replica", 3, copy.hash, log_hash.value)
    log_hash.extend(1, payload("a"))
    with pytest.raises(Violation, match="equal states"):
        ledger.check_state("a replica", 1, copy.hash, log_hash.value)
    with pytest.raises(Violation, match="state ends where a batch does"):
        ledger.check_state("a replica", 2, copy.hash, log_hash.value)


HOME = Path("/home")
FILE = HOME / "file"


def disk_with(data: bytes) -> SimDisk:
    disk = SimDisk()
    file = disk.open(FILE, create=True)
    file.write(0, data)
    file.sync()
    disk.sync_directory(HOME)
    return disk


def content(disk: SimDisk, path: Path = FILE) -> bytes:
    file = disk.open(path)
    return file.read(0, file.size())


def outcomes(change: bytes, *, seeds: int = 300) -> set[bytes]:
    """What power failures leave of b"old" with `change` written behind it and not synced."""
    left = set()
    for seed in range(seeds):
        disk = disk_with(b"old")
        disk.open(FILE).write(3, change)
        disk.crash(random.Random(seed))
        left.add(content(disk))
    return left


def test_what_was_synced_survives_any_power_failure() -> None:
    assert all(data.startswith(b"old") for data in outcomes(b"new" * 50))


def test_what_was_not_synced_may_be_lost_kept_or_torn() -> None:
    change = bytes(range(1, 201))
    left = outcomes(change)
    assert {b"old", b"old" + change} <= left
    assert any(b"old" < data < b"old" + change and data in b"old" + change for data in left)
    # Sectors survive one by one: one that is missing reads as zeros.
    assert any(b"\0" in data and data.endswith(change[-8:]) for data in left)


def test_names_are_lost_until_their_directory_is_synced() -> None:
    seen = set()
    for seed in range(50):
        disk = disk_with(b"old")
        file = disk.open(HOME / "other", create=True)
        file.write(0, b"new")
        file.sync()
        disk.rename(HOME / "other", FILE)
        disk.crash(random.Random(seed))
        seen.add((content(disk), tuple(disk.names(HOME))))
    assert seen == {(b"old", ("file",)), (b"old", ("file", "other")), (b"new", ("file",))}


def test_a_failed_sync_loses_what_it_should_have_kept_and_says_so() -> None:
    disk = disk_with(b"old")
    disk.fail_sync_after = 2
    file = disk.open(FILE)
    file.write(3, b"kept")
    file.sync()
    file.write(7, b"lost")
    with pytest.raises(OSError, match="Input/output"):
        file.sync()
    file.sync()
    assert content(disk) == disk.durable(FILE) == b"oldkept"


def test_a_stop_comes_at_the_ordered_call() -> None:
    disk = disk_with(b"old")
    disk.crash_after = 2
    file = disk.open(FILE)
    file.write(3, b"1")
    with pytest.raises(StoppedError):
        file.write(4, b"2")
    disk.crash(random.Random(0))
    disk.open(FILE).write(3, b"3")


def test_rot_stays_until_the_byte_is_gone() -> None:
    disk = disk_with(b"old")
    disk.flip(FILE, 1, 0)
    assert content(disk) == b"omd"
    assert disk.is_rotten()
    disk.crash(random.Random(0))
    assert content(disk) == b"omd"
    disk.rename(FILE, HOME / "file.damaged")
    assert not disk.is_rotten()
    disk.rename(HOME / "file.damaged", FILE)
    disk.open(FILE).truncate(1)
    assert not disk.is_rotten()


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
