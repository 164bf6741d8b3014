"""The arithmetic of the figures, and the options that settings come from and pass on."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from scripts.benchmarks.commits import STREAMS_MAX, Settings
from scripts.benchmarks.committer import STEP, Load, SlotStreams, own_streams
from scripts.benchmarks.figures import Outcome, Table, Target, latencies, medians, percentile
from scripts.benchmarks.observed_controller import Counters
from scripts.benchmarks.registry import ALL, MEMBERS_OF_ALL, MODULES, parse


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


@pytest.mark.parametrize("name", [*MODULES, ALL])
def test_defaults_are_the_same_in_the_other_tree(name: str) -> None:
    request = parse([name])
    assert parse(request.words()) == request


def test_options_are_the_same_in_the_other_tree() -> None:
    words = ["reconcile", "--joined", "300,4000", "--runs", "2", "--engines", "local"]
    request = parse(words)
    assert parse(request.words()) == request
    assert (request.settings["reconcile"].joined, request.settings["reconcile"].runs) == (
        (300, 4000),
        2,
    )
    (settings,) = parse(parse(["failover", "--seed", "0"]).words()).settings.values()
    assert settings.seed == 0


def test_the_comparison_itself_is_not_passed_on() -> None:
    request = parse(["reconcile", "--baseline", "main", "--rounds", "7", "--format", "json"])
    assert (request.baseline, request.rounds, request.format) == ("main", 7, "json")
    assert request.words() == parse(["reconcile"]).words()


def test_a_flag_and_a_path_are_read(tmp_path: Path) -> None:
    request = parse(["map", "--large", "--plot", "p", "--data-dir", str(tmp_path)])
    assert (request.settings["map"].large, request.settings["map"].plot) == (True, Path("p"))
    assert request.data_dir == tmp_path


def test_all_passes_an_option_to_every_member_that_has_it() -> None:
    settings = parse([ALL, "--tls", "--streams", "3"]).settings
    assert list(settings) == list(MEMBERS_OF_ALL)
    assert settings["failover"].tls
    assert settings["commits"].tls
    assert settings["failover"].kind == ("crash", "pause", "partition")
    assert settings["reading"].streams == 3


@pytest.mark.parametrize(
    "words",
    [
        ["commits", "--ranges", "0"],
        ["commits", "--ranges", "1,x"],
        ["commits", "--seconds", "0.1"],
        ["commits", "--seconds", "601"],
        ["commits", "--ways", "unary,fast"],
        ["failover", "--kind", "flood"],
        ["reconcile", "--engines", "flink"],
        ["map", "--data-dir", "/nonexistent"],
        ["nothing"],
    ],
)
def test_wrong_options_end_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert (
        "expected" in (said := capsys.readouterr().err)
        or "invalid choice" in said
        or "not a" in said
    )
