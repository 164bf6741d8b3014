"""Hours of a node on a virtual clock: slow streams are rewritten rarely, objects stay few.

The policy is held against AutoMQ's with its defaults: all set objects younger than 120 minutes are
merged every 5 minutes, and every stream of older ones gets a stream object. A steady slow stream is
then rewritten 12.5 times by merges, (1 + 2 + ... + 24) / 24, and once more by the split.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from streammeta.storage.compaction.selection import MIB, SelectionConfig
from tests.storage.compaction_simulation import (
    SimulatedNode,
    automq_policy,
    streammeta_policy,
)

MOST_REWRITES = 12.5 / 2


def slow_streams(count: int = 20, rate: int = 100) -> NDArray[np.int64]:
    return np.full(count, rate, dtype=np.int64)


def skewed_streams(count: int, total: int) -> NDArray[np.int64]:
    """Rates of so many streams that fall with their rank; `total` bytes a second in all."""
    shares = 1 / np.arange(1, count + 1)
    rates: NDArray[np.int64] = (shares / shares.sum() * total).astype(np.int64)
    return np.maximum(rates, 1)


def after(hours: float, node: SimulatedNode) -> SimulatedNode:
    node.run(hours)
    return node


def test_the_model_of_automq_rewrites_as_often_as_is_known_of_it() -> None:
    node = after(48, SimulatedNode(slow_streams(), automq_policy))
    assert 12.5 <= node.amplification().mean() <= 13.5


@pytest.mark.parametrize("hours_to_split", [2, 24])
def test_steady_slow_streams_are_rewritten_half_as_often_at_most(hours_to_split: int) -> None:
    policy = streammeta_policy(SelectionConfig(split_after_s=hours_to_split * 3600.0))
    node = after(48, SimulatedNode(slow_streams(), policy))
    assert node.amplification().max() <= MOST_REWRITES
    # Every byte but those of the last hours has been in a merge and in a split.
    assert node.amplification().min() >= 2


def test_how_often_one_asks_does_not_matter() -> None:
    often, seldom = (
        after(48, SimulatedNode(slow_streams(), streammeta_policy(), compact_every_s=seconds))
        for seconds in (60, 1200)
    )
    assert often.amplification().max() <= MOST_REWRITES
    assert often.amplification().max() <= seldom.amplification().max() + 1


def test_uploads_every_second_are_as_cheap() -> None:
    node = SimulatedNode(slow_streams(), streammeta_policy(), upload_every_s=1)
    node.run(26)
    assert node.amplification().max() <= MOST_REWRITES
    assert node.most_objects <= 30


@pytest.mark.parametrize("total", [100_000, 1_000_000, 5_000_000])
def test_slow_streams_among_fast_ones_are_as_cheap(total: int) -> None:
    rates = skewed_streams(300, total)
    ours, automq = (
        after(26, SimulatedNode(rates, policy)) for policy in (streammeta_policy(), automq_policy)
    )
    assert ours.amplification().max() <= MOST_REWRITES
    assert ours.amplification()[-1] <= automq.amplification()[-1] / 2
    assert ours.rewritten.sum() < automq.rewritten.sum()
    assert len(ours.stream_objects) < len(automq.stream_objects)
    assert ours.most_objects <= 30


def test_a_slow_stream_gets_a_stream_object_a_day() -> None:
    ours, automq = (
        after(49, SimulatedNode(slow_streams(), policy))
        for policy in (streammeta_policy(), automq_policy)
    )
    assert len(ours.stream_objects) == 2 * 20
    assert len(automq.stream_objects) >= 23 * 20
    sizes = [size for _, size in ours.stream_objects]
    assert min(sizes) >= 21 * 3600 * 100, "most of a day is in each"


def test_streams_leave_as_soon_as_they_are_large() -> None:
    rates = np.array([1_000_000, 10], dtype=np.int64)
    node = after(2, SimulatedNode(rates, streammeta_policy()))
    of_fast = [size for stream, size in node.stream_objects if stream == 0]
    assert min(of_fast) > 8 * MIB
    assert sum(of_fast) >= node.uploaded[0] - 8 * 60 * rates[0]
    assert node.amplification()[0] <= 1


@pytest.mark.parametrize("seed", range(6))
def test_nobody_starves_and_objects_stay_few_however_uploads_come(seed: int) -> None:
    dice = random.Random(seed)
    shape = np.random.default_rng(seed)
    rates = (10 ** shape.uniform(0, dice.uniform(2, 5), 50)).astype(np.int64)
    config = SelectionConfig(
        max_set_objects=dice.choice([10, 40]),
        split_after_s=6 * 3600.0,
        max_group_bytes=dice.choice([256 * MIB, 4096 * MIB]),
    )
    node = SimulatedNode(
        rates, streammeta_policy(config), upload_every_s=dice.choice([5, 60, 1800])
    )
    # Nights without uploads, days with few or many.
    pace = [dice.choice([0.0, 0.02, 0.3, 1.0]) for _ in range(40)]
    node.run(40, lambda second: dice.random() < pace[second // 3600 % 40])
    assert node.oldest_s * 1000 <= config.split_after_s * 1000 + 300_000
    full = -(-int(node.uploaded.sum()) // (config.max_group_bytes // 10))
    assert node.most_objects <= 2 * config.max_set_objects + full
    held = sum(each.held.sum() for each in node.objects)
    assert held + sum(size for _, size in node.stream_objects) == node.uploaded.sum()
    node.now_s += 7 * 3600
    node.compact()
    assert not node.objects, "a node that has gone silent ends without set objects"
