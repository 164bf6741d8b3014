"""Changes of a ledger list side by side, and saves whose outcome is not known."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable

import pytest

from streammeta.brokers.pulsar import ledger_list
from streammeta.brokers.pulsar.cluster_lists import ClusterListStore, decode_list
from streammeta.brokers.pulsar.formats.ledger_values import LedgerInfo
from streammeta.client import OwnerKey
from tests.brokers.pulsar_kit import Topic
from tests.kit.memory_keys import MemoryControllers
from tests.kit.seeds import seeds

ALL = ledger_list.OffloadPolicy(threshold_bytes=0)


def _named(managed: ledger_list.ManagedLedger) -> set[tuple[int, str]]:
    contexts = [(info.ledger_id, info.context) for info in managed.ledgers]
    return {(ledger_id, context.uuid) for ledger_id, context in contexts if context is not None}


@pytest.mark.parametrize("seed", seeds(13, slow=27))
async def test_one_owner_never_fences_itself(seed: int) -> None:
    """Offload, trim and deletion of sources run at once, in any order of their steps."""
    topic = Topic(seed=seed)
    managed = await topic.open()
    rng = random.Random(seed)

    async def trim() -> None:
        for before in sorted(rng.sample(range(1, 5), 3)):
            await asyncio.sleep(0)
            await managed.trim(before)

    async def delete_sources() -> None:
        for _ in range(4):
            topic.now_ms += 1
            await managed.delete_sources(0)

    tasks: list[Awaitable[None]] = [
        managed.offload_due(ALL),
        trim(),
        delete_sources(),
        managed.offload_due(ALL),
    ]
    rng.shuffle(tasks)
    await asyncio.gather(*tasks)
    topic.now_ms += 1
    await managed.delete_sources(0)

    assert not managed.is_fenced
    assert topic.store.conflicts == 0
    assert decode_list(topic.store.data) == managed.ledgers
    assert topic.copies.kept == _named(managed)
    assert all(info.is_complete for info in managed.ledgers[:-1])
    assert topic.sources.kept == {}


async def test_a_change_of_a_ledger_that_was_trimmed_meanwhile_is_dropped() -> None:
    topic = Topic()
    managed = await topic.open()
    await managed.offload_due(ALL)
    topic.now_ms += 1
    trimmed, deleted = await asyncio.gather(managed.trim(3), managed.delete_sources(0))
    assert trimmed == [0, 1, 2]
    assert [info.ledger_id for info in decode_list(topic.store.data)] == [3, 4, 5, 6]
    assert set(deleted) >= {3, 4, 5}


async def test_an_automatic_offload_waits_for_a_manual_one_and_a_manual_one_is_refused() -> None:
    topic = Topic()
    topic.copies.blocked = asyncio.Event()
    managed = await topic.open()
    manual = asyncio.create_task(managed.offload_prefix(2, 0))
    await topic.copies.begun.wait()
    automatic = asyncio.create_task(managed.offload_due(ALL))
    await asyncio.sleep(0)
    with pytest.raises(ledger_list.OffloadInProgressError):
        await managed.offload_prefix(6, 0)
    topic.copies.blocked.set()
    assert await manual == (2, 0)
    await automatic
    assert topic.copies.order == [0, 1, 2, 3, 4, 5]


# ---- saves whose outcome is not known ----


async def test_a_save_whose_answer_was_lost_does_not_fence_its_owner() -> None:
    topic = Topic()
    managed = await topic.open()
    topic.store.lost_answers = 1
    with pytest.raises(ConnectionError):
        await managed.trim(1)
    assert await managed.trim(2) == [1]
    assert not managed.is_fenced
    assert [info.ledger_id for info in managed.ledgers] == [2, 3, 4, 5, 6]


async def test_a_save_that_was_cancelled_does_not_fence_its_owner() -> None:
    for steps in range(1, 8):
        topic = Topic(seed=steps)
        managed = await topic.open()
        trim = asyncio.create_task(managed.trim(1))
        for _ in range(steps):
            await asyncio.sleep(0)
        trim.cancel()
        await asyncio.gather(trim, return_exceptions=True)
        await managed.trim(2)
        assert decode_list(topic.store.data) == managed.ledgers
        assert managed.ledgers[0].ledger_id == 2


async def test_a_lost_answer_hides_no_other_owner() -> None:
    topic = Topic()
    former, present = await topic.open(), await topic.open()
    topic.store.lost_answers = 1
    with pytest.raises(ConnectionError):
        await former.trim(1)
    present = await topic.open()
    await present.trim(2)
    with pytest.raises(ledger_list.ManagedLedgerFencedError):
        await former.trim(3)
    assert former.is_fenced
    assert [info.ledger_id for info in decode_list(topic.store.data)] == [2, 3, 4, 5, 6]


async def test_a_copy_that_the_stored_list_calls_whole_is_not_deleted() -> None:
    """The former owner did not hear that its copy was saved as whole; the next one relies on it."""
    topic = Topic(closed=1)
    former = await topic.open()
    topic.copies.blocked = asyncio.Event()
    offload = asyncio.create_task(former.offload_due(ALL))
    await topic.copies.begun.wait()
    topic.store.lost_answers = 1
    topic.copies.blocked.set()
    with pytest.raises(ConnectionError):
        await offload
    present = await topic.open()
    topic.now_ms += 1
    assert await present.delete_sources(0) == [0]
    with pytest.raises(ledger_list.ManagedLedgerFencedError):
        await former.offload_due(ALL)
    assert topic.copies.kept == _named(present)


async def test_a_whole_copy_is_not_replaced() -> None:
    topic = Topic(closed=1)
    managed = await topic.open()
    ledgers = managed.ledgers[:1]
    await managed.offload(ledgers)
    kept = set(topic.copies.kept)
    await managed.offload(ledgers)
    await managed.offload(managed.ledgers[:1])
    assert topic.copies.kept == kept == _named(managed)
    assert topic.copies.order == [0]


async def test_a_save_that_a_client_repeats_is_no_save_of_another() -> None:
    """The controllers carried out the first attempt, and its answer was lost."""
    controllers = MemoryControllers()
    lists = ClusterListStore(controllers, OwnerKey("ml", "ledgers"))  # type: ignore[arg-type]
    ledgers = [LedgerInfo(1)]
    version = await lists.save(ledgers, 0)
    assert await lists.save(ledgers, 0) == version
    assert await lists.load() == (ledgers, version)
    with pytest.raises(ledger_list.VersionConflictError):
        await lists.save([LedgerInfo(2)], 0)


# ---- trim ----


async def test_a_trim_deletes_a_source_that_is_only_said_to_be_deleted() -> None:
    """The process ended between the note in the list and the deletion."""
    topic = Topic(closed=1)
    managed = await topic.open()
    await managed.offload_due(ALL)
    topic.now_ms += 1
    topic.sources.failing = {0}
    with pytest.raises(ConnectionError):
        await managed.delete_sources(0)
    topic.sources.failing = set()
    assert await managed.trim(1) == [0]
    assert topic.sources.kept == {}


async def test_a_source_that_can_not_be_deleted_holds_up_no_other() -> None:
    topic = Topic(closed=3)
    managed = await topic.open()
    await managed.offload_due(ALL)
    topic.sources.failing = {0}
    with pytest.raises(ConnectionError):
        await managed.trim(3)
    assert set(topic.sources.kept) == {0}
    assert topic.copies.kept == set()
