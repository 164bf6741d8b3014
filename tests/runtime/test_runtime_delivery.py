"""Every committed batch is delivered once and in order, whatever snapshots come in between."""

import random

import pytest

from streammeta.controller.errors import InvariantError
from streammeta.controller.ids import EndOffset, Epoch, SnapshotId
from streammeta.controller.quorum.log_view import LogStart, LogView
from streammeta.controller.quorum.messages import Batch, BatchKind
from streammeta.controller.runtime.replication.delivery import (
    Delivery,
    HandOn,
    LoadSnapshot,
    ReadForDelivery,
)


def batch(base: int, count: int = 1, epoch: int = 1) -> Batch:
    return Batch(EndOffset(base), Epoch(epoch), BatchKind.DATA, (b"x",) * count)


def snapshot(end: int, epoch: int = 1) -> SnapshotId:
    return SnapshotId(EndOffset(end), Epoch(epoch))


def log_of(*batches: Batch, start: int = 0, tail_from: int = 0) -> LogView:
    return LogView(
        LogStart(
            start_offset=EndOffset(start),
            end_offset=batches[-1].end_offset,
            tail=tuple(item for item in batches if item.base_offset >= tail_from),
        ),
        tail_bytes=1 << 20,
    )


def test_nothing_is_delivered_before_the_newest_snapshot_is_loaded() -> None:
    log, delivery = log_of(batch(5), batch(6), start=5), Delivery(snapshot(6))
    assert delivery.next(log, EndOffset(7)) == LoadSnapshot(snapshot(6))
    assert delivery.next(log, EndOffset(7)) is None
    assert not delivery.is_caught_up(EndOffset(0))
    delivery.loaded(snapshot(6))
    assert delivery.next(log, EndOffset(7)) == HandOn((batch(6),))
    assert delivery.is_caught_up(EndOffset(7))


def test_what_is_not_in_memory_is_read_and_cut_at_the_high_watermark() -> None:
    log, delivery = log_of(batch(0), batch(1), batch(2), tail_from=2), Delivery(None)
    assert delivery.next(log, EndOffset(2)) == ReadForDelivery(EndOffset(0))
    assert delivery.next(log, EndOffset(2)) is None
    read = delivery.was_read((batch(0), batch(1), batch(2)), EndOffset(2))
    assert read == HandOn((batch(0), batch(1)))


def test_a_snapshot_installed_during_a_read_or_a_load_takes_its_place() -> None:
    log, delivery = log_of(batch(0), batch(1), tail_from=1), Delivery(None)
    assert delivery.next(log, EndOffset(1)) == ReadForDelivery(EndOffset(0))
    delivery.installed(snapshot(9))
    assert delivery.was_read((), EndOffset(9)) is None
    assert delivery.next(log, EndOffset(9)) == LoadSnapshot(snapshot(9))
    delivery.installed(snapshot(12, 2))
    assert delivery.is_superseded(snapshot(9))
    delivery.loaded(snapshot(9))
    assert delivery.is_loading
    assert delivery.next(log, EndOffset(12)) == LoadSnapshot(snapshot(12, 2))
    delivery.loaded(snapshot(12, 2))
    assert (delivery.end_offset, delivery.epoch, delivery.is_loading) == (12, 2, False)


@pytest.mark.parametrize("found", [(), (batch(1),)])
def test_a_gap_is_a_defect(found: tuple[Batch, ...]) -> None:
    log, delivery = log_of(batch(0), batch(1), tail_from=1), Delivery(None)
    assert delivery.next(log, EndOffset(2)) == ReadForDelivery(EndOffset(0))
    with pytest.raises(InvariantError, match="batch"):
        delivery.was_read(found, EndOffset(2))


def test_any_order_of_reads_snapshots_and_commits_delivers_each_offset_once() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        batches: list[Batch] = []
        while len(batches) < 20:
            end = batches[-1].end_offset if batches else 0
            batches.append(batch(end, rng.randint(1, 3)))
        ends = [item.end_offset for item in batches]
        first = rng.choice([None, *ends[:10]])
        delivery = Delivery(None if first is None else snapshot(first))
        covered = 0
        for high_watermark in sorted(rng.sample(ends, 6)):
            if first is not None and high_watermark < first:
                continue
            log = log_of(*batches, tail_from=rng.choice(ends))
            while step := delivery.next(log, high_watermark):
                if rng.random() < 0.2 and high_watermark > delivery.end_offset:
                    delivery.installed(snapshot(high_watermark))
                match step:
                    case LoadSnapshot(snapshot_id=loaded):
                        delivery.loaded(loaded)
                        assert loaded.end_offset >= covered, f"seed {seed}"
                        covered = loaded.end_offset
                        continue
                    case ReadForDelivery(start_offset=start):
                        rest = tuple(item for item in batches if item.base_offset >= start)
                        handed = delivery.was_read(rest, high_watermark)
                    case HandOn():
                        handed = step
                for item in handed.batches if handed else ():
                    assert item.base_offset == covered, f"seed {seed}"
                    covered = item.end_offset
            assert covered == high_watermark == delivery.end_offset, f"seed {seed}"
