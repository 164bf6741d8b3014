"""How `streammeta compact` shows what it would do and what it did: rows of tables, and sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from streammeta.cli.compaction_figures import CommitFigures, OutputFigures, plan_figures
from streammeta.cli.output import Output, OutputFormat
from streammeta.client.compaction.report import Figures, GroupReport
from streammeta.storage.compaction.plan import OutputKind

SHOWN_ROWS = 20
"""Rows of a table that people get; programs get all."""

COMMIT_COLUMNS = (
    *("node_id", "commit", "kind", "sources", "set_objects", "stream_objects"),
    *("iterations", "bytes_to_read", "bytes_to_write"),
)
SOURCE_COLUMNS = ("node_id", "commit", "object_id")
OUTPUT_COLUMNS = (
    *("node_id", "commit", "kind", "stream_id", "start_offset", "end_offset"),
    *("ranges", "object_size"),
)
NODE_COLUMNS = (
    *("node_id", "commits", "sources", "set_objects", "stream_objects"),
    *("merged_stream_objects", "made_stream_objects", "bytes_read", "bytes_written"),
)
FAILURE_COLUMNS = ("node_id", "reason")
LEFT_COLUMNS = ("node_id", "object_id", "reason")

Row = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What would be done for one node. `left_out` has a reason by object id."""

    node_id: int
    commits: tuple[CommitFigures, ...]
    left_out: Mapping[int, str]


@dataclass(slots=True)
class NodeTotals:
    """What was done for one node.

    `sources` are set objects that were replaced by `set_objects` and `stream_objects`; `merged` are
    stream objects that were replaced by `made`, or only removed.
    """

    sources: int = 0
    set_objects: int = 0
    stream_objects: int = 0
    figures: Figures = field(default_factory=Figures)
    merged: int = 0
    made: int = 0


@dataclass(slots=True)
class Totals:
    """What was done in all passes, and what was left out and what failed in the last one.

    `failures` are by node id; -1 stands for all nodes.
    """

    passes: int = 1
    nodes: dict[int, NodeTotals] = field(default_factory=dict)
    left_out: dict[int, dict[int, str]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    def begin_pass(self) -> None:
        """Count another pass; nothing has failed in it yet."""
        self.passes += 1
        self.left_out.clear()
        self.failures.clear()

    def add(self, node_id: int, report: GroupReport) -> None:
        """Add what became of a group of a node's objects."""
        node = self.nodes.setdefault(node_id, NodeTotals())
        node.sources += len(report.source_ids)
        node.set_objects += len(report.set_object_ids)
        node.stream_objects += len(report.stream_object_ids)
        node.figures.add(report.figures)
        self.left_out.setdefault(node_id, {}).update(report.left_out)
        if report.failures:
            self.failures[node_id] = f"node {node_id}: {'; '.join(report.failures)}"

    def add_stream(self, node_id: int, report: GroupReport) -> None:
        """Add what became of the stream objects of one stream of a node."""
        node = self.nodes.setdefault(node_id, NodeTotals())
        node.merged += len(report.source_ids)
        node.made += len(report.made)
        self.left_out.setdefault(node_id, {}).update(report.left_out)
        if report.error is not None:
            said = f"node {node_id}, stream {report.stream_id}: {report.error}"
            self.failures.setdefault(node_id, said)

    def summary(self) -> dict[str, object]:
        """Add the nodes up."""
        sums = Figures.total(one.figures for one in self.nodes.values())
        return {
            "passes": self.passes,
            "commits": sums.commits,
            "sources": sum(one.sources for one in self.nodes.values()),
            "set_objects": sum(one.set_objects for one in self.nodes.values()),
            "stream_objects": sum(one.stream_objects for one in self.nodes.values()),
            "merged_stream_objects": sum(one.merged for one in self.nodes.values()),
            "made_stream_objects": sum(one.made for one in self.nodes.values()),
            "bytes_read": sums.bytes_read,
            "bytes_written": sums.bytes_written,
            "gets": sums.gets,
            "puts": sums.puts,
            "parts": sums.parts,
            "reused_outputs": sums.reused,
        }


def show_totals(output: Output, totals: Totals) -> None:
    """Say what was done."""
    output.summary(totals.summary())
    show_rows(output, "nodes", NODE_COLUMNS, list(_node_rows(totals)))
    show_rows(output, "left_out", LEFT_COLUMNS, list(left_rows(totals.left_out.items())))
    show_rows(output, "failures", FAILURE_COLUMNS, sorted(totals.failures.items()))


def show_plan(output: Output, plans: Sequence[NodePlan]) -> None:
    """Say the sums, then what goes into which commit, what comes out and what stays as it is."""
    output.summary(plan_summary(plans))
    tables: tuple[tuple[str, Sequence[str], Iterable[Row]], ...] = (
        ("plan", COMMIT_COLUMNS, _commit_rows(plans)),
        ("sources", SOURCE_COLUMNS, _source_rows(plans)),
        ("outputs", OUTPUT_COLUMNS, _output_rows(plans)),
        ("left_out", LEFT_COLUMNS, left_rows((one.node_id, one.left_out) for one in plans)),
    )
    for name, columns, rows in tables:
        show_rows(output, name, columns, list(rows))


def plan_summary(plans: Sequence[NodePlan]) -> dict[str, object]:
    """Add up what the plans of some nodes cost and save."""
    sums = plan_figures([commit for one in plans for commit in one.commits])
    gets = sums.gets_per_cold_read
    amplification = sums.write_amplification
    return {
        "node_ids": [one.node_id for one in plans],
        "commits": sums.commits,
        "iterations": sums.iterations,
        "objects_before": sums.objects.before,
        "objects_after": sums.objects.after,
        "metadata_bytes_before": sums.metadata_bytes.before,
        "metadata_bytes_after": sums.metadata_bytes.after,
        "gets_per_cold_read_before": None if gets is None else round(gets[0], 2),
        "gets_per_cold_read_after": None if gets is None else round(gets[1], 2),
        "gets": sums.gets,
        "bytes_to_read": sums.bytes_read,
        "bytes_to_write": sums.bytes_written,
        "write_amplification": None if amplification is None else round(amplification, 3),
        "left_out_objects": sum(len(one.left_out) for one in plans),
    }


def show_rows(output: Output, name: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Say a table; of a long one people get the beginning."""
    if output.format is not OutputFormat.TABLE:
        if rows or output.format is OutputFormat.JSON:
            output.rows(name, columns, rows)
        return
    if not rows:
        return
    output.note("")
    output.note(f"{name}:")
    output.rows(name, columns, rows[:SHOWN_ROWS])
    if len(rows) > SHOWN_ROWS:
        output.note(f"... and {len(rows) - SHOWN_ROWS} more; --format json has all")


def left_rows(left_out: Iterable[tuple[int, Mapping[int, str]]]) -> Iterator[Row]:
    """Yield one row for each object that was left as it is; `left_out` by node."""
    for node_id, reasons in left_out:
        for object_id, reason in sorted(reasons.items()):
            yield node_id, object_id, reason


def _node_rows(totals: Totals) -> Iterator[Row]:
    for node_id, one in sorted(totals.nodes.items()):
        yield (
            *(node_id, one.figures.commits, one.sources, one.set_objects, one.stream_objects),
            *(one.merged, one.made, one.figures.bytes_read, one.figures.bytes_written),
        )


def _commit_rows(plans: Iterable[NodePlan]) -> Iterator[Row]:
    for node_id, number, commit in _commits(plans):
        yield (
            *(node_id, number, str(commit.kind)),
            *(len(commit.source_ids), _count(commit, OutputKind.COMPACT)),
            *(_count(commit, OutputKind.SPLIT), commit.iterations),
            *(commit.bytes_read, commit.bytes_written),
        )


def _source_rows(plans: Iterable[NodePlan]) -> Iterator[Row]:
    for node_id, number, commit in _commits(plans):
        for object_id in commit.source_ids:
            yield node_id, number, object_id


def _output_rows(plans: Iterable[NodePlan]) -> Iterator[Row]:
    for node_id, number, commit in _commits(plans):
        for output in commit.outputs:
            yield node_id, number, *_output_cells(output)


def _output_cells(output: OutputFigures) -> Row:
    held: Row = (output.stream_id, output.start_offset, output.end_offset)
    if output.kind is OutputKind.COMPACT:
        return "set object", None, None, None, output.ranges, output.object_size
    return "stream object", *held, output.ranges, output.object_size


def _commits(plans: Iterable[NodePlan]) -> Iterator[tuple[int, int, CommitFigures]]:
    """Yield each commit with its node and its number there, from 1."""
    for one in plans:
        for number, commit in enumerate(one.commits, start=1):
            yield one.node_id, number, commit


def _count(commit: CommitFigures, kind: OutputKind) -> int:
    return sum(output.kind is kind for output in commit.outputs)
