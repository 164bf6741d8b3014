"""Groups of stream objects, the turns of streams, and the parts of a new object."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from streammeta.storage.compaction.copy_plan import (
    CopiedPart,
    CopyPlan,
    CopyRules,
    SourceRange,
    WrittenPart,
    plan_copy,
)
from streammeta.storage.compaction.stream_objects import (
    GIB,
    LOCAL_BUCKET,
    MIB,
    Group,
    GroupRules,
    StreamCompaction,
    StreamObject,
    StreamSchedule,
    after_turn,
    cut_groups,
    due_kind,
    first_turns,
    is_eligible,
    may_have_work,
    newest_tier,
    plan_stream,
    rules_for,
)
from tests.kit.seeds import seeds

COPYING = (
    StreamCompaction.MERGE_SMALL,
    StreamCompaction.MERGE_LARGE,
    StreamCompaction.GATHER_SMALL,
)


def row(*sizes: int, composites: str = "", span: int = 10) -> list[StreamObject]:
    """Objects without a gap; `composites` has a c for each place where there is one."""
    kinds = composites.ljust(len(sizes), "n")
    return [
        StreamObject(place, place * span, (place + 1) * span, size, composite=kind == "c")
        for place, (size, kind) in enumerate(zip(sizes, kinds, strict=True))
    ]


def ids(groups: list[Group] | tuple[Group, ...]) -> list[list[int]]:
    return [[object_.object_id for object_ in group] for group in groups]


def test_a_gap_or_another_bucket_ends_a_group() -> None:
    objects = row(1, 1, 1, 1, 1)
    gap = [*objects[:2], *(replace(one, start_offset=one.start_offset + 1) for one in objects[2:3])]
    assert ids(cut_groups(gap, rules_for(StreamCompaction.MERGE_SMALL))) == [[0, 1], [2]]
    buckets = [replace(object_, bucket_id=object_.object_id // 3) for object_ in objects]
    assert ids(cut_groups(buckets, rules_for(StreamCompaction.MERGE_SMALL))) == [[0, 1, 2], [3, 4]]


def test_every_limit_of_a_group_holds() -> None:
    objects = row(*[100] * 10)
    assert ids(cut_groups(objects, GroupRules(10_000, max_objects=4))) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    assert ids(cut_groups(objects, GroupRules(10_000, max_span=35)))[0] == [0, 1, 2]
    in_parts = GroupRules(10_000, max_parts=6, max_part_bytes=50)
    assert ids(cut_groups(objects, in_parts))[0] == [0, 1, 2]


def test_an_object_that_needs_all_parts_of_an_upload_is_in_no_group() -> None:
    rules = GroupRules(10**6, max_parts=4, max_part_bytes=25)
    assert ids(cut_groups(row(10, 100, 10, 10), rules)) == [[0], [2, 3]]


def test_a_small_object_pulls_no_huge_one_into_a_merge() -> None:
    rules = rules_for(StreamCompaction.GATHER_SMALL)
    tiny, allowed, huge = 1024, 32 * MIB, 32 * MIB + 1
    assert ids(cut_groups(row(tiny, allowed), rules)) == [[0, 1]]
    assert ids(cut_groups(row(tiny, huge, tiny), rules)) == [[0], [1], [2]]
    assert not plan_stream(row(tiny, 9 * GIB), 0, StreamCompaction.GATHER_SMALL).groups


def test_what_is_below_the_start_is_removed_whatever_the_kind() -> None:
    for kind in StreamCompaction:
        plan = plan_stream(row(1, 1, 1, 1), 20, kind)
        assert [object_.object_id for object_ in plan.expired] == [0, 1]
        expected = [[2, 3]] if kind in COPYING else []
        assert ids(plan.groups) == expected, kind


def test_composites_are_linked_and_never_copied() -> None:
    objects = row(5 * MIB, 5 * MIB, 5 * MIB, 5 * MIB, composites="ncnn")
    assert ids(plan_stream(objects, 0, StreamCompaction.LINK).groups) == [[0, 1, 2, 3]]
    for kind in COPYING:
        rules = rules_for(kind, GIB)
        assert ids(plan_stream(objects, 0, kind, rules).groups) == [[2, 3]]


def test_a_small_object_is_linked_only_between_two_composites() -> None:
    rules = rules_for(StreamCompaction.LINK)
    objects = row(MIB, 1, MIB, 1, 5 * MIB, composites="cnc")
    takes = [is_eligible(objects, at, StreamCompaction.LINK, rules) for at in range(5)]
    assert takes == [True, True, True, False, True]
    apart = [objects[0], replace(objects[1], start_offset=11), objects[2]]
    assert not is_eligible(apart, 1, StreamCompaction.LINK, rules)


def test_links_are_pruned_when_enough_of_the_first_composite_is_dirty() -> None:
    objects = row(GIB, GIB, composites="cc", span=1000)

    def pruned(start: int) -> list[list[int]]:
        return ids(plan_stream(objects, start, StreamCompaction.PRUNE_LINKS).groups)

    assert pruned(500) == []  # exactly 512 MiB are not more than 512 MiB
    assert pruned(501) == [[0]]
    assert pruned(1000) == []  # the first is gone altogether, the second clean
    assert not plan_stream(row(GIB), 9, StreamCompaction.PRUNE_LINKS).groups


def test_a_growing_group_begins_with_what_is_no_larger_than_all_behind_it() -> None:
    rules = GroupRules(100)

    def tier(*sizes: int) -> list[int]:
        return [object_.object_id for object_ in newest_tier(tuple(row(*sizes)), rules)]

    assert tier(8, 4, 2, 1, 1) == [0, 1, 2, 3, 4]
    assert tier(8, 2, 1, 1) == [1, 2, 3]
    assert tier(8, 4, 2, 1) == [3]
    assert tier(1, 8, 1) == [0, 1, 2]
    assert tier(90, 9, 1) == [0, 1, 2], "a group that has its size is made whole"


@pytest.mark.parametrize("steps", [40, 400])
def test_tiers_copy_the_bytes_of_a_slow_stream_about_as_often_as_they_double(steps: int) -> None:
    """One small object comes before each turn, until they make a full one together."""
    rules = replace(rules_for(StreamCompaction.GATHER_SMALL, steps * 100), is_tiered=True)
    copied, most = _copied_bytes(rules, steps)
    assert copied <= steps * 100 * (math.log2(steps) + 1)
    assert most <= math.log2(steps) + 2, "objects there are at a time"
    without, _ = _copied_bytes(replace(rules, is_tiered=False), steps)
    assert without >= steps * 100 * steps / 2


def _copied_bytes(rules: GroupRules, steps: int) -> tuple[int, int]:
    """Return the bytes that all turns copy, and how many objects there are after one at most."""
    objects: list[StreamObject] = []
    copied = most = 0
    for step in range(steps):
        objects.append(StreamObject(step, step, step + 1, 100))
        for group in plan_stream(objects, 0, StreamCompaction.GATHER_SMALL, rules).groups:
            size = sum(object_.size for object_ in group)
            copied += size
            at = objects.index(group[0])
            merged = replace(group[0], end_offset=group[-1].end_offset, size=size)
            objects[at : at + len(group)] = [merged]
        most = max(most, len(objects))
    assert len(objects) == 1
    return copied, most


@pytest.mark.parametrize("seed", seeds(20, slow=40))
def test_groups_keep_their_rules_whatever_the_objects(seed: int) -> None:
    rng = random.Random(seed)
    objects = _random_objects(rng)
    kind = rng.choice(list(StreamCompaction))
    rules = replace(
        rules_for(kind, rng.choice([1, 50, 500, 5000])),
        linked_bytes=rng.choice([0, 20]),
        dirty_bytes=rng.choice([0, 100]),
        max_objects=rng.choice([2, 3, 5000]),
        is_tiered=rng.random() < 0.5,
    )
    start = rng.randrange(0, 400)
    plan = plan_stream(rng.sample(objects, len(objects)), start, kind, rules)
    members = [object_ for group in plan.groups for object_ in group]
    assert members == sorted(set(members), key=lambda object_: object_.start_offset), "seed"
    assert {object_ for object_ in objects if object_.end_offset <= start} == set(plan.expired)
    assert not set(plan.expired) & set(members)
    for group in plan.groups:
        _check_group(group, kind, rules)


def _check_group(group: Group, kind: StreamCompaction, rules: GroupRules) -> None:
    assert all(a.end_offset == b.start_offset for a, b in pairwise(group))
    assert len({object_.bucket_id for object_ in group}) == 1
    assert LOCAL_BUCKET not in {object_.bucket_id for object_ in group}
    assert len(group) <= rules.max_objects
    assert len(group) > 1 or kind is StreamCompaction.PRUNE_LINKS
    size = sum(object_.size for object_ in group)
    if kind is StreamCompaction.GATHER_SMALL:
        assert size - group[-1].size < rules.group_bytes
        assert rules.absorbed_bytes is not None
        assert max(object_.size for object_ in group) <= rules.absorbed_bytes
    elif len(group) > 1:
        assert size <= rules.group_bytes
    if not kind.is_composite:
        assert not any(object_.composite for object_ in group)


def _random_objects(rng: random.Random) -> list[StreamObject]:
    objects: list[StreamObject] = []
    at = 0
    for object_id in range(rng.randrange(0, 25)):
        at += rng.choice([0, 0, 0, 0, 3])
        end = at + rng.randrange(1, 40)
        objects.append(
            StreamObject(
                object_id,
                at,
                end,
                rng.choice([1, 10, 30, 100, 4000]),
                composite=rng.random() < 0.3,
                bucket_id=rng.choice([0, 0, 0, 0, 1, LOCAL_BUCKET]),
            )
        )
        at = end
    return objects


# Turns

DAY = 86_400


def kinds_over_a_day(schedule: StreamSchedule, stream_id: int) -> Counter[str]:
    turns = first_turns(stream_id, 0.0, schedule)
    found: Counter[str] = Counter()
    for minute in range(DAY // 60):
        now = minute * 60.0
        kind = due_kind(turns, now, schedule)
        if kind is None:
            found["rest"] += 1
            continue
        found[kind.name] += 1
        turns = after_turn(turns, kind, now, schedule)
    return found


@pytest.mark.parametrize("stream_id", [0, 1, 77])
def test_every_kind_comes_as_often_as_its_interval_says(stream_id: int) -> None:
    found = kinds_over_a_day(StreamSchedule(), stream_id)
    assert found["rest"] == 1
    assert 23 <= found["LINK"] <= 25
    assert 130 <= found["GATHER_SMALL"] <= 145
    assert found["PRUNE_LINKS"] == DAY // 60 - 1 - found["LINK"] - found["GATHER_SMALL"]


def test_without_composites_everything_is_copied() -> None:
    found = kinds_over_a_day(StreamSchedule(composites=False), 3)
    assert set(found) == {"rest", "REMOVE_EXPIRED", "MERGE_SMALL", "MERGE_LARGE"}


def test_streams_are_spread_over_the_interval() -> None:
    schedule = StreamSchedule()
    due = Counter(
        due_kind(first_turns(stream_id, 0.0, schedule), 60.0, schedule) for stream_id in range(6000)
    )
    assert due[StreamCompaction.LINK] == pytest.approx(100, abs=10), "one in sixty"
    assert due[StreamCompaction.GATHER_SMALL] == pytest.approx(500, abs=50), "the others in ten"


def test_intervals_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 0 < interval_s"):
        StreamSchedule(interval_s=700.0)


@pytest.mark.parametrize(
    ("kind", "start", "spans", "expected"),
    [
        (StreamCompaction.REMOVE_EXPIRED, 10, [(0, 10), (10, 20)], True),
        (StreamCompaction.REMOVE_EXPIRED, 9, [(0, 10), (10, 20)], False),
        (StreamCompaction.PRUNE_LINKS, 1, [(0, 10)], True),
        (StreamCompaction.PRUNE_LINKS, 0, [(0, 10)], False),
        (StreamCompaction.PRUNE_LINKS, 0, [], False),
        (StreamCompaction.LINK, 0, [(0, 10), (10, 20)], True),
        (StreamCompaction.GATHER_SMALL, 0, [(0, 10), (11, 20)], False),
        (StreamCompaction.MERGE_SMALL, 0, [(0, 10)], False),
    ],
)
def test_a_stream_without_work_is_told_by_its_offsets_alone(
    kind: StreamCompaction, start: int, spans: list[tuple[int, int]], expected: bool
) -> None:
    assert may_have_work(kind, start, spans) is expected


TRAILER = 36 + 48


def of_sizes(*sizes: int) -> list[SourceRange]:
    return [SourceRange(number, 0, size * MIB) for number, size in enumerate(sizes, start=1)]


def told(plan: CopyPlan) -> list[str]:
    """Each part in MiB: what is copied, what is fetched, t for the trailer."""
    lines = []
    for part in plan.parts:
        if isinstance(part, CopiedPart):
            source = part.source
            lines.append(f"copy {source.object_id} {_mib(source.start)}-{_mib(source.end)}")
        else:
            got = [f"{one.object_id} {_mib(one.start)}-{_mib(one.end)}" for one in part.sources]
            lines.append("send " + ", ".join([*got, *(["t"] if part.trailer_size else [])]))
    return lines


def _mib(position: int) -> str:
    return f"{position / MIB:g}"


def test_a_small_object_is_put_in_one_request() -> None:
    plan = plan_copy(of_sizes(3, 6, 4), TRAILER)
    assert plan.is_single
    assert told(plan) == ["send 1 0-3, 2 0-6, 3 0-4, t"]
    assert plan.copies == 0
    assert plan_copy(of_sizes(16, 16), TRAILER).is_single
    assert not plan_copy(of_sizes(16, 17), TRAILER).is_single


def test_small_neighbours_travel_together_and_large_ones_are_copied() -> None:
    plan = plan_copy(of_sizes(3, 6, 40, 1), TRAILER)
    assert told(plan) == ["send 1 0-3, 2 0-6", "copy 3 0-40", "send 4 0-1, t"]
    assert plan.copies == 1


def test_the_trailer_alone_is_a_part() -> None:
    plan = plan_copy(of_sizes(40, 40), 2928)
    assert told(plan) == ["copy 1 0-40", "copy 2 0-40", "send t"]
    assert plan.parts[-1].size == 2928


def test_a_part_that_is_too_small_takes_bytes_of_the_next_source() -> None:
    sources = [SourceRange(1, 5 * MIB, 40 * MIB), *of_sizes(0, 2, 40)[1:]]
    plan = plan_copy(sources, TRAILER)
    assert told(plan) == ["copy 1 5-40", "send 2 0-2, 3 0-3", "copy 3 3-40", "send t"]


def test_a_large_source_is_copied_in_pieces_of_which_none_is_too_small() -> None:
    rules = CopyRules(max_part_bytes=100 * MIB)
    assert told(plan_copy(of_sizes(250), TRAILER, rules)) == [
        "copy 1 0-100",
        "copy 1 100-200",
        "copy 1 200-250",
        "send t",
    ]
    assert told(plan_copy(of_sizes(203), TRAILER, rules))[:3] == [
        "copy 1 0-100",
        "copy 1 100-195",
        "copy 1 195-203",
    ]


def test_what_the_store_can_not_copy_is_sent_in_parts_of_one_size() -> None:
    sources = [SourceRange(1, 0, 70 * MIB, copyable=False), SourceRange(2, 0, 9 * MIB, False)]
    plan = plan_copy(sources, TRAILER)
    assert told(plan) == ["send 1 0-32", "send 1 32-64", "send 1 64-70, 2 0-9, t"]


def test_sources_beyond_the_parts_of_an_upload_are_refused() -> None:
    rules = CopyRules(max_part_bytes=32 * MIB, max_parts=3)
    assert len(plan_copy(of_sizes(64), TRAILER, rules).parts) == 3
    with pytest.raises(ValueError, match="4 parts"):
        plan_copy(of_sizes(96), TRAILER, rules)
    with pytest.raises(ValueError, match="ranges"):
        plan_copy(of_sizes(0), TRAILER)


@pytest.mark.parametrize(
    "fields",
    [{"fetched_bytes": 9 * MIB}, {"max_part_bytes": 20 * MIB}, {"min_part_bytes": 0}],
    ids=str,
)
def test_sizes_that_leave_parts_out_of_their_limits_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="2 \\* min_part_bytes <= fetched_bytes"):
        CopyRules(**fields)


@pytest.mark.parametrize("seed", seeds(33, slow=67))
def test_parts_hold_all_bytes_in_order_within_the_limits(seed: int) -> None:
    rng = random.Random(seed)
    rules = CopyRules(min_part_bytes=50, max_part_bytes=rng.choice([400, 900]), fetched_bytes=320)
    sources = []
    for number in range(rng.randrange(1, 30)):
        start = rng.choice([0, 0, 17])
        size = rng.choice([1, 3, 49, 50, 51, 60, 300, 320, 321, 399, 450, 1000, 2000])
        sources.append(SourceRange(number, start, start + size, rng.random() < 0.8))
    plan = plan_copy(sources, 7, rules)
    held = []
    for part in plan.parts:
        pieces = [part.source] if isinstance(part, CopiedPart) else part.sources
        held += [(piece.object_id, at) for piece in pieces for at in range(piece.start, piece.end)]
    wanted = [(one.object_id, at) for one in sources for at in range(one.start, one.end)]
    assert held == wanted
    assert plan.size == len(wanted) + 7
    assert all(part.size >= rules.min_part_bytes for part in plan.parts[:-1])
    assert all(part.size <= rules.max_part_bytes for part in plan.parts)
    for part in plan.parts:
        if isinstance(part, WrittenPart):
            assert part.size - part.trailer_size <= rules.fetched_bytes
        else:
            assert part.source.copyable
