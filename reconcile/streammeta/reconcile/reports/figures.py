"""Figures of a plan's report, from one pass over its verdicts.

Memory is bounded, because only the largest prefixes are kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streammeta.reconcile.vocabulary.tables import Tally
from streammeta.reconcile.vocabulary.verdicts import Verdict

_HOUR_MS = 3_600_000
_DAY_MS = 24 * _HOUR_MS

AGES: tuple[tuple[str, int], ...] = (
    ("less than 1 h", _HOUR_MS),
    ("1 h to 6 h", 6 * _HOUR_MS),
    ("6 h to 1 d", _DAY_MS),
    ("1 d to 7 d", 7 * _DAY_MS),
    ("7 d to 30 d", 30 * _DAY_MS),
    ("30 d to 1 y", 365 * _DAY_MS),
    ("more than 1 y", 1 << 62),
)
"""Steps of age: a name, and the end of the step in milliseconds."""

SHOWN_VERDICTS = (
    Verdict.ORPHAN,
    Verdict.MISSING,
    Verdict.SIZE_MISMATCH,
    Verdict.NOT_ISSUED,
    Verdict.UNDECIDED,
    Verdict.UNKNOWN_STATE,
    Verdict.FOREIGN,
)
"""Verdicts whose keys the report names."""

FIGURE_COLUMNS = "key string, verdict string, size long, modified_ms long, map_node long"
"""Columns of verdicts from which figures are computed."""

KEYS_SHOWN = 20
PREFIXES_SHOWN = 20
_PREFIXES_KEPT = 1000

NO_NODE = -1


@dataclass(frozen=True, slots=True)
class Figures:
    """Keys and bytes: orphans by step of age, known objects by node, other keys by prefix.

    `by_prefix` counts the keys that are not the cluster's objects, by their first path segment.
    `further` are the keys of unnamed prefixes. `examples` are the first keys of a verdict.
    """

    ages: tuple[Tally, ...]
    by_node: Mapping[int, Tally]
    by_prefix: Mapping[str, Tally]
    further: Tally
    examples: Mapping[Verdict, tuple[str, ...]]


@dataclass(slots=True)
class _Sums:
    """Sums under construction."""

    ages: list[Tally] = field(default_factory=lambda: [Tally()] * len(AGES))
    nodes: defaultdict[int, Tally] = field(default_factory=lambda: defaultdict(Tally))
    prefixes: defaultdict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    further: Tally = field(default_factory=Tally)
    examples: dict[Verdict, list[str]] = field(default_factory=dict)


def figures_of(verdicts: Iterable[pa.RecordBatch], at_ms: int) -> Figures:
    """Return the figures of rows with `FIGURE_COLUMNS`. Ages are at `at_ms`, in Unix ms."""
    sums = _Sums()
    for rows in verdicts:
        _add_ages(sums, _of(rows, Verdict.ORPHAN), at_ms)
        _add_nodes(sums, rows)
        unowned = (Verdict.FOREIGN, Verdict.OTHER_CLUSTER, Verdict.MARKER, Verdict.LOG)
        _add_prefixes(sums, _of(rows, *unowned))
        for verdict in SHOWN_VERDICTS:
            keys = sums.examples.setdefault(verdict, [])
            # Stops reading keys early: most batches have no more to show.
            if len(keys) < KEYS_SHOWN:
                keys += (
                    _of(rows, verdict).column("key").slice(0, KEYS_SHOWN - len(keys)).to_pylist()
                )

    named = dict(_largest(sums.prefixes, PREFIXES_SHOWN))
    rest = [tally for prefix, tally in sums.prefixes.items() if prefix not in named]
    return Figures(
        ages=tuple(sums.ages),
        by_node=dict(sorted(sums.nodes.items())),
        by_prefix=named,
        further=sum(rest, sums.further),
        examples={verdict: tuple(keys) for verdict, keys in sums.examples.items() if keys},
    )


def _of(rows: pa.RecordBatch, *verdicts: Verdict) -> pa.RecordBatch:
    wanted = pa.array([str(verdict) for verdict in verdicts])
    return rows.filter(pc.is_in(rows.column("verdict"), wanted))


def _largest(found: Mapping[str, Tally], number: int) -> list[tuple[str, Tally]]:
    return sorted(found.items(), key=lambda item: (-item[1].size, -item[1].keys, item[0]))[:number]


def _add_ages(sums: _Sums, orphans: pa.RecordBatch, at_ms: int) -> None:
    sizes = orphans.column("size").to_numpy()
    ages = at_ms - orphans.column("modified_ms").to_numpy()
    steps = np.searchsorted([end_ms for _, end_ms in AGES], ages, side="right")
    for step in np.unique(steps).tolist():
        inside = steps == step
        tally = Tally(int(inside.sum()), int(sizes[inside].sum()))
        sums.ages[step] += tally


def _add_nodes(sums: _Sums, rows: pa.RecordBatch) -> None:
    known = rows.filter(pc.and_(rows.column("map_node").is_valid(), rows.column("size").is_valid()))
    for node, tally in _grouped(known.select(["map_node", "size"])):
        sums.nodes[node] += tally


def _add_prefixes(sums: _Sums, others: pa.RecordBatch) -> None:
    segments = pc.list_element(pc.split_pattern(others.column("key"), "/", max_splits=1), 0)
    for prefix, tally in _grouped(pa.record_batch([segments, others["size"]], ["prefix", "size"])):
        sums.prefixes[prefix] += tally
    if len(sums.prefixes) > 2 * _PREFIXES_KEPT:
        kept = dict(_largest(sums.prefixes, _PREFIXES_KEPT))
        dropped = [tally for prefix, tally in sums.prefixes.items() if prefix not in kept]
        sums.prefixes = defaultdict(Tally, kept)
        sums.further = sum(dropped, sums.further)


def _grouped(rows: pa.RecordBatch) -> list[tuple[Any, Tally]]:
    """Return keys and bytes by the value of the first column. The other column is `size`."""
    (name, _) = rows.schema.names
    table = pa.Table.from_batches([rows]).group_by(name)
    counted = table.aggregate([([], "count_all"), ("size", "sum")]).to_pylist()
    return [(row[name], Tally(row["count_all"], row["size_sum"] or 0)) for row in counted]
