"""Report of a plan as a self-contained HTML page, without scripts, fonts or network access.

Keys of a bucket are untrusted: every text is escaped, unprintable characters are spelled out, and
the page forbids the browser to load anything. Its layout is `templates/report.html`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from streammeta.reconcile.plans.plan_folder import LostRange, PlanResult
from streammeta.reconcile.reports.figures import AGES, NO_NODE, Figures
from streammeta.reconcile.vocabulary.tables import Tally
from streammeta.reconcile.vocabulary.verdicts import IN_BUCKET_AND_OURS

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
