"""Figures and tables of `streammeta compact`: costs and savings of a plan, and finished work.

Owns the arithmetic over a plan (objects, bytes of metadata, requests of readers, bytes moved) and
its rows. Figures cover the sources named in the plan and their outputs, not the rest of the
cluster. It calls neither the bucket nor the controllers.
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
    merge_entries,
)
from streammeta.storage.compaction.layout import StreamSetObjectSoFar, lay_out
from streammeta.storage.compaction.plan import CommitPlan, OutputKind
from streammeta.storage.compaction.selection import GroupKind, StreamSetObjects
from streammeta.storage.object_format.index_block import FOOTER_SIZE, INDEX_ENTRY_SIZE
from streammeta.storage.object_format.object_reader import tail_guess
from streammeta.storage.object_store.protocol.reads import MAX_SPAN

OBJECT_METADATA_BYTES = 54 + 32
"""One row each in the sections `objects` and `object_facts` of a checkpoint (docs/format.md)."""

RANGE_METADATA_BYTES = 32
"""A row in the section `object_ranges`."""


@dataclass(frozen=True, slots=True)
class ListedObject:
    """Metadata of a stream set object. `order_id` is its own id unless compaction wrote it."""

    object_id: int
    order_id: int
    object_size: int
    range_count: int


def listed_objects(objects: StreamSetObjects) -> dict[int, ListedObject]:
    """Return the objects of a listing by id."""
    columns = (objects.object_id, objects.order_id, objects.object_size, objects.range_count)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return {row[0]: ListedObject(*row) for row in rows}


@dataclass(frozen=True, slots=True)
class Change:
    """Figure before and after the plan."""

    before: int
    after: int

    def __add__(self, other: Change) -> Change:
        return Change(self.before + other.before, self.after + other.after)


NO_CHANGE = Change(0, 0)


@dataclass(frozen=True, slots=True)
class OutputFigures:
    """Object that a commit would create.

    `held` is stream id, start offset and end offset of a stream object, None for a stream set
    object.
    """

    kind: OutputKind
    held: tuple[int, int, int] | None
    ranges: int
    index_entries: int
    data_size: int

    @property
    def object_size(self) -> int:
        """Size of the object in bytes."""
        return self.data_size + self.index_entries * INDEX_ENTRY_SIZE + FOOTER_SIZE


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs and savings of commits.

    `cold_gets` are the requests of a reader with empty caches that reads the `streams` one after
    the other. A stream counts once for each commit that moves it. `gets` and `bytes_read` are the
    compaction's own, including indexes. `fresh_bytes` counts sources that no compaction has
    written.
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
        """Mean requests, before and after, to read all of one stream. None without streams."""
        if not self.streams:
            return None
        return self.cold_gets.before / self.streams, self.cold_gets.after / self.streams

    @property
    def write_amplification(self) -> float | None:
        """Bytes written per byte that no compaction has written yet. None without such bytes."""
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
    """Return the figures of `commit`, which replaces all of `sources` within the given bounds.

    Sources without live offsets are in no plan and are only removed.
    """
    set_entries = _set_object_entries(commit)
    outputs = tuple(_outputs(commit, set_entries))
    ids = np.array([source.object_id for source in sources], dtype=np.int64)
    # Entries name their source by id. searchsorted finds all places in `sources` without a loop.
    order = np.argsort(ids)
    holder = order[np.searchsorted(ids, commit.entries.object_id, sorter=order)]
    # Sources without a live entry count 0.
    counts = np.bincount(holder, minlength=len(ids)).tolist()
    index_gets = [
        _index_gets(source.object_size, count)
        for source, count in zip(sources, counts, strict=True)
    ]
    index_bytes = sum(
        source.object_size - likely_index_start(source.object_size, source.range_count, "")
        for source in sources
    )
    block_gets, block_bytes = _block_reads(commit, config)
    cost = Cost(
        iterations=len(commit.iterations),
        objects=Change(len(sources), len(outputs)),
        metadata_bytes=Change(
            _metadata_bytes(len(sources), sum(source.range_count for source in sources)),
            _metadata_bytes(len(outputs), sum(output.ranges for output in outputs)),
        ),
        # A stream that several objects contain counts once.
        streams=len(np.unique(commit.entries.stream_id)),
        cold_gets=Change(
            _cold_gets(commit.entries, holder, index_gets), _cold_gets_after(outputs, set_entries)
        ),
        # One request for each index, because the compactor sizes the read by the number of ranges.
        gets=len(sources) + block_gets,
        bytes_read=index_bytes + block_bytes,
        bytes_written=sum(output.object_size for output in outputs),
        # Compaction gives its outputs another order id, so an equal id marks an object from a
        # broker.
        fresh_bytes=sum(
            source.object_size for source in sources if source.order_id == source.object_id
        ),
    )

    return CommitFigures(tuple(source.object_id for source in sources), kind, outputs, cost)


def _set_object_entries(commit: CommitPlan) -> EntryTable:
    """Return all entries of the new stream set object, in its order."""
    return EntryTable.concatenate(
        [
            output.entries
            for iteration in commit.iterations
            for output in iteration.outputs
            if output.kind is OutputKind.COMPACT
        ]
    )


def _outputs(commit: CommitPlan, set_entries: EntryTable) -> Iterator[OutputFigures]:
    """Yield the stream set object, if any, then the stream objects in the order of creation."""
    if len(set_entries):
        # The metadata has one range for each contiguous run of a stream.
        ranges = len(contiguous_runs(set_entries))
        yield _output(OutputKind.COMPACT, set_entries, None, ranges)
    for iteration in commit.iterations:
        for output in iteration.outputs:
            if output.kind is OutputKind.SPLIT:
                entries = output.entries
                # A stream object is one contiguous range, which its first and last entries bound.
                stream_id, start = int(entries.stream_id[0]), int(entries.start_offset[0])
                held = (stream_id, start, int(entries.end_offset[-1]))
                yield _output(OutputKind.SPLIT, entries, held, 1)


def _output(
    kind: OutputKind, entries: EntryTable, held: tuple[int, int, int] | None, ranges: int
) -> OutputFigures:
    # The writer merges entries by the same rule, so that the predicted size is exact.
    index = merge_entries(entries.place(), OUTPUT_INDEX_THRESHOLD, MergeRule.BELOW)
    return OutputFigures(kind, held, ranges, len(index), entries.data_size)


def _metadata_bytes(objects: int, ranges: int) -> int:
    return objects * OBJECT_METADATA_BYTES + ranges * RANGE_METADATA_BYTES


def _block_reads(commit: CommitPlan, config: CompactionConfig) -> tuple[int, int]:
    """Count the requests with which the compaction fetches blocks, and their bytes."""
    # All iterations append to one stream set object. Each starts where the previous one ended.
    so_far, gets, size = StreamSetObjectSoFar(), 0, 0
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
    """Return requests to read each stream of the outputs, one stream after the other."""
    gets = 0
    for output in outputs:
        index_gets = _index_gets(output.object_size, output.index_entries)
        if output.kind is OutputKind.COMPACT:
            gets += _cold_gets(set_entries, np.zeros(len(set_entries), np.int64), [index_gets])
        else:
            # Ceiling division: a reader fetches at most MAX_SPAN bytes at a time.
            gets += index_gets + -(-output.data_size // MAX_SPAN)
    return gets


def _cold_gets(entries: EntryTable, holder: Column, index_gets: Sequence[int]) -> int:
    """Sum, over each stream in each object, the requests for the index and for the stream's bytes.

    `holder` has the place of each entry's object in `index_gets`.
    """
    _, stream = np.unique(entries.stream_id, return_inverse=True)
    # One number for each pair of stream and object, so that a single unique() groups by both.
    pairs, place = np.unique(stream * len(index_gets) + holder, return_inverse=True)
    held = np.bincount(place, weights=entries.size).astype(np.int64)
    # By the numbering above, the remainder is the object.
    of_indexes = np.array(index_gets, dtype=np.int64)[pairs % len(index_gets)]
    return int(of_indexes.sum() + (-(-held // MAX_SPAN)).sum())


def _index_gets(object_size: int, entries: int) -> int:
    """Count the requests for an index: a second one if the first guess misses its start."""
    # Readers know the size of the object only, unlike the compactor, which also knows its ranges.
    guess = tail_guess(object_size, "")
    begins = object_size - FOOTER_SIZE - entries * INDEX_ENTRY_SIZE
    return 1 if begins >= guess.start else 2


SHOWN_ROWS = 20
"""Maximum rows of a table for people. Programs get all rows."""

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

    `sources` are stream set objects that `set_objects` and `stream_objects` replaced. `merged` are
    stream objects that `made` replaced, or that were only removed.
    """

    sources: int = 0
    set_objects: int = 0
    stream_objects: int = 0
    figures: Figures = field(default_factory=Figures)
    merged: int = 0
    made: int = 0


@dataclass(slots=True)
class Totals:
    """Work done in all passes, with skipped objects and failures of the last one.

    `failures` are by node id, -1 for all nodes.
    """

    passes: int = 1
    nodes: dict[int, NodeTotals] = field(default_factory=dict)
    left_out: dict[int, dict[int, str]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    def begin_pass(self) -> None:
        """Count another pass and reset its failures."""
        self.passes += 1
        self.left_out.clear()
        self.failures.clear()

    def add(self, node_id: int, report: GroupReport) -> None:
        """Add the report of a group of stream set objects of a node, or of one of its streams."""
        node = self.nodes.setdefault(node_id, NodeTotals())
        self.left_out.setdefault(node_id, {}).update(report.left_out)
        failure = "; ".join(report.failures)

        if report.stream_id is not None:
            node.merged += len(report.source_ids)
            node.made += len(report.made)
            if failure:
                # The node's first failure is kept. Streams after it often fail for the same reason.
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
        """Return the sums over all nodes."""
        nodes = self.nodes.values()
        sums = Figures.total(node.figures for node in nodes)

        return {
            "passes": self.passes,
            "commits": sums.commits,
            "sources": sum(node.sources for node in nodes),
            "set_objects": sum(node.set_objects for node in nodes),
            "stream_objects": sum(node.stream_objects for node in nodes),
            "merged_stream_objects": sum(node.merged for node in nodes),
            "made_stream_objects": sum(node.made for node in nodes),
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
    """Show the sums, then commits, sources, outputs and skipped objects."""
    output.summary(plan_summary(plans))
    show_rows(output, "plan", COMMIT_COLUMNS, _commit_rows(plans))
    show_rows(output, "sources", SOURCE_COLUMNS, _source_rows(plans))
    show_rows(output, "outputs", OUTPUT_COLUMNS, _output_rows(plans))
    left = left_rows((plan.node_id, plan.left_out) for plan in plans)
    show_rows(output, "left_out", LEFT_COLUMNS, left)


def plan_summary(plans: Sequence[NodePlan]) -> dict[str, object]:
    """Return the sums over the plans of some nodes."""
    commits = [commit.cost for plan in plans for commit in plan.commits]
    sums = sum(commits, Cost())
    gets = sums.gets_per_cold_read
    amplification = sums.write_amplification

    return {
        "node_ids": [plan.node_id for plan in plans],
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
        "left_out_objects": sum(len(plan.left_out) for plan in plans),
    }


def show_rows(output: Output, name: str, columns: Sequence[str], rows: Iterable[Row]) -> None:
    """Show a table. Outside of machine formats only the beginning of a long one."""
    # People need no empty tables. Programs get every key, with an empty list.
    listed = list(rows)
    if output.format is OutputFormat.TABLE and listed:
        output.note("")
        output.note(f"{name}:")
        output.rows(name, columns, listed[:SHOWN_ROWS])
        if len(listed) > SHOWN_ROWS:
            output.note(f"... and {len(listed) - SHOWN_ROWS} more. --format json has all")
    elif listed or output.format is OutputFormat.JSON:
        output.rows(name, columns, listed)


def left_rows(left_out: Iterable[tuple[int, Mapping[int, str]]]) -> Iterator[Row]:
    """Yield one row for each unchanged object. `left_out` is by node."""
    for node_id, reasons in left_out:
        for object_id, reason in sorted(reasons.items()):
            yield node_id, object_id, reason


def _node_rows(totals: Totals) -> Iterator[Row]:
    for node_id, work in sorted(totals.nodes.items()):
        yield (
            *(node_id, work.figures.commits, work.sources, work.set_objects, work.stream_objects),
            *(work.merged, work.made, work.figures.bytes_read, work.figures.bytes_written),
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
    for plan in plans:
        for number, commit in enumerate(plan.commits, start=1):
            yield plan.node_id, number, commit


def _count(commit: CommitFigures, kind: OutputKind) -> int:
    return sum(output.kind is kind for output in commit.outputs)
