"""Report of a plan as a self-contained HTML page, without scripts, fonts or network access.

Keys of a bucket are untrusted: every text is escaped, unprintable characters are spelled out, and
the page forbids the browser to load anything. Its layout is `templates/report.html`.

Figures come from one pass over the verdicts, in bounded memory, because only the largest prefixes
are kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from streammeta.reconcile.plans.plan_folder import LostRange, PlanResult
from streammeta.reconcile.vocabulary.tables import Tally
from streammeta.reconcile.vocabulary.verdicts import IN_BUCKET_AND_OURS, Verdict

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


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def report_page(
    plan: PlanResult, figures: Figures | None, earlier: Sequence[PlanResult] = ()
) -> str:
    """Return the page of a plan. `figures` is None if its keys were not compared.

    `earlier` are plans of the same bucket, oldest first.
    """
    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        # A misspelled field fails in the tests and does not show as an empty cell.
        undefined=StrictUndefined,
        finalize=_spell,
        trim_blocks=True,
    )
    environment.filters |= {
        "count": lambda number: f"{number:,}",
        "size": _size,
        "moment": _moment,
        "span": _span,
    }
    compared = {} if figures is None else _tallies(figures)
    return environment.get_template("report.html").render(
        plan=plan,
        facts=_facts(plan),
        growth=[(past, _stored(past)) for past in (*earlier, plan)],
        figures=figures,
        **compared,
    )


def _spell(value: object) -> object:
    """Return a text with its unprintable and direction-changing characters spelled out."""
    # Markup is the output of a macro, whose texts were spelled and escaped inside it.
    if isinstance(value, Markup):
        return value
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in str(value)
    )


def _size(size: int) -> str:
    """Format bytes with a unit: "1.5 MiB"."""
    value, unit = float(size), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{size} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def _moment(at_ms: int) -> str:
    try:
        return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
    # A broker chose the time, and no calendar goes that far.
    except (ValueError, OverflowError):
        return f"{at_ms} ms since 1970"


def _span(loss: LostRange) -> str:
    """Return the times of the records, as far as they are known, or else of the commit."""
    known = [at for at in (loss.min_timestamp_ms, loss.max_timestamp_ms) if at is not None]
    return " to ".join(map(_moment, known)) or f"committed {_moment(loss.committed_ms)}"


def _facts(plan: PlanResult) -> list[tuple[str, str]]:
    return [
        ("cluster", f"{plan.cluster_id}, UUID {plan.cluster_uuid}"),
        ("namespace", plan.namespace),
        ("store", plan.place),
        ("listing", plan.inventory or "of the bucket itself"),
        ("rows of the same key passed over", f"{plan.repeated_rows:,}"),
        ("listing began", _moment(plan.listing_started_ms)),
        ("orphans changed before", _moment(plan.young_from_ms)),
        (
            "map",
            "not copied"
            if plan.map_end_offset is None
            else f"{plan.map_objects:,} objects at offset {plan.map_end_offset:,}",
        ),
        (
            "unfinished multipart uploads",
            "not listed" if plan.unfinished_uploads is None else f"{plan.unfinished_uploads:,}",
        ),
        *(("not found out", sentence) for sentence in plan.unknown),
    ]


def _stored(plan: PlanResult) -> Tally:
    """Return the keys and bytes of the cluster in the bucket."""
    found = (tally for verdict, tally in plan.classes.items() if verdict in IN_BUCKET_AND_OURS)
    return sum(found, Tally())


def _tallies(figures: Figures) -> dict[str, list[tuple[str, Tally]]]:
    further = [("all others", figures.further)] if figures.further.keys else []
    steps = zip((name for name, _ in AGES), figures.ages, strict=True)
    return {
        "ages": [(name, tally) for name, tally in steps if tally.keys],
        "nodes": [
            ("no node" if node == NO_NODE else str(node), tally)
            for node, tally in figures.by_node.items()
        ],
        "prefixes": [*figures.by_prefix.items(), *further],
    }
