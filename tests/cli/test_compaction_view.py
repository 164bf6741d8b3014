"""Figures of a planned compaction, held against sums made by hand; its view and that of totals."""

from __future__ import annotations

import pytest

from streammeta.cli.compaction_view import (
    SHOWN_ROWS,
    Change,
    CommitFigures,
    Cost,
    ListedObject,
    NodePlan,
    OutputFigures,
    Totals,
    commit_figures,
    show_plan,
    show_totals,
)
from streammeta.cli.output import Output, OutputFormat
from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.report import Figures, GroupReport, MadeObject
from streammeta.storage.compaction.entries import Entry, EntryTable
from streammeta.storage.compaction.plan import CommitPlan, CompactionLimits, OutputKind
from streammeta.storage.compaction.planner import plan_compaction
from streammeta.storage.compaction.selection import GroupKind
from streammeta.storage.object_format.index_block import StreamRange

SOURCES = 3 * SHOWN_ROWS

COMMIT = CommitFigures(
    source_ids=tuple(range(SOURCES)),
    kind=GroupKind.MERGE,
    outputs=(
        OutputFigures(OutputKind.COMPACT, None, 4, 5, 1000),
        OutputFigures(OutputKind.SPLIT, (7, 100, 200), 1, 1, 500),
    ),
    cost=Cost(
        iterations=2,
        objects=Change(SOURCES, 2),
        metadata_bytes=Change(9000, 300),
        streams=4,
        cold_gets=Change(480, 8),
        gets=70,
        bytes_read=2000,
        bytes_written=1800,
        fresh_bytes=1200,
    ),
)
PLANS = [NodePlan(3, (COMMIT,), {99: "it is missing"}), NodePlan(4, (), {})]


def test_programs_get_everything() -> None:
    output = Output(OutputFormat.JSON)
    show_plan(output, PLANS)
    said = output.collected
    assert said["node_ids"] == [3, 4]
    assert (said["objects_before"], said["objects_after"]) == (SOURCES, 2)
    assert (said["metadata_bytes_before"], said["metadata_bytes_after"]) == (9000, 300)
    assert (said["gets_per_cold_read_before"], said["gets_per_cold_read_after"]) == (120, 2)
    assert said["write_amplification"] == 1.5
    assert [row["object_id"] for row in said["sources"]] == list(range(SOURCES))
    assert said["left_out"] == [{"node_id": 3, "object_id": 99, "reason": "it is missing"}]
    (row,) = said["plan"]
    assert (row["node_id"], row["commit"], row["kind"], row["sources"]) == (3, 1, "merge", SOURCES)
    assert (row["set_objects"], row["stream_objects"], row["iterations"]) == (1, 1, 2)
    set_object, stream_object = said["outputs"]
    assert (set_object["kind"], set_object["stream_id"], set_object["ranges"]) == (
        *("set object", None, 4),
    )
    assert set_object["object_size"] == 1000 + 5 * 36 + 48
    assert stream_object["kind"] == "stream object"
    held = [stream_object[name] for name in ("stream_id", "start_offset", "end_offset")]
    assert held == [7, 100, 200]


def test_people_get_the_beginning_of_a_long_table(capsys: pytest.CaptureFixture[str]) -> None:
    show_plan(Output(OutputFormat.TABLE), PLANS)
    said = capsys.readouterr().out
    assert f"... and {SOURCES - SHOWN_ROWS} more" in said
    shown = [line.split()[2] for line in said.splitlines() if line.split()[:2] == ["3", "1"]]
    assert [str(one) for one in range(SHOWN_ROWS)] == [one for one in shown if one.isdigit()]
    assert "it is missing" in said
    assert "write_amplification:" in said
    show_plan(Output(OutputFormat.PLAIN), PLANS)
    assert f"3\t1\t{SOURCES - 1}\n" in capsys.readouterr().out


def test_totals_add_up_over_passes_but_for_what_failed() -> None:
    totals = Totals()
    report = GroupReport(
        GroupKind.MERGE,
        source_ids=[1, 2],
        made=[
            MadeObject(3, 10, (1, 2)),
            *(MadeObject(one, 10, (1, 2), StreamRange(7, 0, 5)) for one in (4, 5)),
        ],
        left_out={9: "damaged"},
        failures=["the store is away"],
        figures=Figures(bytes_read=10, commits=1),
    )
    totals.add(7, report)
    assert totals.failures == {7: "node 7: the store is away"}
    totals.begin_pass()
    split = [MadeObject(6, 10, (3,), StreamRange(7, 0, 5))]
    figures = Figures(bytes_read=5)
    totals.add(7, GroupReport(GroupKind.SPLIT, source_ids=[3], made=split, figures=figures))
    output = Output(OutputFormat.JSON)
    show_totals(output, totals)
    said = output.collected
    assert (said["passes"], said["commits"], said["bytes_read"]) == (2, 1, 15)
    assert (said["sources"], said["set_objects"], said["stream_objects"]) == (3, 1, 3)
    assert (said["left_out"], said["failures"]) == ([], [])
    assert [row["node_id"] for row in said["nodes"]] == [7]


MIB = 1024 * 1024
Held = list[tuple[int, int, int]]


def objects(*held: Held, unit: int = 1) -> tuple[EntryTable, list[ListedObject]]:
    """Objects 0, 1, ... with (stream, start, end) each, `unit` bytes an offset."""
    rows: list[Entry] = []
    listed: list[ListedObject] = []
    for object_id, entries in enumerate(held):
        position = 0
        for stream_id, start, end in entries:
            size = (end - start) * unit
            rows.append(Entry(object_id, stream_id, start, end, 1, position, size))
            position += size
        ranges = len({stream_id for stream_id, _, _ in entries})
        listed.append(ListedObject(object_id, object_id, position + 36 * len(entries) + 48, ranges))
    return EntryTable.of_rows(rows), listed


def figures_of(commit: CommitPlan, listed: list[ListedObject]) -> CommitFigures:
    """The figures of a merge with the usual bounds."""
    return commit_figures(commit, listed, CompactionConfig(), GroupKind.MERGE)


def figures(held: tuple[EntryTable, list[ListedObject]], limits: CompactionLimits) -> CommitFigures:
    """The figures of the one commit that becomes of all objects."""
    (commit,) = plan_compaction(held[0], limits).commits
    return figures_of(commit, held[1])


THREE_OBJECTS: tuple[Held, ...] = (
    [(0, 0, 20), (1, 30, 60), (3, 210, 230)],
    [(0, 20, 25), (1, 60, 120)],
    [(2, 400, 435), (2, 435, 500), (3, 230, 270)],
)


def test_the_example_of_three_objects() -> None:
    found = figures(objects(*THREE_OBJECTS), CompactionLimits(memory_budget=150, split_size=80))
    assert found.source_ids == (0, 1, 2)
    assert found.cost.iterations == 2
    assert found.cost.objects == Change(3, 4)
    assert [(one.kind, one.held, one.ranges, one.object_size) for one in found.outputs] == [
        (OutputKind.COMPACT, None, 2, 85 + 2 * 36 + 48),
        (OutputKind.SPLIT, (1, 30, 120), 1, 90 + 36 + 48),
        (OutputKind.SPLIT, (2, 400, 435), 1, 35 + 36 + 48),
        (OutputKind.SPLIT, (2, 435, 500), 1, 65 + 36 + 48),
    ]
    assert found.cost.metadata_bytes == Change(3 * 86 + 7 * 32, 4 * 86 + 5 * 32)
    # 7 pairs of a stream and its object before, 5 after: an index and a range of blocks each.
    assert (found.cost.streams, found.cost.cold_gets) == (4, Change(14, 10))
    # 5 reads of adjacent blocks, and 3 of indexes, which get all of objects so small.
    assert found.cost.gets == 5 + 3
    assert found.cost.bytes_read == 275 + (275 + 8 * 36 + 3 * 48)
    assert found.cost.bytes_written == 205 + 174 + 119 + 149
    assert found.cost.fresh_bytes == 275 + 8 * 36 + 3 * 48


def test_a_large_range_and_a_large_index_take_more_requests() -> None:
    """Readers fetch 4 MiB at once; what they guess to hold an index has some 225 small entries."""
    many = [(stream_id, 0, 1) for stream_id in range(300)]
    held = objects(many, [(0, 1, 1025)], unit=10 * 1024)
    found = figures(held, CompactionLimits(memory_budget=100 * MIB, split_size=8 * MIB))
    # Object 0: 2 for the index and 1 for blocks, 300 times; object 1: 1 and 3, for stream 0 alone.
    assert found.cost.cold_gets.before == 300 * 3 + 1 + 3
    # Stream 0 has an object of its own; the index of the others is as large as before.
    assert found.cost.cold_gets.after == 299 * 3 + 1 + 3


def test_write_amplification_counts_what_no_compaction_has_written() -> None:
    table, listed = objects([(0, 0, 100)], [(0, 100, 200)], unit=1000)
    (commit,) = plan_compaction(table, CompactionLimits()).commits
    fresh = figures_of(commit, listed).cost
    assert fresh.write_amplification == pytest.approx(1.0, abs=0.01)
    compacted = [ListedObject(0, -5, listed[0].object_size, 1), listed[1]]
    again = figures_of(commit, compacted).cost
    assert again.write_amplification == pytest.approx(2.0, abs=0.01)
    rewritten = [ListedObject(one.object_id, -5, one.object_size, 1) for one in listed]
    assert figures_of(commit, rewritten).cost.write_amplification is None


def test_sources_of_which_nothing_lives_only_go() -> None:
    found = figures_of(CommitPlan((), EntryTable.of_rows(()), ()), [ListedObject(4, 4, 1000, 2)])
    assert (found.cost.objects, found.outputs) == (Change(1, 0), ())
    assert found.cost.metadata_bytes == Change(86 + 64, 0)
    assert (found.cost.bytes_written, found.cost.cold_gets) == (0, Change(0, 0))
    assert found.cost.gets_per_cold_read is None
