"""No change is decided or acknowledged without a fresh proof that the bucket is the cluster's."""

import asyncio
from collections.abc import Callable

import pytest

from streammeta.controller import errors
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.api.requests import ClaimBucket, DescribeStreams, PutKVs
from streammeta.controller.runtime.writer.bucket_permits import MarkerLease
from streammeta.storage.cluster_files.bucket_marker import LEASE_MS
from tests.kit.memory_log import NODE, MemoryLog, committed, create, leading, submit
from tests.kit.waiting import ManualClock


class Leased:
    """A leader whose lease the test renews by hand."""

    async def start(self) -> "Leased":
        self.clock = ManualClock(5_000)
        self.lease = MarkerLease(self.clock.monotonic_ms)
        self.lease.renew(self.clock.monotonic_ms())
        self.controller, self.log = await leading(self.lease)
        return self


@pytest.fixture
async def leased() -> Leased:
    return await Leased().start()


def lease_at(clock: ManualClock) -> MarkerLease:
    return MarkerLease(clock.monotonic_ms)


def test_a_lease_counts_from_the_begin_of_the_look_that_proved_it() -> None:
    clock = ManualClock(1_000)
    lease = lease_at(clock)
    assert not lease.is_held
    clock.advance(9_000)
    lease.renew(1_000)
    clock.advance(LEASE_MS - 9_001)
    assert lease.is_held
    clock.advance(1)
    assert not lease.is_held


def test_a_failed_look_neither_extends_a_lease_nor_ends_it() -> None:
    clock = ManualClock(0)
    lease = lease_at(clock)
    lease.renew(0)
    clock.advance(LEASE_MS - 1)
    lease.note_failure("connection refused")
    assert lease.is_held
    clock.advance(1)
    lease.note_failure("connection refused")
    with pytest.raises(errors.MarkerUnseenError, match="connection refused"):
        lease.require()


def test_an_older_look_does_not_bring_back_what_a_later_one_ended() -> None:
    """Looks may end in another order than they began."""
    clock = ManualClock(100)
    lease = lease_at(clock)
    lease.renew(0)
    lease.refuse(50, errors.SupersededError("after"))
    lease.renew(50)
    assert not lease.is_held
    with pytest.raises(errors.SupersededError):
        lease.require()
    lease.renew(60)
    assert lease.is_held


def test_an_older_look_does_not_shorten_a_lease() -> None:
    clock = ManualClock(100)
    lease = lease_at(clock)
    lease.renew(100)
    lease.renew(50)
    assert lease.left_ms == LEASE_MS


CHANGES = [
    create("a"),
    requests.RegisterNode(node=NODE, wal_config="moved"),
    PutKVs(items=()),
    requests.TrimStreams(node=NODE, streams=()),
    requests.OpenStreams(node=NODE, streams=()),
    requests.FinishRestore(),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: type(change).__name__)
async def test_without_a_lease_no_change_is_decided(
    leased: Leased, change: requests.WriteRequest
) -> None:
    leased.clock.advance(LEASE_MS)
    end = leased.log.next_offset
    with pytest.raises(errors.MarkerUnseenError):
        await leased.controller.write(change)
    assert leased.log.next_offset == end


async def test_a_change_that_is_committed_after_the_lease_is_not_acknowledged(
    leased: Leased,
) -> None:
    doubtful = await submit(leased.controller.write(create("a", 2)))
    leased.clock.advance(LEASE_MS)
    leased.log.commit()
    with pytest.raises(errors.OutcomeUnknownError, match="lease"):
        await doubtful
    leased.lease.renew(leased.clock.monotonic_ms())
    again = await committed(leased.log, leased.controller.write(create("a", 2)))
    assert again.answer.stream_ids == (0, 1), "a repeat has the first answer"


async def test_a_repeat_that_appends_nothing_is_not_acknowledged_after_the_lease(
    leased: Leased,
) -> None:
    await committed(leased.log, leased.controller.write(create("a")))
    release = await _slow_barrier(leased.log)
    repeated = await submit(leased.controller.write(create("a")))
    leased.clock.advance(LEASE_MS)
    release()
    with pytest.raises(errors.OutcomeUnknownError):
        await repeated


async def _slow_barrier(log: MemoryLog) -> Callable[[], None]:
    """Let proofs of leadership wait until the returned call."""
    proven, prove = asyncio.Event(), log.read_barrier

    async def barrier() -> int:
        await proven.wait()
        return await prove()

    log.read_barrier = barrier  # type: ignore[method-assign]
    return proven.set


async def test_reads_and_claims_of_the_bucket_need_no_lease(leased: Leased) -> None:
    leased.clock.advance(LEASE_MS)
    await leased.controller.read(DescribeStreams())
    claim = leased.controller.submit((ClaimBucket(cluster_uuid="u", issued_below=0),))
    leased.log.commit()
    await claim.committed()


async def test_a_process_that_has_not_looked_yet_lets_changes_wait_for_its_look() -> None:
    leased = await Leased().start()
    fresh = MarkerLease(leased.clock.monotonic_ms)
    leased.controller.lease = fresh
    waiting = await submit(leased.controller.write(create("a")))
    assert not waiting.done()
    fresh.renew(leased.clock.monotonic_ms())
    await submit(asyncio.sleep(0))
    leased.log.commit()
    assert (await waiting).answer.stream_ids == (0,)
