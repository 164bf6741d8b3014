"""The policy of compaction, case by case, and over hours of a node on a virtual clock.

The policy is held against AutoMQ's with its defaults: all set objects younger than 120 minutes are
merged every 5 minutes, and every stream of older ones gets a stream object. A steady slow stream is
then rewritten 12.5 times by merges, (1 + 2 + ... + 24) / 24, and once more by the split.
A simulated object is its bytes of each stream; there is no real object, index or map.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from streammeta.storage.compaction.selection import (
    MIB,
    Group,
    GroupKind,
    Selection,
    SelectionConfig,
    StreamSetObjects,
    select_stream_set_objects,
)
from tests.kit.seeds import seeds

HOUR_MS = 3_600_000
NOW_MS = 1_000 * HOUR_MS
DAY_MS = 24 * HOUR_MS
Row = tuple[int, int, int, int, int]


def rows_of(
    sizes: Iterable[int], *, ages_ms: Sequence[int] | None = None, ranges: int = 10
) -> list[Row]:
    """Return uploads 1, 2, 3, ... of these sizes, a minute old if nothing else is said."""
    return [
        (number, number, NOW_MS - (ages_ms[number - 1] if ages_ms else 60_000), size, ranges)
        for number, size in enumerate(sizes, 1)
    ]


def select(
    rows: Iterable[Row], config: SelectionConfig | None = None, set_aside: Iterable[int] = ()
) -> Selection:
    chosen = config or SelectionConfig()
    return select_stream_set_objects(
        StreamSetObjects.of_rows(rows), chosen, NOW_MS, tuple(set_aside)
    )


def ids_of(selection: Selection, kind: GroupKind) -> list[tuple[int, ...]]:
    return [group.object_ids for group in selection.groups if group.kind is kind]


def test_the_order_of_the_node_counts_and_not_that_of_the_listing() -> None:
    rows = rows_of([MIB] * 20)
    # The result of a compaction has a new id and the place of its first source.
    rows[3] = (90, 4, NOW_MS, 30 * MIB, 10)
    shuffled = random.Random(1).sample(rows, len(rows))
    assert select(shuffled) == select(rows)
    assert ids_of(select(rows), GroupKind.MERGE) == [tuple(range(5, 21))]


def test_an_object_listed_twice_is_there_once_as_listed_last() -> None:
    rows = rows_of([MIB] * 8)
    (group,) = select([(3, 3, NOW_MS, 1, 1), *rows]).groups
    assert group.object_ids == tuple(range(1, 9))
    assert group.object_size == 8 * MIB


def test_no_group_reaches_across_an_object_set_aside() -> None:
    rows = rows_of([MIB] * 18)
    assert ids_of(select(rows, set_aside=[9]), GroupKind.MERGE) == [
        tuple(range(1, 9)),
        tuple(range(10, 19)),
    ]
    old = rows_of([MIB] * 3, ages_ms=[DAY_MS] * 3)
    assert ids_of(select(old, set_aside=[2]), GroupKind.SPLIT) == [(1,), (3,)]


def test_the_old_go_along_with_the_oldest_and_the_young_stay() -> None:
    ages = [DAY_MS, 10 * HOUR_MS, 2 * HOUR_MS, HOUR_MS, HOUR_MS]
    selection = select(rows_of([500, 400, 300, 200, 100], ages_ms=ages))
    assert selection.groups == (Group(GroupKind.SPLIT, (1, 2, 3), 0, 1200),)
    assert selection.waiting == (4, 5)


def test_the_old_stay_while_none_is_overdue() -> None:
    ages = [DAY_MS - 1, 10 * HOUR_MS, 2 * HOUR_MS]
    assert select(rows_of([500, 40, 3], ages_ms=ages)).groups == ()


def test_objects_too_large_to_grow_are_split_when_they_fill_a_group() -> None:
    config = SelectionConfig(growth=4, max_group_bytes=100)
    waiting = select(rows_of([30, 30, 30]), config)
    assert waiting.groups == ()
    selection = select(rows_of([1, 30, 30, 30, 30, 2], ranges=2), config)
    # Its three objects have six ranges and 90 bytes: ranges of 90 / 6 / 4 bytes are crumbs.
    assert selection.groups == (Group(GroupKind.SPLIT, (2, 3, 4), 3, 90),)
    assert selection.waiting == (1, 5, 6)


def test_crumbs_of_what_is_split_are_a_small_part_of_it() -> None:
    config = SelectionConfig(growth=4, max_group_bytes=10_000)
    rows = [(i, i, NOW_MS, 3_000, i * 10) for i in range(1, 5)]
    (group,) = select(rows, config).groups
    ranges = sum(row[4] for row in rows[: len(group.object_ids)])
    assert group.kind is GroupKind.SPLIT
    assert 0 < group.split_size * ranges <= group.object_size / config.growth


def test_what_is_overdue_comes_first_then_the_cheapest_merge() -> None:
    young = 60_000
    sizes = [9 * MIB, 7 * MIB, *[3 * MIB] * 8, 99 * MIB, *[MIB] * 8]
    ages = [DAY_MS, DAY_MS, *[young] * 17]
    kinds = [
        (group.kind, group.object_size) for group in select(rows_of(sizes, ages_ms=ages)).groups
    ]
    assert kinds == [
        (GroupKind.SPLIT, 16 * MIB),
        (GroupKind.MERGE, 8 * MIB),
        (GroupKind.MERGE, 24 * MIB),
    ]


@pytest.mark.parametrize("seed", seeds(20, slow=40))
def test_laws_hold_for_any_objects(seed: int) -> None:
    dice = random.Random(seed)
    rows, config = random_rows(dice), random_config(dice)
    aside = {row[0] for row in rows if dice.random() < dice.choice([0, 0.05])}
    selection = select(rows, config, aside)
    order = [row[0] for row in sorted(rows, key=lambda row: (row[1], row[0]))]
    size_of = {row[0]: row[3] for row in rows}
    age_of = {row[0]: NOW_MS - row[2] for row in rows}

    selected = [object_id for group in selection.groups for object_id in group.object_ids]
    assert sorted([*selected, *selection.waiting, *aside]) == sorted(order), "each is in one place"
    for group in selection.groups:
        first = order.index(group.object_ids[0])
        assert tuple(order[first : first + len(group.object_ids)]) == group.object_ids
        assert group.object_size == sum(size_of[object_id] for object_id in group.object_ids)
        assert_within_limits(group, rows, config)
        if group.kind is GroupKind.MERGE:
            assert len(group.object_ids) >= 2
            assert group.split_size == config.split_size
    split = {object_id for ids in ids_of(selection, GroupKind.SPLIT) for object_id in ids}
    overdue = {object_id for object_id in order if age_of[object_id] >= config.split_after_s * 1000}
    assert overdue - aside <= split, "none starves"


@pytest.mark.parametrize("seed", seeds(13, slow=27))
def test_every_merge_that_pays_is_made_and_no_other(seed: int) -> None:
    dice = random.Random(1_000 + seed)
    rows = [(i, i, NOW_MS, int(10 ** dice.uniform(0, 4)), 1) for i in range(1, 40)]
    config = SelectionConfig(growth=dice.choice([2, 4, 8]))
    selection = select(rows, config)
    sizes = [row[3] for row in rows]
    merged = ids_of(selection, GroupKind.MERGE)
    for ids in merged:
        of_group = [sizes[object_id - 1] for object_id in ids]
        assert sum(of_group) >= config.growth * max(of_group)
    waiting = set(selection.waiting)
    for start in range(1, len(rows) + 1):
        stop = start
        while stop in waiting:
            stop += 1
            run = sizes[start - 1 : stop - 1]
            assert len(run) < 2 or sum(run) < config.growth * max(run), (start, stop)


@pytest.mark.parametrize("seed", seeds(6, slow=14))
def test_no_more_stay_than_wanted_whatever_their_sizes(seed: int) -> None:
    dice = random.Random(2_000 + seed)
    # Sizes as on a ruler, 1 2 1 4 1 2 1, pay least of all.
    sizes = [(i & -i) * dice.choice([1, 1, 3]) for i in range(1, dice.choice([100, 700, 3_000]))]
    wanted = dice.choice([1, 10, 100])
    selection = select(rows_of(sizes), SelectionConfig(max_set_objects=wanted))
    assert left_by(selection) <= max(wanted, -(-len(sizes) // 500))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"growth": 0.5}, "growth is 0.5, expected 1..1000"),
        ({"max_set_objects": 0}, "max_set_objects is 0, expected 1 or more"),
        ({"max_group_objects": 1}, "max_group_objects is 1, expected 2 or more"),
        ({"max_group_bytes": 0}, "max_group_bytes is 0, expected 1 or more"),
        ({"max_group_ranges": 0}, "max_group_ranges is 0, expected 1 or more"),
        ({"split_size": -1}, "split_size is -1, expected 0 or more"),
        ({"split_along_s": -1}, "split_along_s is -1, expected 0 or more"),
        ({"split_after_s": 5}, "split_after_s is 5, expected at least split_along_s, 7200"),
    ],
)
def test_what_can_not_work_is_refused(wrong: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SelectionConfig(**wrong)


def left_by(selection: Selection) -> int:
    """Return how many objects there are when every group has become one."""
    return len(selection.groups) + len(selection.waiting)


def random_rows(dice: random.Random) -> list[Row]:
    count = dice.choice([1, 2, 10, 60, 300])
    youngest = dice.choice([0, HOUR_MS, 30 * HOUR_MS])
    return [
        (
            number if dice.random() < 0.7 else 10_000 + number,
            number,
            NOW_MS - youngest - (count - number) * dice.choice([60_000, 600_000]),
            int(10 ** dice.uniform(0, dice.choice([2, 9]))),
            dice.choice([1, 100, 20_000]),
        )
        for number in range(count)
    ]


def random_config(dice: random.Random) -> SelectionConfig:
    along = dice.choice([0, HOUR_MS, DAY_MS])
    return SelectionConfig(
        growth=dice.choice([1, 2, 8, 16]),
        max_set_objects=dice.choice([1, 5, 100]),
        max_group_objects=dice.choice([2, 10, 500]),
        max_group_bytes=dice.choice([100, 10**6, 10**11]),
        max_group_ranges=dice.choice([100, 10**6]),
        split_along_s=along / 1000,
        split_after_s=(along + dice.choice([0, HOUR_MS, DAY_MS])) / 1000,
    )


def assert_within_limits(group: Group, rows: Sequence[Row], config: SelectionConfig) -> None:
    if len(group.object_ids) == 1:
        return
    wanted = set(group.object_ids)
    assert len(group.object_ids) <= config.max_group_objects
    assert group.object_size <= config.max_group_bytes
    assert sum(row[4] for row in rows if row[0] in wanted) <= config.max_group_ranges


MOST_REWRITES = 12.5 / 2
_INDEX_ENTRY, _FOOTER = 36, 48


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
    """A broker that uploads `rates` bytes a second of each stream and compacts by the policy."""

    rates: NDArray[np.int64]
    config: SelectionConfig = field(default_factory=SelectionConfig)
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
        rows = StreamSetObjects.of_rows(object_.row for object_ in self.objects)
        for group in select_stream_set_objects(rows, self.config, self.now_s * 1000).groups:
            self._carry_out(group)
        self.most_objects = max(self.most_objects, len(self.objects))
        ages = [self.now_s - object_.data_time_ms // 1000 for object_ in self.objects]
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
        sources = [object_ for object_ in self.objects if object_.object_id in wanted]
        assert len(sources) == len(group.object_ids), "a group names objects that are there"
        held = np.sum([source.held for source in sources], axis=0)
        self.rewritten += held
        leave = held > group.split_size
        self.stream_objects += [(int(at), int(held[at])) for at in np.flatnonzero(leave)]
        place = self.objects.index(sources[0])
        assert self.objects[place : place + len(sources)] == sources, "a group is of neighbours"
        self._next_id += 1
        rest = SimulatedObject(
            self._next_id,
            min(source.order_id for source in sources),
            min(source.data_time_ms for source in sources),
            np.where(leave, 0, held),
        )
        self.objects[place : place + len(sources)] = [rest] if rest.held.any() else []


def slow_streams(count: int = 20, rate: int = 100) -> NDArray[np.int64]:
    return np.full(count, rate, dtype=np.int64)


def skewed_streams(count: int, total: int) -> NDArray[np.int64]:
    """Rates of so many streams that fall with their rank; `total` bytes a second in all."""
    shares = 1 / np.arange(1, count + 1)
    rates: NDArray[np.int64] = (shares / shares.sum() * total).astype(np.int64)
    return np.maximum(rates, 1)


@pytest.mark.parametrize("total", [None, 100_000, 5_000_000], ids=str)
@pytest.mark.parametrize(
    "often",
    [{}, {"compact_every_s": 60}, {"compact_every_s": 1200}, {"upload_every_s": 1}],
    ids=str,
)
def test_slow_streams_are_rewritten_half_as_often_at_most(
    total: int | None, often: dict[str, Any]
) -> None:
    node = SimulatedNode(slow_streams() if total is None else skewed_streams(300, total), **often)
    node.run(26)
    assert node.amplification().max() <= MOST_REWRITES
    assert node.most_objects <= 30


def test_a_slow_stream_gets_a_stream_object_a_day() -> None:
    node = SimulatedNode(slow_streams())
    node.run(49)
    assert len(node.stream_objects) == 2 * 20
    assert min(size for _, size in node.stream_objects) >= 21 * 3600 * 100, "most of a day"
    # Every byte but those of the last hours has been in a merge and in a split.
    assert node.amplification().min() >= 2
    assert node.amplification().max() <= MOST_REWRITES


def test_streams_leave_as_soon_as_they_are_large() -> None:
    rates = np.array([1_000_000, 10], dtype=np.int64)
    node = SimulatedNode(rates)
    node.run(2)
    of_fast = [size for stream, size in node.stream_objects if stream == 0]
    assert min(of_fast) > 8 * MIB
    assert sum(of_fast) >= node.uploaded[0] - 8 * 60 * rates[0]
    assert node.amplification()[0] <= 1


@pytest.mark.parametrize("seed", seeds(2, slow=4))
def test_nobody_starves_and_objects_stay_few_however_uploads_come(seed: int) -> None:
    dice = random.Random(seed)
    shape = np.random.default_rng(seed)
    rates = (10 ** shape.uniform(0, dice.uniform(2, 5), 50)).astype(np.int64)
    config = SelectionConfig(
        max_set_objects=dice.choice([10, 40]),
        split_after_s=6 * 3600.0,
        max_group_bytes=dice.choice([256 * MIB, 4096 * MIB]),
    )
    node = SimulatedNode(rates, config, upload_every_s=dice.choice([5, 60, 1800]))
    # Nights without uploads, days with few or many.
    pace = [dice.choice([0.0, 0.02, 0.3, 1.0]) for _ in range(40)]
    node.run(40, lambda second: dice.random() < pace[second // 3600 % 40])
    assert node.oldest_s * 1000 <= config.split_after_s * 1000 + 300_000
    full = -(-int(node.uploaded.sum()) // (config.max_group_bytes // 10))
    assert node.most_objects <= 2 * config.max_set_objects + full
    held = sum(object_.held.sum() for object_ in node.objects)
    assert held + sum(size for _, size in node.stream_objects) == node.uploaded.sum()
    node.now_s += 7 * 3600
    node.compact()
    assert not node.objects, "a node that has gone silent ends without set objects"
