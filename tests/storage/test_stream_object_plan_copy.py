"""Parts of a new object: the same bytes in the same order, within the limits, few of them moved."""

from __future__ import annotations

import random

import pytest

from streammeta.storage.compaction.copy_plan import (
    CopiedPart,
    CopyPlan,
    CopyRules,
    SourceRange,
    WrittenPart,
    plan_copy,
)

MIB = 1024 * 1024
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
    assert told(plan) == [
        "send 1 0-32",
        "send 1 32-64",
        "send 1 64-70, 2 0-9, t",
    ]


def test_sources_beyond_the_parts_of_an_upload_are_refused() -> None:
    rules = CopyRules(max_part_bytes=32 * MIB, max_parts=3)
    assert len(plan_copy(of_sizes(64), TRAILER, rules).parts) == 3
    with pytest.raises(ValueError, match="would have 4 parts, wanted at most 3"):
        plan_copy(of_sizes(96), TRAILER, rules)
    with pytest.raises(ValueError, match="0 ranges with bytes"):
        plan_copy(of_sizes(0), TRAILER)


@pytest.mark.parametrize(
    "fields",
    [{"fetched_bytes": 9 * MIB}, {"max_part_bytes": 20 * MIB}, {"min_part_bytes": 0}],
    ids=str,
)
def test_sizes_that_leave_parts_out_of_their_limits_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="2 \\* min_part_bytes <= fetched_bytes"):
        CopyRules(**fields)


@pytest.mark.parametrize("seed", range(100))
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
        held += [(one.object_id, at) for one in pieces for at in range(one.start, one.end)]
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
