"""The arithmetic of the figures, and what settings come to."""

import struct

import pytest

from scripts.benchmarks.commits import STREAMS_MAX, Settings
from scripts.benchmarks.committer import STEP, Load, SlotStreams, own_streams
from scripts.benchmarks.figures import Outcome, Table, Target, latencies, medians, percentile
from scripts.benchmarks.observed_controller import Counters


def test_a_percentile_is_one_of_the_values() -> None:
    """The smallest that the share of them does not exceed."""
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, share) for share in (0.0, 0.25, 0.5, 0.51, 0.99, 1.0)] == [
        *(1.0, 1.0, 2.0, 3.0, 4.0, 4.0)
    ]
    with pytest.raises(ValueError, match="empty"):
        percentile([], 0.5)


def test_a_target_says_whether_it_is_met() -> None:
    """A bound itself is met, from either side."""
    targets = [Target("a", "at most", 2, 2), Target("b", "at least", 2, 1.99)]
    (table,) = Outcome(benchmark="a", figures={}, targets=targets).all_tables()
    assert [row[-1] for row in table.rows] == ["met", "missed"]
    assert Outcome(benchmark="a", figures={}).all_tables() == []


def test_a_table_has_a_cell_for_each_column_of_an_item() -> None:
    """Fields are keys or attributes, and floats are rounded."""
    table = Table.of("t", [{"a": 1, "b": 2.3456}, {"a": 2}], "a | B, s = b")
    assert (table.columns, table.rows) == (("a", "B, s"), ((1, 2.35), (2, "")))
    assert Table.of("t", [Target("f", "at most", 1, 1)], "F = figure").rows == (("f",),)


def test_runs_have_medians_and_times_have_percentiles() -> None:
    """Each figure by itself."""
    assert medians([{"a": 1.0, "b": 9.0}, {"a": 3.0, "b": 8.0}]) == {"a": 2.0, "b": 8.5}
    assert latencies([0.001, 0.002, 0.003]) == {"p50_ms": 2.0, "p99_ms": 3.0, "max_ms": 3.0}


def test_levels_with_too_many_streams_are_left_out() -> None:
    """20 000 ranges are measured with 16 in flight, not with 64."""
    settings = Settings(ways=("unary",), ranges=(1, 20_000), in_flight=(16, 64))
    points = [(point.ranges, point.in_flight) for point in settings.points()]
    assert points == [(1, 16), (1, 64), (20_000, 16)]
    assert all(ranges * in_flight <= STREAMS_MAX for ranges, in_flight in points)


def test_slots_share_no_stream() -> None:
    """Commits of different slots never conflict."""
    slots = own_streams(Load(endpoint="", ranges=3, in_flight=4))
    ids = [stream_id for slot in slots for stream_id in slot.ids]
    assert len(slots) == 4
    assert len(set(ids)) == 12


def test_a_slot_moves_all_its_streams_on() -> None:
    """Each commit begins where the last one ended."""
    slot = SlotStreams([5, 6])
    slot.advance()
    assert slot.columns() == (struct.pack("<2q", STEP, STEP), struct.pack("<2q", *(2 * STEP,) * 2))


def test_counters_are_compared_field_by_field() -> None:
    """What happened since; the longest stall stays."""
    since = Counters(5, 50, 7, 9, 90, 8) - Counters(1, 10, 2, 3, 30, 7)
    assert since == Counters(4, 40, 5, 6, 60, 8)
