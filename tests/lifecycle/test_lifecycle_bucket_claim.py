"""A leader issues ids and deletes only in its own bucket, through crashes and rivals.

Each history has one log that all leaders share and one bucket. A leader is stopped for good after
any step; what it was about to put may still arrive, any time later. A restore replaces the log by a
copy made earlier. Invariants: while nothing is restored no leader is refused; after a restore of a
copy that a claim was made after, no id is issued that was issued before.
"""

import asyncio
import contextlib
import random
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from streammeta.controller import errors
from streammeta.controller.errors import MetadataOlderThanBucketError
from streammeta.controller.lifecycle import bucket_claim
from streammeta.controller.lifecycle import bucket_claim as protocol
from streammeta.controller.lifecycle.marker_watch import RECHECK_MS
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.api.answers import PrepareObjectsAnswer
from streammeta.controller.runtime.writer import bucket_permits
from streammeta.controller.runtime.writer.bucket_permits import ObjectIdGate
from streammeta.storage.cluster_files import bucket_marker
from streammeta.storage.errors import StoreUnavailableError
from streammeta.storage.object_store.protocol.base import ObjectInfo
from streammeta.storage.object_store.protocol.calls import Tally
from tests.kit.memory_store import MemoryObjectStore
from tests.kit.seeds import seeds
from tests.lifecycle.lifecycle_world import BROKER, NAMESPACE, World, running

INTERVAL_MS = 5


class AwayStore(MemoryObjectStore):
    """A bucket that may be away."""

    is_away = False

    def until(self, deadline: float) -> "AwayStore":
        return self

    @contextlib.contextmanager
    def _call(self, operation: str, deadline: float | None = None) -> Iterator[Tally]:
        if self.is_away:
            raise StoreUnavailableError("the bucket is away")
        with super()._call(operation, deadline) as tally:
            yield tally


class Claiming(World):
    """A leader with a gate before its object ids, and the task that keeps it."""

    def __init__(self, interval_ms: int = INTERVAL_MS) -> None:
        self.gate = ObjectIdGate()
        super().__init__(self.gate, is_leased=True)
        self.controller.lease.renew(self.clock.monotonic_ms())  # as a follower, before it led
        self.bucket = AwayStore()
        self.claims = bucket_claim.BucketClaims(
            self.controller,
            self.bucket,
            self.gate,
            self.clock,
            cluster_id="here",
            node_id=1,
            namespace=NAMESPACE,
            interval_ms=interval_ms,
        )

    async def issue(self, request_id: str, count: int = 1) -> int:
        request = requests.PrepareObjects(
            request_id=request_id, node=BROKER, count=count, ttl_ms=60_000
        )
        answer = await self.write(request)
        assert isinstance(answer, PrepareObjectsAnswer)
        return answer.first_object_id

    async def opened(self) -> None:
        """Wait until ids may be issued; what failed is tried again meanwhile."""
        await self.until(lambda: self.gate.bound > 0, "ids to be claimed", INTERVAL_MS)

    async def refused(self) -> str:
        """Wait until the leader has a problem that stays, and return it."""
        await self.until(lambda: bool(self.claims._term and self.claims._term.refused), "refusal")
        return self.claims.problem


@pytest.fixture
async def world() -> Claiming:
    return await Claiming().start()


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_permits, "READY_WAIT_MS", 20_000)


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse requests for ids soon while the gate is neither open nor closed for good."""
    monkeypatch.setattr(bucket_permits, "READY_WAIT_MS", 20)


async def test_new_clusters_draw_a_uuid_mark_the_bucket_claim_and_issue(world: Claiming) -> None:
    assert not world.claims.may_delete
    async with running(world.claims.run()):
        assert await world.issue("a") == 0, "the request waited for the gate"
    assert world.claims.may_delete
    assert world.claims.problem == ""
    marker = bucket_marker.read_marker(world.bucket, NAMESPACE)
    assert marker is not None
    assert marker.cluster_uuid == world.claims.cluster_uuid
    assert (marker.cluster_id, marker.namespace) == ("here", NAMESPACE)
    claim = world.controller.cluster_metadata.bucket_claim
    assert claim.cluster_uuid == marker.cluster_uuid
    assert (
        claim.issued_below
        == bucket_marker.read_claimed(world.bucket, NAMESPACE)
        == bucket_claim.CLAIM_STEP
    )


@pytest.mark.usefixtures("short_wait")
async def test_ids_wait_for_the_bucket_and_commits_do_not(world: Claiming) -> None:
    world.bucket.is_away = True
    async with running(world.claims.run()):
        with pytest.raises(errors.ObjectIdsNotReadyError):
            await world.issue("a")
        create = requests.CreateStreams(
            request_id="s", node=BROKER, streams=(requests.NewStream(),)
        )
        assert (await world.write(create)).stream_ids == (0,)
        await world.until(lambda: "away" in world.claims.problem, "the reason", INTERVAL_MS)
        assert not world.claims.may_delete
        end = world.log.next_offset
        for _ in range(20):
            world.clock.advance(INTERVAL_MS)
            await asyncio.sleep(INTERVAL_MS / 1000)
        assert world.log.next_offset == end, "the log grows while the bucket is away"
        world.bucket.is_away = False
        await world.opened()
        assert await world.issue("a") == 0


async def test_another_clusters_bucket_is_refused_until_it_is_put_right(world: Claiming) -> None:
    other = bucket_marker.BucketMarker(
        cluster_id="here", cluster_uuid="another", namespace=NAMESPACE, created_ms=0
    )
    bucket_marker.create_marker(world.bucket, other)
    async with running(world.claims.run()):
        assert "another" in await world.refused()
        with pytest.raises(errors.BucketRejectedError, match="another"):
            await world.issue("a")
        assert not world.claims.may_delete
        assert bucket_marker.read_marker(world.bucket, NAMESPACE) == other
        assert bucket_marker.read_claimed(world.bucket, NAMESPACE) == 0
        world.bucket.delete_many([bucket_marker.marker_key(NAMESPACE)])
        world.clock.advance(RECHECK_MS)
        await world.opened()
        assert await world.issue("a") == 0


async def test_an_unreadable_marker_is_refused_and_left(world: Claiming) -> None:
    world.bucket.put(bucket_marker.marker_key(NAMESPACE), b"{")
    async with running(world.claims.run()):
        assert "corrupt" in await world.refused()
        assert not world.claims.may_delete
    assert world.bucket.get_range(bucket_marker.marker_key(NAMESPACE)) == b"{"


async def test_a_marker_that_must_be_there_is_not_made_in_another_bucket(world: Claiming) -> None:
    await world.write(requests.ClaimBucket(cluster_uuid="u", issued_below=5))
    async with running(world.claims.run()):
        assert "no marker" in await world.refused()
        assert not world.claims.may_delete
    assert list(world.bucket.list_objects()) == []


def restored_claim(bound: int) -> bucket_marker.IdClaim:
    return bucket_marker.IdClaim(
        cluster_uuid="u", issued_below=bound, node_id=2, token="x", created_ms=0
    )


async def test_a_map_older_than_the_bucket_issues_and_deletes_nothing(world: Claiming) -> None:
    await world.write(requests.ClaimBucket(cluster_uuid="u", issued_below=5))
    marker = bucket_marker.BucketMarker(
        cluster_id="here", cluster_uuid="u", namespace=NAMESPACE, created_ms=0
    )
    bucket_marker.create_marker(world.bucket, marker)
    bucket_marker.put_claim(world.bucket, NAMESPACE, restored_claim(6))
    end = world.log.next_offset
    async with running(world.claims.run()):
        assert "older than the bucket" in await world.refused()
        with pytest.raises(errors.MetadataOlderThanBucketError) as refused:
            await world.issue("a")
        assert (refused.value.issued_below, refused.value.claimed) == (5, 6)
        assert not world.claims.may_delete
        assert world.log.next_offset == end, "nothing may hide it from the next leader"
        assert bucket_marker.read_claimed(world.bucket, NAMESPACE) == 6
        # The operator puts it right.
        world.bucket.delete_many([bucket_marker.claim_key(NAMESPACE, 6)])
        world.clock.advance(RECHECK_MS)
        await world.opened()
        assert world.claims.may_delete
        assert await world.issue("a") == 0


async def test_two_logs_that_come_to_the_same_bound_are_told_apart(world: Claiming) -> None:
    async with running(world.claims.run()):
        await world.opened()
        # Another copy of this cluster claims the next bound first.
        store, race = world.bucket, world.gate.bound + 1
        listed = store.list_objects

        def list_objects(prefix: str = "", start_after: str | None = None) -> Iterator[ObjectInfo]:
            found = list(listed(prefix, start_after))
            with contextlib.suppress(Exception):
                bucket_marker.put_claim(store, NAMESPACE, restored_claim(race))
            return iter(found)

        store.list_objects = list_objects  # type: ignore[method-assign]
        world.claims.claim_soon()
        assert "another copy" in await world.refused()
        assert not world.claims.may_delete
        with pytest.raises(errors.MetadataOlderThanBucketError):
            await world.issue("a")


@pytest.mark.usefixtures("short_wait")
async def test_the_gate_closes_with_the_term_and_opens_anew_in_the_next(world: Claiming) -> None:
    async with running(world.claims.run()):
        await world.opened()
        assert await world.issue("a", 3) == 0
        first = world.gate.bound
        world.bucket.is_away = True
        world.log.lose_leadership(truncate=False)
        assert world.gate.bound == 0
        assert not world.claims.may_delete
        world.log.lead()
        with pytest.raises(errors.ObjectIdsNotReadyError):
            await world.issue("b")
        assert await world.issue("a", 3) == 0, "a repeat issues nothing new"
        world.bucket.is_away = False
        await world.opened()
        assert world.gate.bound == first + 3
        assert await world.issue("b") == 3


async def test_claims_are_renewed_when_short_or_old_or_when_a_copy_left(world: Claiming) -> None:
    async with running(world.claims.run()):
        await world.opened()

        async def renewed(what: str) -> None:
            bound = world.gate.bound
            await world.until(lambda: world.gate.bound > bound, what)
            assert bucket_marker.read_claimed(world.bucket, NAMESPACE) == world.gate.bound

        world.clock.advance(bucket_claim.CLAIM_AGE_MS_MAX)
        bound = world.gate.bound
        await asyncio.sleep(10 * INTERVAL_MS / 1000)
        assert world.gate.bound == bound, "nothing has changed since"
        await world.issue("a")
        await renewed("a claim after ids were issued for a while")
        world.clock.advance(bucket_claim.CLAIM_AGE_MS_MAX)
        await world.write(
            requests.CreateStreams(request_id="c", node=BROKER, streams=(requests.NewStream(),))
        )
        await renewed("a claim after any other change")
        world.claims.claim_soon()
        await renewed("a claim after a copy has left")
        world.gate.open(
            world.controller.cluster_metadata.next_object_id + bucket_claim.CLAIM_STEP // 2 - 1
        )
        await renewed("a claim before ids run out")
        world.gate.open(world.controller.cluster_metadata.next_object_id)
        with pytest.raises(errors.ObjectIdsNotReadyError, match="issued"):
            await world.issue("b")
        await renewed("a claim at once when ids have run out")
        assert await world.issue("b") == 1


STEP = 10


@dataclass
class History:
    """The committed log, as what it says, and the claims in the bucket."""

    next_id: int = 0
    issued_below: int = 0
    claims: list[int] = field(default_factory=list)
    late_puts: list[int] = field(default_factory=list)
    issued: set[int] = field(default_factory=set)
    epoch: int = 0


@dataclass
class Leader:
    """One term of one controller: what its map says, which stands still once it is deposed."""

    history: History
    epoch: int
    next_id: int
    issued_below: int
    round: Generator[Any, Any, int] | None = None
    result: int | None = None
    bound: int = 0
    refused: bool = False
    is_stopped: bool = False

    @property
    def is_deposed(self) -> bool:
        return self.history.epoch != self.epoch

    def step(self) -> None:
        """Take one step of a round, or begin one, or issue ids."""
        if self.round is None:
            self.round, self.result = bucket_claim.claim_round(self._map), None
        try:
            step = self.round.send(self.result)
        except StopIteration as end:
            self.bound, self.round = end.value, None
            return
        except MetadataOlderThanBucketError:
            self.refused = self.is_stopped = True
            return
        self._do(step)

    def issue(self, count: int) -> list[int]:
        """Issue ids, if they may be issued and the log commits that."""
        if self.is_deposed or self.refused or self.next_id + count > self.bound:
            return []
        ids = list(range(self.next_id, self.next_id + count))
        self.next_id = self.history.next_id = self.next_id + count
        return ids

    def _map(self) -> bucket_claim.Issued:
        return bucket_claim.Issued(self.next_id, self.issued_below)

    def _do(self, step: Any) -> None:
        self.result = None
        match step:
            case bucket_claim.ReadClaims():
                self.result = max(self.history.claims, default=0)
            case bucket_claim.ProveLeadership() | bucket_claim.CommitBound() if self.is_deposed:
                self.is_stopped = True
            case bucket_claim.CommitBound(bound):
                self.issued_below = self.history.issued_below = bound
            case bucket_claim.PutClaim(bound):
                self.history.claims.append(bound)
            case bucket_claim.ProveLeadership():
                pass
            case _:
                raise AssertionError(step)


def elected(history: History) -> Leader:
    history.epoch += 1
    return Leader(history, history.epoch, history.next_id, history.issued_below)


def act(rng: random.Random, history: History, leaders: list[Leader]) -> None:
    """Let something happen to an honest history."""
    active = [leader for leader in leaders if not leader.is_stopped]
    what = rng.choices(("elect", "step", "issue", "crash", "late"), (2, 12, 6, 1, 2))[0]
    if what == "elect" or not active:
        leaders.append(elected(history))
    elif what == "step":
        rng.choice(active).step()
    elif what == "issue":
        leader = rng.choice(active)
        ids = leader.issue(rng.randint(1, 4))
        assert history.issued.isdisjoint(ids)
        history.issued.update(ids)
    elif what == "crash":
        leader = rng.choice(active)
        leader.is_stopped = True
        if leader.round is not None and rng.random() < 0.5 and leader.issued_below:
            # It was committed here, so a put of it may be on its way.
            history.late_puts.append(leader.issued_below)
    elif history.late_puts:
        history.claims.append(history.late_puts.pop(rng.randrange(len(history.late_puts))))
    if rng.random() < 0.1:
        history.claims = sorted(set(history.claims))[-3:]


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "CLAIM_STEP", STEP)


def settled(history: History) -> Leader:
    """Return a leader that has finished its first round, or was refused."""
    leader = elected(history)
    while not leader.bound and not leader.is_stopped:
        leader.step()
    return leader


def lived(rng: random.Random, acts: int) -> tuple[History, list[Leader]]:
    """Return an honest history in which so much happened, and its leaders."""
    history = History()
    leaders = [elected(history)]
    for _ in range(acts):
        act(rng, history, leaders)
    return history, leaders


@pytest.mark.parametrize("seed", seeds(100, slow=200))
def test_an_honest_history_is_never_refused(seed: int) -> None:
    rng = random.Random(seed)
    history, leaders = lived(rng, 0)
    for _ in range(200):
        act(rng, history, leaders)
        assert not any(leader.refused for leader in leaders), f"seed {seed}"
        assert max(history.claims, default=0) <= history.issued_below, f"seed {seed}"
        assert all(object_id < history.issued_below for object_id in history.issued), f"seed {seed}"
    assert settled(history).bound == max(history.claims), f"seed {seed}: unclaimed ids are issued"


@pytest.mark.parametrize("seed", seeds(33, slow=67))
def test_a_copy_from_before_a_takeover_is_always_found_out(seed: int) -> None:
    rng = random.Random(2_000 + seed)
    history, _ = lived(rng, rng.randrange(60))
    copy = bucket_claim.Issued(history.next_id, history.issued_below)
    settled(history)
    history.next_id, history.issued_below = copy.next_object_id, copy.issued_below
    assert settled(history).refused, f"seed {seed}"


def copied_and_lived_on(seed: int) -> tuple[History, bucket_claim.Issued]:
    """Return a history of which all leaders are gone, and a copy of the log made on the way."""
    rng = random.Random(1_000 + seed)
    history, leaders = lived(rng, rng.randrange(120))
    copy = bucket_claim.Issued(history.next_id, history.issued_below)
    for _ in range(rng.randrange(1, 120)):
        act(rng, history, leaders)
    for leader in leaders:
        leader.is_stopped = True
    return history, copy


@pytest.mark.parametrize("seed", seeds(100, slow=200))
def test_no_id_is_issued_twice_over_a_restore_that_a_claim_came_after(seed: int) -> None:
    history, copy = copied_and_lived_on(seed)
    history.next_id, history.issued_below = copy.next_object_id, copy.issued_below
    was_claimed = max(history.claims, default=0) > copy.issued_below
    restored = settled(history)
    if was_claimed:
        assert restored.refused, f"seed {seed}: {history.claims}"
        assert restored.issue(1) == []
        # The next leader is refused as well: nothing was committed that would hide it.
        assert settled(history).refused
    else:
        assert not restored.refused, f"seed {seed}"


def test_restores_are_met_that_claims_can_see_and_that_they_can_not() -> None:
    met = [copied_and_lived_on(seed) for seed in range(300)]
    assert len({max(found.claims, default=0) > copy.issued_below for found, copy in met}) == 2


@pytest.mark.parametrize(
    ("next_id", "issued_below", "bound"),
    [(0, 0, STEP), (3, STEP, STEP + 3), (3, 50, 51), (2**63 - 2, 2**63 - 3, 2**63 - 1)],
)
def test_bounds_rise_at_least_by_one(next_id: int, issued_below: int, bound: int) -> None:
    assert bucket_claim.next_bound(bucket_claim.Issued(next_id, issued_below)) == bound


def generation(number: int, cluster_uuid: str) -> bucket_marker.Generation:
    return bucket_marker.Generation(
        cluster_id="after",
        cluster_uuid=cluster_uuid,
        namespace=NAMESPACE,
        number=number,
        undecided_from=10,
        undecided_below=20,
        created_ms=1,
    )


async def test_a_cluster_that_was_restored_over_this_one_fences_it(world: Claiming) -> None:
    async with running(world.claims.run()):
        await world.opened()
        bucket_marker.create_generation(world.bucket, generation(2, "another"))
        world.clock.advance(RECHECK_MS - 1_000)
        await world.issue("still its own")
        world.clock.advance(1_000)
        assert "'after'" in await world.refused()
        assert not world.claims.may_delete
        with pytest.raises(errors.SupersededError, match="'after'"):
            await world.write(requests.RegisterNode(node=BROKER))
        with pytest.raises(errors.SupersededError):
            await world.issue("none")
        await world.controller.read(requests.CheckObjects(object_ids=(0,)))
        world.clock.advance(RECHECK_MS)
        await world.until(lambda: bool(world.claims._term and world.claims._term.refused), "again")
        world.log.lose_leadership(truncate=False)
        world.log.lead()
        assert "'after'" in await world.refused(), "a new term looks before it issues anything"


async def test_nothing_is_deleted_while_the_markers_can_not_be_looked_at(world: Claiming) -> None:
    async with running(world.claims.run()):
        await world.opened()
        assert world.claims.may_delete
        world.bucket.is_away = True
        world.clock.advance(3 * RECHECK_MS)
        assert not world.claims.may_delete
        with pytest.raises(errors.MarkerUnseenError):
            await world.issue("claimed before")
        world.bucket.is_away = False
        await world.until(lambda: world.claims.may_delete, "a look", INTERVAL_MS)


async def test_the_newest_generation_is_its_owners_and_leaves_ids_undecided(
    world: Claiming,
) -> None:
    async with running(world.claims.run()):
        await world.opened()
        own = world.claims.cluster_uuid
        bucket_marker.create_generation(world.bucket, generation(2, "another"))
        bucket_marker.create_generation(world.bucket, generation(3, own))
        world.clock.advance(RECHECK_MS)
        await world.until(lambda: world.claims.is_undecided(10), "a look", INTERVAL_MS)
        found = [object_id for object_id in range(30) if world.claims.is_undecided(object_id)]
        assert found == [*range(10, 20)]
        assert "before this one may acknowledge" in world.claims.problem
        world.clock.advance(bucket_marker.FENCE_WAIT_MS)
        await world.until(lambda: world.claims.problem == "", "the fence", INTERVAL_MS)
        for number in (2, 3):
            mark = bucket_marker.GivenUp(
                cluster_uuid=own, number=number, objects=1, bytes=1, created_ms=1
            )
            bucket_marker.give_up(world.bucket, NAMESPACE, mark)
        world.clock.advance(RECHECK_MS)
        await world.until(lambda: not world.claims.is_undecided(10), "a look", INTERVAL_MS)
        assert world.claims.problem == ""
