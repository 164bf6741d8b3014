"""What people and programs get to see of a planned compaction, and of one that was made."""

from __future__ import annotations

import pytest

from streammeta.cli.compaction_view import (
    SHOWN_ROWS,
    Change,
    CommitFigures,
    Cost,
    NodePlan,
    OutputFigures,
    Totals,
    show_plan,
    show_totals,
)
from streammeta.cli.output import Output, OutputFormat
from streammeta.client.compaction.report import Figures, GroupReport, MadeObject
from streammeta.storage.compaction.plan import OutputKind
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
