"""Offload that runs by itself: by time and size, beside failures, and by no wall clock alone."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import pytest

from streammeta.brokers.pulsar.automatic_offload import AutomaticOffload
from streammeta.brokers.pulsar.formats.ledger_values import LedgerInfo
from streammeta.brokers.pulsar.ledger_list import ManagedLedger
from streammeta.brokers.pulsar.policies import AllPolicies, NamespacePolicies, TopicPolicies
from tests.brokers.pulsar_kit import Topic

DAY_MS = 24 * 3_600_000


@dataclass
class Policies:
    """Policies of namespace `n`; `failing` rounds can't read them."""

    common: TopicPolicies
    topics: dict[str, TopicPolicies] = field(default_factory=dict)
    failing: int = 0
    loads: int = 0
    loaded: asyncio.Event = field(default_factory=asyncio.Event)

    async def load(self) -> AllPolicies:
        self.loads += 1
        self.loaded.set()
        if self.failing:
            self.failing -= 1
            raise ConnectionError("the controllers are away")
        return AllPolicies({"n": NamespacePolicies(self.common, self.topics)}, {"bad": "key 'bad'"})


def _offloaded(managed: ManagedLedger) -> list[int]:
    return [info.ledger_id for info in managed.ledgers if info.is_complete]


async def test_ledgers_are_offloaded_by_time_and_by_size_as_the_policies_say() -> None:
    by_time, by_size, never = Topic(), Topic(), Topic()
    policies = Policies(
        TopicPolicies(offload_after_s=60),
        {
            "by size": TopicPolicies(offload_after_s=-1, offload_above_bytes=60),
            "never": TopicPolicies(offload_after_s=-1),
        },
    )
    work = AutomaticOffload(policies)
    opened = {"by time": by_time, "by size": by_size, "never": never}
    managed = {name: await topic.open() for name, topic in opened.items()}
    by_time.now_ms = 59_000
    for name, ledgers in managed.items():
        work.add("n", name, ledgers)
    await work.run_once()
    assert {name: _offloaded(ledgers) for name, ledgers in managed.items()} == {
        "by time": [],
        "by size": [0, 1, 2, 3],
        "never": [],
    }
    by_time.now_ms = 60_001
    await work.run_once()
    assert _offloaded(managed["by time"]) == [0, 1, 2, 3, 4, 5]


async def test_it_runs_by_itself_from_the_closing_of_a_ledger_and_stops() -> None:
    topic, policies = Topic(closed=0), Policies(TopicPolicies(offload_above_bytes=0))
    managed = await topic.open()
    async with AutomaticOffload(policies, interval_s=3600) as work:
        work.add("n", "t", managed)
        for ledger_id in range(3):
            topic.sources.kept[ledger_id] = topic.ledger(ledger_id)
            await managed.roll(3, 30, ledger_id + 1)
            await managed.roll(3, 30, ledger_id + 1)  # a repeat after an unknown outcome
            work.wake()
            await topic.offloaded(ledger_id + 1)
    loads = policies.loads
    await managed.roll(3, 30, 4)
    work.wake()
    for _ in range(20):
        await asyncio.sleep(0)
    assert policies.loads == loads
    assert [info.ledger_id for info in managed.ledgers] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="next_ledger"):
        await managed.roll(4, 30, 4)


async def test_an_empty_list_gets_its_first_ledger() -> None:
    topic = Topic()
    topic.store.data, topic.store.version = b"", 0
    managed = await topic.open()
    await managed.roll(0, 0, 7)
    assert managed.ledgers == [LedgerInfo(7)]
    await managed.roll(2, 20, 9)
    assert [info.entries for info in managed.ledgers] == [2, 0]


async def test_stopping_ends_an_offload_and_the_next_one_leaves_nothing_of_it() -> None:
    topic, policies = Topic(closed=2), Policies(TopicPolicies(offload_above_bytes=0))
    topic.copies.blocked = asyncio.Event()
    managed = await topic.open()
    async with AutomaticOffload(policies) as work:
        work.add("n", "t", managed)
        await topic.copies.begun.wait()
    topic.copies.blocked.set()
    for _ in range(50):
        await asyncio.sleep(0)
    assert _offloaded(managed) == []
    work.add("n", "t", managed)
    await work.run_once()
    assert _offloaded(managed) == [0, 1]
    assert len(topic.copies.kept) == 2
    await work.remove("n", "t")
    assert work.topics == []


async def test_a_topic_that_is_opened_again_is_served_as_its_new_owner_has_it() -> None:
    topic, policies = Topic(closed=2), Policies(TopicPolicies(offload_above_bytes=0))
    topic.copies.blocked = asyncio.Event()
    former = await topic.open()
    async with AutomaticOffload(policies, interval_s=3600) as work:
        work.add("n", "t", former)
        await topic.copies.begun.wait()
        topic.sources.kept[2] = topic.ledger(2)
        managed = await topic.open()
        await managed.roll(3, 30, 3)  # fences the former one
        topic.copies.blocked.set()
        work.add("n", "t", managed)
        await topic.offloaded(3)
        assert work.topics == [("n", "t")]
    assert _offloaded(managed) == [0, 1, 2]


async def test_a_former_owner_that_is_fenced_late_takes_no_topic_from_its_successor() -> None:
    topic, policies = Topic(closed=2), Policies(TopicPolicies(offload_above_bytes=0))
    former, managed = await topic.open(), await topic.open()
    await managed.roll(3, 30, 3)
    work = AutomaticOffload(policies)
    work.add("n", "t", former)
    (late,) = await work._begin_round()
    work._topics["n", "t"].task = None  # as if its end could not be hurried
    work.add("n", "t", managed)
    await late
    assert work.topics == [("n", "t")]


async def test_a_topic_that_is_slow_holds_up_no_other() -> None:
    slow, other = Topic(closed=1), Topic(closed=1)
    slow.copies.blocked = asyncio.Event()
    policies = Policies(TopicPolicies(offload_above_bytes=0))
    slow_ledgers, other_ledgers = await slow.open(), await other.open()
    async with AutomaticOffload(policies, interval_s=3600) as work:
        work.add("n", "slow", slow_ledgers)
        await slow.copies.begun.wait()
        work.add("n", "other", other_ledgers)
        await other.offloaded(1)
        assert _offloaded(slow_ledgers) == []
        await work.remove("n", "slow")
        assert work.topics == [("n", "other")]


async def test_failures_are_told_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    topic, lost, unread = Topic(closed=1), Topic(closed=1), Topic(closed=1)
    policies = Policies(TopicPolicies(offload_above_bytes=0, delete_source_after_s=0), failing=1)
    managed, former = await topic.open(), await lost.open()
    present = await lost.open()
    await present.roll(1, 1, 5)
    source = topic.sources.kept.pop(0)
    work = AutomaticOffload(policies)
    work.add("n", "t", managed)
    work.add("n", "lost", former)
    work.add("bad", "unread", await unread.open())
    with pytest.raises(ConnectionError):
        await work.run_once()
    with caplog.at_level(logging.WARNING):
        await work.run_once()
    assert "offload of topic n/t failed, retrying in 60 s" in caplog.text
    assert "topic n/lost is not served any longer" in caplog.text
    assert "topic bad/unread is not offloaded: key 'bad'" in caplog.text
    assert work.topics == [("n", "t"), ("bad", "unread")]
    topic.sources.kept[0] = source
    await work.run_once()
    assert _offloaded(managed) == [0]


async def test_policies_that_can_not_be_read_end_no_loop(caplog: pytest.LogCaptureFixture) -> None:
    topic = Topic(closed=1)
    policies = Policies(TopicPolicies(offload_above_bytes=0), failing=1)
    managed = await topic.open()
    async with AutomaticOffload(policies, interval_s=3600) as work:
        await policies.loaded.wait()
        work.add("n", "t", managed)
        await topic.offloaded(1)
    assert "policies can't be read, retrying in 3600 s" in caplog.text


# ---- deletion of sources ----


async def offload(
    topic: Topic, timer: list[int], *, delete_source_after_s: int | None
) -> tuple[AutomaticOffload, ManagedLedger]:
    """Offload all closed ledgers of a topic, by a clock that the test sets."""
    policies = TopicPolicies(offload_above_bytes=0, delete_source_after_s=delete_source_after_s)
    managed = await topic.open()
    work = AutomaticOffload(Policies(policies), timer_ms=lambda: timer[0])
    work.add("n", "t", managed)
    await work.run_once()
    return work, managed


async def test_no_jump_of_a_wall_clock_deletes_a_source() -> None:
    topic, timer = Topic(closed=2), [0]
    work, _ = await offload(topic, timer, delete_source_after_s=3600)
    topic.now_ms += 400 * DAY_MS
    await work.run_once()
    timer[0] += 3_599_999
    await work.run_once()
    assert set(topic.sources.kept) == {0, 1}
    timer[0] += 1
    await work.run_once()
    assert topic.sources.kept == {}


async def test_a_clock_that_was_set_back_deletes_no_source_early() -> None:
    topic, timer = Topic(closed=1), [0]
    work, _ = await offload(topic, timer, delete_source_after_s=3600)
    timer[0] += DAY_MS
    await work.run_once()
    assert set(topic.sources.kept) == {0}


async def test_a_copy_that_was_made_again_is_watched_from_then_on() -> None:
    topic, timer = Topic(closed=1), [0]
    work, managed = await offload(topic, timer, delete_source_after_s=10)
    timer[0] += 60_000
    topic.now_ms += 60_000
    info = managed.ledgers[0]
    assert info.context is not None
    managed.ledgers[0] = info.with_context(None)
    await work.run_once()
    topic.now_ms += 60_000
    await work.run_once()
    assert set(topic.sources.kept) == {0}


async def test_sources_stay_without_a_policy_for_them() -> None:
    topic, timer = Topic(closed=1), [0]
    work, _ = await offload(topic, timer, delete_source_after_s=None)
    timer[0] += DAY_MS
    topic.now_ms += DAY_MS
    await work.run_once()
    assert set(topic.sources.kept) == {0}
