"""The lease on the cluster's marker: who may acknowledge changes, as the bucket comes and goes."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from streammeta.controller import errors
from streammeta.controller.lifecycle.marker_watch import RECHECK_MS, MarkerWatch
from streammeta.controller.metadata.decisions.maintenance import Claim
from streammeta.controller.runtime.writer.bucket_permits import MarkerLease
from streammeta.storage.cluster_files import bucket_marker
from streammeta.storage.errors import StorageError, StoreUnavailableError
from streammeta.storage.object_store.protocol.base import ObjectInfo
from tests.kit.memory_store import MemoryObjectStore
from tests.kit.waiting import ManualClock
from tests.lifecycle.lifecycle_world import NAMESPACE, A, Cluster, running
from tests.lifecycle.test_lifecycle_bucket_claim import Claiming

INTERVAL_MS = 5
OWN, OTHER = "own-uuid", "other-uuid"


class Bucket(MemoryObjectStore):
    """A bucket that may be away, and whose listings take time and meet events."""

    is_away = False
    while_listed: Callable[[], object] = staticmethod(lambda: None)

    def until(self, deadline: float) -> "Bucket":
        return self

    def list_objects(
        self, prefix: str = "", start_after: str | None = None
    ) -> Iterator[ObjectInfo]:
        if self.is_away:
            raise StoreUnavailableError("the bucket is away")
        found = list(super().list_objects(prefix, start_after))
        self.while_listed()
        return iter(found)


class Watching:
    """A controller of the cluster `OWN`, leader or not, and its looks."""

    def __init__(self, bucket: Bucket, clock: ManualClock, uuid: str = OWN) -> None:
        self.bucket, self.clock = bucket, clock
        self.lease = MarkerLease(clock.monotonic_ms)
        self.claim = Claim(uuid, 1_000)
        self.refusals = 0
        self.watch = MarkerWatch(
            bucket,
            self.lease,
            lambda: self.claim,
            clock.wall_ms,
            cluster_id="here",
            namespace=NAMESPACE,
            interval_ms=INTERVAL_MS,
            on_refusal=self._refused,
        )

    def _refused(self) -> None:
        self.refusals += 1

    async def fails(self) -> StorageError:
        with pytest.raises(StorageError) as failed:
            await self.watch.check()
        return failed.value


def marker(uuid: str = OWN) -> bucket_marker.BucketMarker:
    return bucket_marker.BucketMarker(
        cluster_id="here", cluster_uuid=uuid, namespace=NAMESPACE, created_ms=1
    )


def generation(number: int, uuid: str) -> bucket_marker.Generation:
    return bucket_marker.Generation(
        cluster_id="after",
        cluster_uuid=uuid,
        namespace=NAMESPACE,
        number=number,
        undecided_from=10,
        undecided_below=20,
        created_ms=1,
    )


@pytest.fixture
def watching() -> Watching:
    bucket = Bucket()
    bucket_marker.create_marker(bucket, marker())
    return Watching(bucket, ManualClock(5_000))


async def test_a_look_that_finds_the_own_marker_renews_the_lease(watching: Watching) -> None:
    await watching.watch.check()
    assert watching.lease.left_ms == bucket_marker.LEASE_MS


async def test_a_slow_look_proves_what_held_when_it_began(watching: Watching) -> None:
    """Another cluster may have taken the bucket over while the answer was on its way."""

    def superseded_meanwhile() -> None:
        bucket_marker.create_generation(watching.bucket, generation(2, OTHER))
        watching.clock.advance(9_000)

    watching.bucket.while_listed = superseded_meanwhile
    await watching.watch.check()
    assert watching.lease.left_ms == bucket_marker.LEASE_MS - 9_000


@pytest.mark.parametrize("found", ["no marker", "another cluster's", "damaged", "away"])
async def test_a_look_that_does_not_find_the_own_marker_renews_nothing(
    watching: Watching, found: str
) -> None:
    await watching.watch.check()
    watching.clock.advance(1_000)
    key = bucket_marker.marker_key(NAMESPACE)
    watching.bucket.delete_many([key])
    if found == "another cluster's":
        bucket_marker.create_marker(watching.bucket, marker(OTHER))
    elif found == "damaged":
        watching.bucket.put(key, b"{")
    watching.bucket.is_away = found == "away"
    why = await watching.fails()
    assert watching.lease.left_ms == bucket_marker.LEASE_MS - 1_000
    watching.clock.advance(bucket_marker.LEASE_MS)
    lasting = errors.MarkerUnseenError if found == "away" else errors.BucketRejectedError
    with pytest.raises(lasting) as refused:
        watching.lease.require()
    assert str(why) in str(refused.value)


async def test_a_cluster_without_a_marker_yet_has_no_lease(watching: Watching) -> None:
    watching.bucket.delete_many([bucket_marker.marker_key(NAMESPACE)])
    watching.claim = Claim(OWN, 0)
    await watching.watch.check()
    assert not watching.lease.is_held


async def test_another_cluster_restored_over_this_one_ends_the_lease(watching: Watching) -> None:
    await watching.watch.check()
    bucket_marker.create_generation(watching.bucket, generation(2, OTHER))
    with pytest.raises(errors.SupersededError):
        await watching.watch.check()
    with pytest.raises(errors.SupersededError, match="'after'"):
        watching.lease.require()
    watching.bucket.is_away = True
    await watching.fails()
    with pytest.raises(errors.SupersededError):
        watching.lease.require()


async def test_a_restored_cluster_waits_until_no_other_lease_can_be_held(
    watching: Watching,
) -> None:
    old, new = watching, Watching(watching.bucket, watching.clock, OTHER)
    await old.watch.check()
    bucket_marker.create_generation(old.bucket, generation(2, OTHER))
    old.bucket.is_away = True
    old.clock.advance(2_000)
    old.bucket.is_away = False
    for _ in range(bucket_marker.FENCE_WAIT_MS // 1_000):
        with pytest.raises(errors.FencePendingError):
            await new.watch.check()
        with pytest.raises(errors.FencePendingError):
            new.lease.require()
        old.clock.advance(1_000)
    assert not old.lease.is_held
    await new.watch.check()
    assert new.lease.left_ms == bucket_marker.LEASE_MS
    another = Watching(old.bucket, ManualClock(0), OTHER)
    await another.watch.check()
    assert another.lease.is_held, "whoever has waited has done it for all"


async def test_a_restored_cluster_does_not_wait_again_for_the_bucket(watching: Watching) -> None:
    new = Watching(watching.bucket, watching.clock, OTHER)
    bucket_marker.create_generation(watching.bucket, generation(2, OTHER))
    with pytest.raises(errors.FencePendingError):
        await new.watch.check()
    watching.clock.advance(bucket_marker.FENCE_WAIT_MS)
    watching.bucket.is_away = True
    await new.fails()
    assert not new.lease.is_held
    watching.bucket.is_away = False
    await new.watch.check()
    assert new.lease.is_held


async def test_a_wait_for_one_generation_does_not_count_for_the_next(watching: Watching) -> None:
    new = Watching(watching.bucket, watching.clock, OTHER)
    bucket_marker.create_generation(watching.bucket, generation(2, OTHER))
    with pytest.raises(errors.FencePendingError):
        await new.watch.check()
    watching.clock.advance(bucket_marker.FENCE_WAIT_MS)
    bucket_marker.create_generation(watching.bucket, generation(3, OTHER))
    with pytest.raises(errors.FencePendingError):
        await new.watch.check()
    assert not new.lease.is_held


async def test_a_controller_that_does_not_lead_looks_too(watching: Watching) -> None:
    async with running(watching.watch.run()):
        await _until(lambda: watching.lease.is_held)
        watching.clock.advance(RECHECK_MS)
        await _until(lambda: watching.lease.left_ms == bucket_marker.LEASE_MS)
        bucket_marker.create_generation(watching.bucket, generation(2, OTHER))
        watching.clock.advance(RECHECK_MS)
        await _until(lambda: watching.refusals > 0)
        assert not watching.lease.is_held


async def test_a_failed_look_is_repeated_before_the_next_is_due(watching: Watching) -> None:
    watching.bucket.is_away = True
    async with running(watching.watch.run()):
        await _until(lambda: "away" in watching.lease.problem)
        watching.bucket.is_away = False
        await _until(lambda: watching.lease.is_held)


async def test_a_controller_that_does_not_know_its_cluster_yet_does_not_look(
    watching: Watching,
) -> None:
    """Its map may be from before everything: any marker would seem to be another cluster's."""
    bucket_marker.create_generation(watching.bucket, generation(2, OWN))
    watching.claim = Claim()
    lists: list[int] = []
    watching.bucket.while_listed = lambda: lists.append(1)
    async with running(watching.watch.run()):
        await _turns(20)
        assert not lists
        watching.claim = Claim(OWN, 5)
        await _until(lambda: bool(lists))


async def test_rare_expiry_and_deletion_do_not_make_checks_of_the_bucket_rare() -> None:
    """The configured interval is theirs. A lease and the claims need checks within their time."""
    world = await Claiming(interval_ms=3_600_000).start()
    async with running(world.claims.run()):
        await world.issue("a")
        claimed = bucket_marker.read_claimed(world.bucket, NAMESPACE)
        world.clock.advance(RECHECK_MS)
        await _until(lambda: world.controller.lease.left_ms == bucket_marker.LEASE_MS)
        await _until(lambda: bucket_marker.read_claimed(world.bucket, NAMESPACE) > claimed)


async def test_a_heartbeat_is_heard_and_not_confirmed_without_a_lease() -> None:
    """Its broker may hold streams that a restored cluster has given to another."""
    cluster = Cluster(is_leased=True)
    await cluster.start()
    await cluster.beat(A)
    cluster.world.clock.advance(bucket_marker.LEASE_MS)
    with pytest.raises(errors.MarkerUnseenError):
        await cluster.beat(A)
    assert cluster.sessions.state(A.node_id).name == "ACTIVE"


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(INTERVAL_MS / 1000)


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(4_000):
        if condition():
            return
        await _turns(1)
    raise AssertionError("the condition was not met")
