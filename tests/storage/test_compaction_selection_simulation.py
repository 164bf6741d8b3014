"""Hours of a node on a virtual clock: slow streams are rewritten rarely, objects stay few.

The policy is held against AutoMQ's with its defaults: all set objects younger than 120 minutes are
merged every 5 minutes, and every stream of older ones gets a stream object. A steady slow stream is
then rewritten 12.5 times by merges, (1 + 2 + ... + 24) / 24, and once more by the split.
A simulated object is its bytes of each stream; there is no real object, index or map.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray

from streammeta.storage.compaction.selection import (
    MIB,
    Group,
    GroupKind,
    SelectionConfig,
    SetObjects,
    select_set_objects,
)

MOST_REWRITES = 12.5 / 2
_INDEX_ENTRY, _FOOTER = 36, 48
_AUTOMQ_SPLIT_AFTER_MS = 120 * 60_000

Policy: TypeAlias = Callable[[SetObjects, int], Sequence[Group]]


@dataclass(slots=True)
class SimulatedObject:
    """A set object: the bytes it has of each stream."""

    object_id: int
    order_id: int
    data_time_ms: int
    held: NDArray[np.int64]

    @property
    def row(self) -> tuple[int, int, int, int, int]:
        """What the map tells of it."""
        ranges = int(np.count_nonzero(self.held))
        size = int(self.held.sum()) + ranges * _INDEX_ENTRY + _FOOTER
        return self.object_id, self.order_id, self.data_time_ms, size, ranges


@dataclass(slots=True)
class SimulatedNode:
    """A broker that uploads `rates` bytes a second of each stream and compacts by a policy."""

    rates: NDArray[np.int64]
    policy: Policy
    upload_every_s: int = 60
    compact_every_s: int = 300
    now_s: int = 0
    objects: list[SimulatedObject] = field(default_factory=list)
    stream_objects: list[tuple[int, int]] = field(default_factory=list)
    """Stream and bytes of each."""
    rewritten: NDArray[np.int64] = field(init=False)
    """Bytes that compactions wrote of each stream."""
    uploaded: NDArray[np.int64] = field(init=False)
    most_objects: int = 0
    """Most that were left by a compaction."""
    oldest_s: int = 0
    """Greatest age of an object that a compaction left."""
    _next_id: int = 0

    def __post_init__(self) -> None:
        self.rewritten = np.zeros_like(self.rates)
        self.uploaded = np.zeros_like(self.rates)

    def run(self, hours: float, uploads: Callable[[int], bool] = lambda _second: True) -> None:
        """Let time pass; `uploads` says in which seconds the node has anything to upload."""
        for _ in range(int(hours * 3600)):
            self.now_s += 1
            if self.now_s % self.upload_every_s == 0 and uploads(self.now_s):
                self._upload()
            if self.now_s % self.compact_every_s == 0:
                self.compact()

    def compact(self) -> None:
        """Ask the policy and do as it says."""
        rows = SetObjects.of_rows(each.row for each in self.objects)
        for group in self.policy(rows, self.now_s * 1000):
            self._carry_out(group)
        self.most_objects = max(self.most_objects, len(self.objects))
        ages = [self.now_s - each.data_time_ms // 1000 for each in self.objects]
        self.oldest_s = max([self.oldest_s, *ages])

    def amplification(self) -> NDArray[np.float64]:
        """Return how often each stream's bytes were rewritten."""
        return self.rewritten / np.maximum(self.uploaded, 1)

    def _upload(self) -> None:
        held = self.rates * self.upload_every_s
        self.uploaded += held
        self._next_id += 1
        self.objects.append(SimulatedObject(self._next_id, self._next_id, self.now_s * 1000, held))

    def _carry_out(self, group: Group) -> None:
        wanted = set(group.object_ids)
        sources = [each for each in self.objects if each.object_id in wanted]
        assert len(sources) == len(group.object_ids), "a group names objects that are there"
        held = np.sum([each.held for each in sources], axis=0)
        self.rewritten += held
        leave = held > group.split_size
        self.stream_objects += [(int(at), int(held[at])) for at in np.flatnonzero(leave)]
        place = self.objects.index(sources[0])
        assert self.objects[place : place + len(sources)] == sources, "a group is of neighbours"
        self._next_id += 1
        rest = SimulatedObject(
            self._next_id,
            min(each.order_id for each in sources),
            min(each.data_time_ms for each in sources),
            np.where(leave, 0, held),
        )
        self.objects[place : place + len(sources)] = [rest] if rest.held.any() else []


def streammeta_policy(config: SelectionConfig | None = None) -> Policy:
    """Return the product's policy."""
    chosen = config or SelectionConfig()
    return lambda objects, now_ms: select_set_objects(objects, chosen, now_ms).groups


def automq_policy(objects: SetObjects, now_ms: int) -> list[Group]:
    """Merge all that are younger than 120 minutes whenever asked; split every other one alone."""
    ids, sizes = objects.object_id.tolist(), objects.object_size.tolist()
    old = (now_ms - objects.data_time_ms >= _AUTOMQ_SPLIT_AFTER_MS).tolist()
    rows = list(zip(ids, sizes, old, strict=True))
    splits = [Group(GroupKind.SPLIT, (each,), 0, size) for each, size, is_old in rows if is_old]
    young = [(each, size) for each, size, is_old in rows if not is_old]
    if len(young) < 2:
        return splits
    together = tuple(each for each, _ in young)
    size = sum(size for _, size in young)
    return [*splits, Group(GroupKind.MERGE, together, 8 * MIB, size)]


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
