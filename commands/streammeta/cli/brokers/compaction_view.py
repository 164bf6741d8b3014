"""Figures and tables of `streammeta compact`: costs and savings of a plan, and work done.

Owns the arithmetic over a plan (objects, bytes of metadata, requests of readers, bytes moved) and
its rows. Figures cover the sources named in the plan and their outputs, not the rest of the
cluster. Asks neither bucket nor controllers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from streammeta.cli.framework.output import Output, OutputFormat
from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.report import Figures, GroupReport
from streammeta.client.compaction.sso_sources import likely_index_start
from streammeta.storage.compaction.entries import (
    OUTPUT_INDEX_THRESHOLD,
    Column,
    EntryTable,
    MergeRule,
    contiguous_runs,
    merged_index,
)
from streammeta.storage.compaction.layout import SetObjectSoFar, lay_out
from streammeta.storage.compaction.plan import CommitPlan, OutputKind
from streammeta.storage.compaction.selection import GroupKind, SetObjects
from streammeta.storage.object_format.index_block import FOOTER_SIZE, INDEX_ENTRY_SIZE
from streammeta.storage.object_format.object_reader import tail_guess
from streammeta.storage.object_store.protocol.reads import MAX_SPAN

OBJECT_METADATA_BYTES = 54 + 32
"""A row each in the sections `objects` and `object_facts` of a checkpoint (docs/format.md)."""

RANGE_METADATA_BYTES = 32
"""A row in the section `object_ranges`."""


@dataclass(frozen=True, slots=True)
class ListedObject:
    """Metadata of a set object; `order_id` is its own id unless compaction made it."""

    object_id: int
    order_id: int
    object_size: int
    range_count: int


def listed_objects(objects: SetObjects) -> dict[int, ListedObject]:
    """Return the objects of a listing by id."""
    columns = (objects.object_id, objects.order_id, objects.object_size, objects.range_count)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return {row[0]: ListedObject(*row) for row in rows}


@dataclass(frozen=True, slots=True)
class Change:
    """A figure before and after the plan."""

    before: int
    after: int

    def __add__(self, other: Change) -> Change:
        return Change(self.before + other.before, self.after + other.after)


NO_CHANGE = Change(0, 0)


@dataclass(frozen=True, slots=True)
class OutputFigures:
    """An object that a commit would make.

    `held` is a stream object's stream id, start offset and end offset; None in a set object.
    """

    kind: OutputKind
    held: tuple[int, int, int] | None
    ranges: int
    index_entries: int
    data_size: int

    @property
    def object_size(self) -> int:
        """Bytes of the object."""
        return self.data_size + self.index_entries * INDEX_ENTRY_SIZE + FOOTER_SIZE


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs and savings of commits.

    `cold_gets` are the requests of a reader with empty caches that reads one stream after the
    other, `streams` of them; a stream counts once for each commit that moves it. `gets` and
    `bytes_read` are those of the compaction, its indexes included. `fresh_bytes` are those of
    sources that no compaction has written.
    """

    iterations: int = 0
    objects: Change = NO_CHANGE
    metadata_bytes: Change = NO_CHANGE
    streams: int = 0
    cold_gets: Change = NO_CHANGE
    gets: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    fresh_bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        names = Cost.__slots__
        return Cost(*(getattr(self, name) + getattr(other, name) for name in names))

    @property
    def gets_per_cold_read(self) -> tuple[float, float] | None:
        """Mean requests, before and after, to read all of one stream; None without streams."""
        if not self.streams:
            return None
        return self.cold_gets.before / self.streams, self.cold_gets.after / self.streams

    @property
    def write_amplification(self) -> float | None:
        """Bytes written per byte that no compaction has written yet; None without such bytes."""
        return self.bytes_written / self.fresh_bytes if self.fresh_bytes else None


@dataclass(frozen=True, slots=True)
class CommitFigures:
    """One commit: its sources, its outputs and its cost."""

    source_ids: tuple[int, ...]
    kind: GroupKind
    outputs: tuple[OutputFigures, ...]
    cost: Cost


def commit_figures(
    commit: CommitPlan,
    sources: Sequence[ListedObject],
    config: CompactionConfig,
    kind: GroupKind,
) -> CommitFigures:
    """Return the figures of `commit`, which replaces all of `sources` within the bounds given.

    Sources without live offsets are in no plan and are only removed.
    """
    set_entries = _set_object_entries(commit)
    outputs = tuple(_outputs(commit, set_entries))
    ids = np.array([one.object_id for one in sources], dtype=np.int64)
    order = np.argsort(ids)
    holder = order[np.searchsorted(ids, commit.entries.object_id, sorter=order)]
    counts = np.bincount(holder, minlength=len(ids)).tolist()
    index_gets = [
        _index_gets(one.object_size, count) for one, count in zip(sources, counts, strict=True)
    ]
    index_bytes = sum(
        one.object_size - likely_index_start(one.object_size, one.range_count, "")
        for one in sources
    )
    block_gets, block_bytes = _block_reads(commit, config)
    cost = Cost(
        iterations=len(commit.iterations),
        objects=Change(len(sources), len(outputs)),
        metadata_bytes=Change(
            _metadata_bytes(len(sources), sum(one.range_count for one in sources)),
            _metadata_bytes(len(outputs), sum(one.ranges for one in outputs)),
        ),
        streams=len(np.unique(commit.entries.stream_id)),
        cold_gets=Change(
            _cold_gets(commit.entries, holder, index_gets), _cold_gets_after(outputs, set_entries)
        ),
        gets=len(sources) + block_gets,
        bytes_read=index_bytes + block_bytes,
        bytes_written=sum(one.object_size for one in outputs),
        fresh_bytes=sum(one.object_size for one in sources if one.order_id == one.object_id),
    )
    return CommitFigures(tuple(one.object_id for one in sources), kind, outputs, cost)


def _set_object_entries(commit: CommitPlan) -> EntryTable:
    """All that becomes one set object, in its order."""
    return EntryTable.concatenate(
        [
            output.entries
            for iteration in commit.iterations
            for output in iteration.outputs
            if output.kind is OutputKind.COMPACT
        ]
    )


def _outputs(commit: CommitPlan, set_entries: EntryTable) -> Iterator[OutputFigures]:
    """Yield the set object, if there is one, then the stream objects in the order they are made."""
    if len(set_entries):
        ranges = len(contiguous_runs(set_entries))
        yield _output(OutputKind.COMPACT, set_entries, None, ranges)
    for iteration in commit.iterations:
        for output in iteration.outputs:
            if output.kind is OutputKind.SPLIT:
                entries = output.entries
                stream_id, start = int(entries.stream_id[0]), int(entries.start_offset[0])
                held = (stream_id, start, int(entries.end_offset[-1]))
                yield _output(OutputKind.SPLIT, entries, held, 1)


def _output(
    kind: OutputKind, entries: EntryTable, held: tuple[int, int, int] | None, ranges: int
) -> OutputFigures:
    index = merged_index(entries.placed(), OUTPUT_INDEX_THRESHOLD, MergeRule.BELOW)
    return OutputFigures(kind, held, ranges, len(index), entries.data_size)


def _metadata_bytes(objects: int, ranges: int) -> int:
    return objects * OBJECT_METADATA_BYTES + ranges * RANGE_METADATA_BYTES


def _block_reads(commit: CommitPlan, config: CompactionConfig) -> tuple[int, int]:
    """Count the requests with which the compaction fetches blocks, and their bytes."""
    so_far, gets, size = SetObjectSoFar(), 0, 0
    for iteration in commit.iterations:
        layout = lay_out(
            iteration.outputs,
            so_far,
            ends_set_object=False,
            part_size=config.part_size,
            max_read_bytes=config.read_bytes,
        )
        gets += len(layout.reads)
        size += sum(read.size for read in layout.reads)
    return gets, size


def _cold_gets_after(outputs: Sequence[OutputFigures], set_entries: EntryTable) -> int:
    """Requests to read each stream of the outputs, one stream after the other."""
    gets = 0
    for one in outputs:
        index_gets = _index_gets(one.object_size, one.index_entries)
        if one.kind is OutputKind.COMPACT:
            gets += _cold_gets(set_entries, np.zeros(len(set_entries), np.int64), [index_gets])
        else:
            gets += index_gets + -(-one.data_size // MAX_SPAN)
    return gets


def _cold_gets(entries: EntryTable, holder: Column, index_gets: Sequence[int]) -> int:
    """Sum, over each stream in each object, the requests for the index and for the stream's bytes.

    `holder` has the place of each entry's object in `index_gets`.
    """
    _, stream = np.unique(entries.stream_id, return_inverse=True)
    pairs, place = np.unique(stream * len(index_gets) + holder, return_inverse=True)
    held = np.bincount(place, weights=entries.size).astype(np.int64)
    of_indexes = np.array(index_gets, dtype=np.int64)[pairs % len(index_gets)]
    return int(of_indexes.sum() + (-(-held // MAX_SPAN)).sum())


def _index_gets(object_size: int, entries: int) -> int:
    """Count the requests for an index: a second one if the first guess starts behind it."""
    guess = tail_guess(object_size, "")
    begins = object_size - FOOTER_SIZE - entries * INDEX_ENTRY_SIZE
    return 1 if begins >= guess.start else 2


SHOWN_ROWS = 20
"""Rows of a table shown to people; programs get all."""

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
    """The plan for one node. `left_out` has a reason by object id."""

    node_id: int
    commits: tuple[CommitFigures, ...]
    left_out: Mapping[int, str]


@dataclass(slots=True)
class NodeTotals:
    """Work done for one node.

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
    """Work done in all passes; objects left out and failures of the last one.

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
        """Add the report of a group of a node's set objects, or of one of its streams."""
        node = self.nodes.setdefault(node_id, NodeTotals())
        self.left_out.setdefault(node_id, {}).update(report.left_out)
        failure = "; ".join(report.failures)
        if report.stream_id is not None:
            node.merged += len(report.source_ids)
            node.made += len(report.made)
            if failure:
                said = f"node {node_id}, stream {report.stream_id}: {failure}"
                self.failures.setdefault(node_id, said)
            return
        node.sources += len(report.source_ids)
        node.set_objects += len(report.set_object_ids)
        node.stream_objects += len(report.stream_object_ids)
        node.figures.add(report.figures)
        if failure:
            self.failures[node_id] = f"node {node_id}: {failure}"

    def summary(self) -> dict[str, object]:
        """Add the nodes up."""
        nodes = self.nodes.values()
        sums = Figures.total(one.figures for one in nodes)
        return {
            "passes": self.passes,
            "commits": sums.commits,
            "sources": sum(one.sources for one in nodes),
            "set_objects": sum(one.set_objects for one in nodes),
            "stream_objects": sum(one.stream_objects for one in nodes),
            "merged_stream_objects": sum(one.merged for one in nodes),
            "made_stream_objects": sum(one.made for one in nodes),
            "bytes_read": sums.bytes_read,
            "bytes_written": sums.bytes_written,
            "gets": sums.gets,
            "puts": sums.puts,
            "parts": sums.parts,
            "reused_outputs": sums.reused,
        }


def show_totals(output: Output, totals: Totals) -> None:
    """Show the work done."""
    output.summary(totals.summary())
    show_rows(output, "nodes", NODE_COLUMNS, _node_rows(totals))
    show_rows(output, "left_out", LEFT_COLUMNS, left_rows(totals.left_out.items()))
    show_rows(output, "failures", FAILURE_COLUMNS, sorted(totals.failures.items()))


def show_plan(output: Output, plans: Sequence[NodePlan]) -> None:
    """Show the sums, then commits, sources, outputs and objects left out."""
    output.summary(plan_summary(plans))
    show_rows(output, "plan", COMMIT_COLUMNS, _commit_rows(plans))
    show_rows(output, "sources", SOURCE_COLUMNS, _source_rows(plans))
    show_rows(output, "outputs", OUTPUT_COLUMNS, _output_rows(plans))
    left = left_rows((one.node_id, one.left_out) for one in plans)
    show_rows(output, "left_out", LEFT_COLUMNS, left)


def plan_summary(plans: Sequence[NodePlan]) -> dict[str, object]:
    """Return the sums over the plans of some nodes."""
    commits = [commit.cost for one in plans for commit in one.commits]
    sums = sum(commits, Cost())
    gets = sums.gets_per_cold_read
    amplification = sums.write_amplification
    return {
        "node_ids": [one.node_id for one in plans],
        "commits": len(commits),
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


def show_rows(output: Output, name: str, columns: Sequence[str], rows: Iterable[Row]) -> None:
    """Show a table; without a machine format only the beginning of a long one."""
    listed = list(rows)
    if output.format is OutputFormat.TABLE and listed:
        output.note("")
        output.note(f"{name}:")
        output.rows(name, columns, listed[:SHOWN_ROWS])
        if len(listed) > SHOWN_ROWS:
            output.note(f"... and {len(listed) - SHOWN_ROWS} more; --format json has all")
    elif listed or output.format is OutputFormat.JSON:
        output.rows(name, columns, listed)


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
            *(_count(commit, OutputKind.SPLIT), commit.cost.iterations),
            *(commit.cost.bytes_read, commit.cost.bytes_written),
        )


def _source_rows(plans: Iterable[NodePlan]) -> Iterator[Row]:
    for node_id, number, commit in _commits(plans):
        for object_id in commit.source_ids:
            yield node_id, number, object_id


def _output_rows(plans: Iterable[NodePlan]) -> Iterator[Row]:
    for node_id, number, commit in _commits(plans):
        for output in commit.outputs:
            kind = "set object" if output.kind is OutputKind.COMPACT else "stream object"
            held = output.held or (None, None, None)
            yield node_id, number, kind, *held, output.ranges, output.object_size


def _commits(plans: Iterable[NodePlan]) -> Iterator[tuple[int, int, CommitFigures]]:
    """Yield each commit with its node and its number there, from 1."""
    for one in plans:
        for number, commit in enumerate(one.commits, start=1):
            yield one.node_id, number, commit


def _count(commit: CommitFigures, kind: OutputKind) -> int:
    return sum(output.kind is kind for output in commit.outputs)
