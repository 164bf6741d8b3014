"""Continuous backup: a committed prefix without gaps, whatever happens to leaders and bucket."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from structlog.testing import capture_logs

from streammeta.controller.backup import uploader
from streammeta.controller.backup.chains import chain_to, list_spans
from streammeta.storage.cluster_files.backup_files import SegmentName
from tests.backup.backup_world import FOLDER
from tests.backup.upload_world import DAY_MS, DOWN, FlakyStore, UploadWorld
from tests.kit.memory_store import MemoryObjectStore
from tests.kit.seeds import seeds
from tests.monitoring.sampled import SOURCES, registry_of
from tests.monitoring.test_alerts import ALERTS

BUCKET_MS = 1_700_000_000_000


async def test_everything_committed_is_there_after_each_interval() -> None:
    world = await UploadWorld().start()
    for _ in range(3):
        await world.write(5)
        await world.step()
        assert world.restorable_end() == world.committed
        status = world.backup.status
        assert status is not None
        assert (status.behind_entries, status.behind_ms, status.problem) == (0, 0, "")
    objects = world.store.objects()
    await world.step()
    assert world.store.objects() == objects, "nothing new, nothing put"


async def test_an_entry_that_is_not_committed_is_never_put() -> None:
    world = await UploadWorld().start()
    await world.write(3)
    world.append_uncommitted()
    await world.step()
    assert world.restorable_end() == world.committed
    assert world.committed < world.world.log.next_offset
    world.change_leader()
    await world.write(2)
    await world.step()
    assert world.restorable_end() == world.committed


async def test_a_segment_is_put_before_its_manifest_and_a_lone_one_is_no_harm() -> None:
    store = FlakyStore()
    world = await UploadWorld(store).start()
    await world.write(3)
    store.down_for = ".json"
    await world.step()
    (lone,) = world.archive.inventory().unfinished
    assert isinstance(lone, SegmentName)
    assert world.restorable_end() == -1
    assert world.backup.status is not None
    assert world.backup.status.problem == str(DOWN)
    store.down_for = ""
    world.change_leader()
    await world.write(1)
    await world.step()
    assert world.restorable_end() == world.committed
    for name in world.archive.inventory().segments:
        keys = [FOLDER.key(name), FOLDER.manifest_key(name)]
        assert [key for key in store.put_keys if key in keys] == keys


@pytest.mark.parametrize("part", ["log/", ".json", "checkpoints/"])
async def test_a_put_whose_answer_was_lost_is_repeated(part: str) -> None:
    store = FlakyStore()
    world = await UploadWorld(store).start()
    await world.write(3)
    if part == "checkpoints/":
        world.checkpoint()
    store.down_for, store.is_late = part, True
    await world.step()
    assert world.backup.status is not None
    assert world.backup.status.problem == str(DOWN)
    store.down_for = ""
    await world.step()
    assert world.backup.status.problem == ""
    assert world.restorable_end() == world.committed


async def test_an_absent_bucket_is_caught_up_without_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader, "SEGMENT_BYTES", 50)
    monkeypatch.setattr(uploader, "READ_BYTES", 20)
    world = await UploadWorld().start()
    await world.write(2)
    await world.step()
    before = world.restorable_end()
    world.store.fail_next("put", DOWN, times=3)
    for number in range(1, 4):
        await world.write(20)
        await world.step()
        status = world.backup.status
        assert status is not None
        assert status.behind_entries == 20 * number
        assert status.behind_ms >= 10_000 * number
    assert world.restorable_end() == before
    await world.step()
    assert world.restorable_end() == world.committed
    assert len(world.archive.inventory().segments) > 5, "in pieces"


async def test_a_bucket_that_is_away_for_30_s_raises_the_alert_and_leaves_no_gap() -> None:
    store = FlakyStore()
    world = await UploadWorld(store).start()
    await world.write(3)
    await world.step()
    store.down_for = "backup"
    with capture_logs() as logs:
        for _ in range(4):
            assert not is_late(world), "not before 30 s"
            await world.write(5)
            await world.step()
        assert is_late(world)
        before = world.restorable_end()
        store.down_for = ""
        await world.step()
    assert not is_late(world)
    assert world.restorable_end() == world.committed > before
    (span,) = list_spans(world.archive.inventory())
    assert span == (0, world.committed), "no gap"
    events = [log["event"] for log in logs]
    assert [event for event in events if event.startswith("backup_")] == [
        *("backup_failed", "backup_late", "backup_works_again"),
    ]


def is_late(world: UploadWorld) -> bool:
    """Evaluate the rule of the alert on the leader's metrics."""
    (rule,) = [alert for alert in ALERTS if alert["alert"] == "StreammetaBackupLate"]
    name, above, limit = rule["expr"].split()
    assert above == ">"
    registry = registry_of(replace(SOURCES, backup=lambda: world.backup.status))
    value = registry.get_sample_value(name)
    assert value is not None
    return value > float(limit)


async def test_a_log_that_was_trimmed_meanwhile_begins_a_new_chain_with_a_checkpoint() -> None:
    world = await UploadWorld().start()
    await world.write(5)
    await world.step()
    first_end = world.restorable_end()
    world.store.fail_next("put", DOWN)
    await world.write(5)
    await world.step()
    await world.write(5)
    checkpoint = world.checkpoint()
    world.trim()
    await world.write(5)
    await world.step()
    assert world.restorable_end() == world.committed
    inventory = world.archive.inventory()
    assert [one.end_offset for one in inventory.checkpoints] == [checkpoint.end_offset]
    assert chain_to(inventory, first_end) is not None
    assert chain_to(inventory, first_end + 1) is None, "the pause can't be restored"


async def test_a_first_backup_of_a_trimmed_log_begins_with_its_checkpoint() -> None:
    world = await UploadWorld().start()
    await world.write(5)
    world.checkpoint()
    await world.write(2)
    world.trim()
    await world.step()
    assert world.restorable_end() == world.committed


async def test_checkpoints_follow_and_what_is_too_old_goes() -> None:
    world = await UploadWorld().start()
    ends = []
    for _ in range(8):
        await world.write(5)
        world.checkpoint()
        await world.step()
        ends.append(world.restorable_end())
        world.world.clock.advance(DAY_MS // 4)
    inventory = world.archive.inventory()
    kept = [checkpoint.end_offset for checkpoint in inventory.checkpoints]
    assert kept == ends[-5:], "a day back, from the newest checkpoint that is older"
    assert {segment.start_offset >= kept[0] for segment in inventory.segments} == {True}
    assert world.restorable_end() == world.committed


@pytest.mark.parametrize("days", [30, -30])
async def test_a_leader_whose_clock_is_wrong_removes_no_backup(days: int) -> None:
    world = await UploadWorld(MemoryObjectStore(lambda: BUCKET_MS)).start()
    for _ in range(4):
        await world.write(5)
        world.checkpoint()
        await world.step()
    files = world.archive.inventory().files
    world.world.clock.wall_ahead_ms += days * DAY_MS
    world.change_leader()
    with capture_logs() as logs:
        for _ in range(8):
            await world.write(5)
            world.checkpoint()
            await world.step()
    assert set(files) <= set(world.archive.inventory().files)
    (line,) = [log for log in logs if log["event"] == "clock_differs_from_bucket"]
    assert round(line["ahead_ms"] / DAY_MS) == days


async def test_a_backup_of_another_history_is_left_alone() -> None:
    world = await UploadWorld().start()
    await world.write(5)
    await world.step()
    other = await UploadWorld(world.store).start()
    before = world.store.objects()
    await other.step()
    assert other.backup.status is not None
    assert "this log at" in other.backup.status.problem
    other._written = 100
    await other.write(10)
    other.change_leader()
    await other.step()
    assert other.backup.status is not None
    assert "another history" in other.backup.status.problem
    assert world.store.objects() == before


async def only_a_checkpoint(entries: int) -> UploadWorld:
    """A backup that ends with a checkpoint: the log before it was trimmed ahead of the copy."""
    world = await UploadWorld().start()
    await world.write(entries)
    world.checkpoint()
    world.trim()
    await world.step()
    assert not world.archive.inventory().segments
    return world


@pytest.mark.parametrize("own_checkpoint", ["none", "before", "same", "behind"])
async def test_a_newest_checkpoint_of_another_history_is_left_alone(own_checkpoint: str) -> None:
    world = await only_a_checkpoint(5)
    other = await UploadWorld(world.store).start()
    other._written = 100
    await other.write(3)
    if own_checkpoint == "before":
        other.checkpoint()
        other.trim()
    await other.write(2)
    assert other.committed == world.committed
    if own_checkpoint == "same":
        other.checkpoint()
    await other.write(5)
    if own_checkpoint == "behind":
        other.checkpoint()
    before = world.store.objects()
    await other.step()
    assert other.backup.status is not None
    assert "another history" in other.backup.status.problem
    assert world.store.objects() == before


@pytest.mark.parametrize("own_checkpoint", ["same", "behind"])
async def test_a_newest_checkpoint_of_this_log_is_gone_on_from(own_checkpoint: str) -> None:
    world = await only_a_checkpoint(5)
    world.change_leader()
    await world.write(5)
    if own_checkpoint == "behind":
        world.checkpoint()
    await world.step()
    assert world.backup.status is not None
    assert world.backup.status.problem == ""
    assert world.restorable_end() == world.committed


async def test_a_log_whose_batches_end_elsewhere_is_another_history() -> None:
    world = await UploadWorld().start()
    await world.write(5)
    await world.step()
    other = await UploadWorld(world.store).start()
    await other.write(3)
    await other.write_together(3)
    assert world.committed not in [batch.end_offset for batch in other.world.log.batches]
    assert world.committed < other.committed
    await other.step()
    assert other.backup.status is not None
    assert "another history" in other.backup.status.problem


async def test_a_checkpoint_that_was_removed_meanwhile_is_tried_again() -> None:
    world = await UploadWorld().start()
    await world.write(2)
    gone = world.checkpoint()
    data = world.source.checkpoints[gone]
    world.source.checkpoints[gone] = b"damaged"
    await world.step()
    assert world.backup.status is not None
    assert "can't be backed up" in world.backup.status.problem
    world.source.checkpoints[gone] = data
    await world.step()
    assert world.restorable_end() == world.committed


async def test_two_leaders_may_write_at_the_same_time() -> None:
    world = await UploadWorld().start()
    await world.write(3)
    await world.step()
    old = world.backup
    await world.write(2)
    world.change_leader()
    await world.step()
    await world.write(2)
    # The old one still believes that it leads.
    old._on_leadership(True)
    await old.step()
    await world.step()
    assert world.restorable_end() == world.committed


@pytest.mark.parametrize("seed", seeds(2, slow=4))
async def test_any_history_leaves_whole_prefix(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader, "SEGMENT_BYTES", 300)
    monkeypatch.setattr(uploader, "READ_BYTES", 100)
    rng, store = Random(seed), FlakyStore()
    world = await UploadWorld(store).start()
    reached = -1
    for _ in range(40):
        match rng.choice(("write", "write", "step", "step", "step", "leader", "trim", "flaky")):
            case "write":
                await world.write(rng.randrange(1, 12))
                if rng.random() < 0.3:
                    world.checkpoint()
            case "step":
                await world.step()
            case "leader":
                if rng.random() < 0.5:
                    world.append_uncommitted()
                world.change_leader()
            case "trim":
                world.checkpoint()
                world.trim()
            case "flaky":
                store.down_for = rng.choice(("", "", ".json", "log/", "checkpoints/", "backup"))
                store.is_late = rng.random() < 0.5
        end = world.restorable_end()
        assert end >= reached, "what was restorable stays so"
        reached = end
    store.down_for = ""
    await world.step()
    await world.step()
    assert world.restorable_end() == world.committed
