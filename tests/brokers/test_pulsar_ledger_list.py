"""A managed ledger's list: policies, deletion of sources, and steps that others interrupt."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from streammeta.brokers.pulsar import ledger_list
from streammeta.brokers.pulsar.cluster_lists import encode_list
from streammeta.brokers.pulsar.formats.ledger_values import LedgerInfo, OffloadContext
from tests.conformance.pulsar_ledgers import Copies, Sources
from tests.conformance.pulsar_offload import MemoryLedger
from tests.kit.memory_stores import MemoryListStore

UUIDS = [f"00000000-0000-0000-0000-{at:012}" for at in range(9)]
NOW = 1_000_000


def _closed(
    ledger_id: int, size: int = 10, age_ms: int = 0, *, complete: bool = False
) -> LedgerInfo:
    context = OffloadContext(UUIDS[ledger_id], complete, None, NOW) if complete else None
    return LedgerInfo(ledger_id, 1, size, NOW - age_ms, context)


def _due(policy: ledger_list.OffloadPolicy, *ledgers: LedgerInfo) -> list[int]:
    return [info.ledger_id for info in ledger_list.due_ledgers(ledgers, policy, NOW)]


# ---- policies ----


@pytest.fixture
def world() -> World:
    return World()


def test_ledgers_over_the_size_are_due_summed_from_the_newest() -> None:
    ledgers = [_closed(at) for at in range(4)]
    assert _due(ledger_list.OffloadPolicy(threshold_bytes=20), *ledgers) == [0, 1]
    assert _due(ledger_list.OffloadPolicy(threshold_bytes=0), *ledgers) == [0, 1, 2, 3]
    for threshold in (ledger_list.NEVER, None, 40):
        assert _due(ledger_list.OffloadPolicy(threshold_bytes=threshold), *ledgers) == []


def test_ledgers_of_an_age_are_due() -> None:
    ledgers = [_closed(0, age_ms=5_001), _closed(1, age_ms=5_000), _closed(2, age_ms=4_999)]
    assert _due(ledger_list.OffloadPolicy(threshold_s=5), *ledgers) == [0, 1]
    for threshold in (ledger_list.NEVER, None):
        assert _due(ledger_list.OffloadPolicy(threshold_s=threshold), *ledgers) == []


def test_a_ledger_without_a_time_has_no_age() -> None:
    assert _due(ledger_list.OffloadPolicy(threshold_s=5), replace(_closed(0), timestamp_ms=0)) == []


def test_what_is_empty_or_offloaded_is_not_due() -> None:
    ledgers = [_closed(0, size=0), _closed(1, complete=True), _closed(2)]
    assert _due(ledger_list.OffloadPolicy(threshold_bytes=0, threshold_s=0), *ledgers) == [2]


@pytest.mark.parametrize(
    ("context", "lag_ms", "wanted"),
    [
        (OffloadContext(UUIDS[0], True, None, 100), 10, True),
        (OffloadContext(UUIDS[0], True, False, 100), 10, True),
        (OffloadContext(UUIDS[0], True, None, 100), 0, True),
        (OffloadContext(UUIDS[0], True, None, 990), 10, False),
        (OffloadContext(UUIDS[0], True, True, 100), 10, False),
        (OffloadContext(UUIDS[0], False, None, 100), 10, False),
        (OffloadContext(UUIDS[0], True, None, 100), ledger_list.NEVER, False),
        (OffloadContext(UUIDS[0], True, None, 100), None, False),
        (None, 10, False),
    ],
)
def test_a_source_is_due_after_the_lag_of_a_whole_copy(
    context: OffloadContext | None, lag_ms: int | None, wanted: bool
) -> None:
    assert ledger_list.source_is_due(context, lag_ms, 1_000) is wanted


def test_reads_go_to_whole_copies_alone() -> None:
    def reads(complete: bool, deleted: bool | None, *, source_first: bool = False) -> bool:
        context = OffloadContext(UUIDS[0], complete, deleted, 1)
        return ledger_list.reads_copy(LedgerInfo(0, 1, 1, 1, context), source_first=source_first)

    assert reads(True, None)
    assert reads(True, True, source_first=True)
    assert not reads(True, False, source_first=True)
    assert not reads(False, None)
    assert not ledger_list.reads_copy(LedgerInfo(0, 1, 1, 1))


# ---- steps ----


@dataclass
class World:
    """Managed ledger `ml` with ledgers 0 and 1 closed, 2 open, and what it stands on."""

    store: MemoryListStore = field(
        default_factory=lambda: MemoryListStore(
            encode_list([_closed(0), _closed(1), LedgerInfo(2)])
        )
    )
    copies: Copies = field(default_factory=Copies)
    sources: Sources = field(
        default_factory=lambda: Sources({at: MemoryLedger(at, [b"x"]) for at in range(3)})
    )
    uuids: list[str] = field(default_factory=lambda: list(UUIDS))

    async def open(self) -> ledger_list.ManagedLedger:
        managed = ledger_list.ManagedLedger(
            "ml",
            self.store,
            self.sources,
            self.copies,
            lambda: NOW,
            new_uuid=lambda: self.uuids.pop(0),
        )
        await managed.open()
        return managed


async def test_a_sweep_spares_a_copy_that_begins_meanwhile(world: World) -> None:

    class MeetsAnOffload(Copies):
        async def list_copies(self) -> list[tuple[int, str]]:
            if not self.offloads:
                await other.offload(other.ledgers[:1])
            return await super().list_copies()

    world.copies = MeetsAnOffload()
    sweeping, other = await world.open(), await world.open()
    assert await sweeping.sweep() == []
    assert world.copies.stored == {UUIDS[0]: 0}


async def test_a_sweep_waits_for_no_offload_of_its_own(world: World) -> None:
    world.copies.waits = asyncio.Event()
    managed = await world.open()
    offloading = asyncio.create_task(managed.offload(managed.ledgers[:1]))
    await world.copies.began.wait()
    with pytest.raises(ledger_list.OffloadInProgressError):
        await managed.sweep()
    with pytest.raises(ledger_list.OffloadInProgressError):
        await managed.offload(managed.ledgers[:1])
    world.copies.waits.set()
    await offloading
    assert await managed.sweep() == []


async def test_what_an_earlier_try_left_is_deleted_before_the_next(world: World) -> None:
    world.copies.fails_after = {0}
    managed = await world.open()
    with pytest.raises(RuntimeError, match="failed late"):
        await managed.offload(managed.ledgers[:1])
    assert not managed.ledgers[0].is_complete
    world.copies.fails_after = set()
    await managed.offload(managed.ledgers[:1])
    assert world.copies.stored == {UUIDS[1]: 0}
    assert managed.ledgers[0].is_complete


async def test_a_copy_whose_ledger_got_another_is_deleted_and_does_not_count(world: World) -> None:
    world.copies.waits = asyncio.Event()
    managed = await world.open()
    offloading = asyncio.create_task(managed.offload(managed.ledgers[:1]))
    await world.copies.began.wait()
    managed.ledgers[0] = managed.ledgers[0].with_context(OffloadContext(UUIDS[8]))
    world.copies.waits.set()
    with pytest.raises(ledger_list.OffloadConflictError):
        await offloading
    assert world.copies.stored == {}
    assert not managed.ledgers[0].is_complete


async def test_an_owner_that_was_replaced_deletes_nothing(world: World) -> None:
    former, present = await world.open(), await world.open()
    await present.offload(present.ledgers[:1])
    for change in (former.trim(2), former.offload(former.ledgers[:1])):
        with pytest.raises(ledger_list.ManagedLedgerFencedError):
            await change
    assert sorted(world.sources.ledgers) == [0, 1, 2]
    assert world.copies.stored == {UUIDS[0]: 0}
    with pytest.raises(ledger_list.ManagedLedgerFencedError):
        await former.trim(1)


async def test_a_source_goes_only_after_the_list_says_so(world: World) -> None:
    former, present = await world.open(), await world.open()
    await present.offload(present.ledgers[:1])
    assert await present.delete_sources(0) == []  # the lag is not over within the same ms
    present.now_ms = lambda: NOW + 1
    former.ledgers = list(present.ledgers)
    former.now_ms = present.now_ms
    with pytest.raises(ledger_list.ManagedLedgerFencedError):
        await former.delete_sources(0)
    assert 0 in world.sources.ledgers
    assert await present.delete_sources(0) == [0]
    assert 0 not in world.sources.ledgers
    assert await present.delete_sources(0) == []


async def test_a_trim_leaves_the_open_ledger_and_those_from_its_bound_on(world: World) -> None:
    managed = await world.open()
    await managed.offload(managed.ledgers[:2])
    assert await managed.trim(0) == []
    assert await managed.trim(1) == [0]
    assert world.copies.stored == {UUIDS[1]: 1}
    assert sorted(world.sources.ledgers) == [1, 2]
    assert await managed.trim(9) == [1]
    assert sorted(world.sources.ledgers) == [2]
    assert [info.ledger_id for info in managed.ledgers] == [2]
