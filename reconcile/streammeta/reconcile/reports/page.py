"""Report of a plan as a self-contained HTML page, without scripts, fonts or network access.

Keys of a bucket are untrusted: every text is escaped, unprintable characters are spelled out, and
the page forbids the browser to load anything. Pure.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from streammeta.reconcile.plans.plan_folder import LostRange, PlanResult
from streammeta.reconcile.reports.figures import AGES, NO_NODE, Figures
from streammeta.reconcile.vocabulary.tables import Tally
from streammeta.reconcile.vocabulary.verdicts import IN_BUCKET_AND_OURS, Verdict

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

_STYLE = """
:root { color-scheme: light dark; --text: #1c2126; --faint: #5d6770; --line: #d5dade;
  --page: #ffffff; --bar: #2f6fab; --good: #1f7a3d; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8eb; --faint: #9aa5ae; --line: #394149;
  --page: #14181c; --bar: #5b9bd5; --good: #6cc48a; --bad: #f2857d; } }
body { background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif;
  margin: 2rem auto; max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem; text-align: left;
  vertical-align: top; }
th { color: var(--faint); font-weight: 600; }
td.number, th.number { font-variant-numeric: tabular-nums; text-align: right; white-space: nowrap; }
td.bar { width: 40%; }
td.bar div { background: var(--bar); border-radius: 2px; height: .8rem; margin-top: .35rem;
  min-width: 1px; }
td.bar div.orphans { background: var(--bad); margin-top: 0; min-width: 0; }
code { overflow-wrap: anywhere; }
.passed { color: var(--good); } .failed { color: var(--bad); font-weight: 600; }
p.faint { color: var(--faint); }
"""


def report_page(
    plan: PlanResult, figures: Figures | None, earlier: Sequence[PlanResult] = ()
) -> str:
    """Return the page of a plan. `figures` is None if its keys were not compared.

    `earlier` are plans of the same bucket, oldest first.
    """
    sections = [_about(plan), _guards(plan), _losses(plan), _classes(plan)]
    if figures is not None:
        sections += [
            _growth([*earlier, plan]),
            _bars("Orphans by age", "age", _named_ages(figures)),
            _bars("Objects of the map by node", "node", _named_nodes(figures)),
            _bars("Other keys by first segment", "first segment", _named_prefixes(figures)),
            *_examples(figures),
        ]

    title = f"Reconciliation of {_shown(plan.cluster_id)}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy"'
        " content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        + "\n".join(sections)
        + "\n</body>\n</html>\n"
    )


def _shown(text: object) -> str:
    """Escape a text, with unprintable and direction-changing characters spelled out."""
    spelled = (
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(text)
    )
    return html.escape("".join(spelled))


def _size(size: int) -> str:
    """Format bytes with a unit: "1.5 MiB"."""
    value, unit = float(size), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{size} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def _moment(at_ms: int) -> str:
    try:
        return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError):  # a broker's word; no calendar goes that far
        return f"{at_ms} ms since 1970"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of HTML cells, with a row of headings."""
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "\n".join("<tr>" + "".join(row) + "</tr>" for row in rows)
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"


def _cell(text: object) -> str:
    return f"<td>{_shown(text)}</td>"


def _about(plan: PlanResult) -> str:
    facts = {
        "cluster": f"{plan.cluster_id}, UUID {plan.cluster_uuid}",
        "namespace": plan.namespace,
        "store": plan.place,
        "listing": plan.inventory or "of the bucket itself",
        "rows of the same key passed over": f"{plan.repeated_rows:,}",
        "listing began": _moment(plan.listing_started_ms),
        "orphans changed before": _moment(plan.young_from_ms),
        "map": "not copied"
        if plan.map_end_offset is None
        else f"{plan.map_objects:,} objects at offset {plan.map_end_offset:,}",
        "unfinished multipart uploads": "not listed"
        if plan.unfinished_uploads is None
        else f"{plan.unfinished_uploads:,}",
    }
    rows = [(_cell(name), _cell(value)) for name, value in facts.items()]
    rows += [(_cell("not found out"), _cell(sentence)) for sentence in plan.unknown]
    verdict = (
        '<p class="failed">A report only: guards failed, apply refuses this plan.</p>'
        if plan.failed_guards
        else f"<p>Apply may delete {plan.candidates.keys:,} keys,"
        f" {_size(plan.candidates.size)}.</p>"
    )

    return verdict + _table(("", ""), rows)


def _guards(plan: PlanResult) -> str:
    def finding(passed: bool) -> str:
        word = "passed" if passed else "failed"
        return f'<td class="{word}">{word}</td>'

    rows = [
        (_cell(guard.name), finding(guard.passed), _cell(guard.detail)) for guard in plan.guards
    ]
    return "<h2>Guards</h2>" + _table(("guard", "finding", "detail"), rows)


def _losses(plan: PlanResult) -> str:
    """Return the section of confirmed losses, with the first ranges."""
    title = "<h2>Missing and damaged objects</h2>"
    if plan.losses is None:
        return f'{title}<p class="failed">Not confirmed: {plan.suspected:,} suspected.</p>'

    losses = plan.losses
    if not losses.objects:
        return f'{title}<p class="faint">None.</p>'

    rows = [
        tuple(_cell("" if value is None else value) for value in (*told, _span(loss)))
        for loss in losses.first
        for told in [(loss.verdict, loss.stream_id, loss.start_offset, loss.end_offset, loss.key)]
    ]
    heads = ("verdict", "stream", "from offset", "to offset", "key", "records of")
    return (
        f'{title}<p class="failed">{losses.objects:,} objects, {_size(losses.size)}:'
        f" {losses.ranges:,} ranges of {losses.streams:,} streams.</p>" + _table(heads, rows)
    )


def _span(one: LostRange) -> str:
    """The times of the records, as far as they are known, or else of the commit."""
    known = [at for at in (one.min_timestamp_ms, one.max_timestamp_ms) if at is not None]
    return " to ".join(map(_moment, known)) or f"committed {_moment(one.committed_ms)}"


def _classes(plan: PlanResult) -> str:
    classes = [(str(verdict), tally) for verdict, tally in plan.classes.items()]
    return _bars("Bytes by verdict", "verdict", classes)


def _growth(plans: Sequence[PlanResult]) -> str:
    """Return the section of the cluster's bytes in each plan, with the orphans' bytes."""
    title = "Growth since earlier plans"
    if len(plans) == 1:
        return f'<h2>{title}</h2><p class="faint">No earlier plan lies beside this one.</p>'

    held = [_held(plan, *IN_BUCKET_AND_OURS) for plan in plans]
    largest = max(tally.size for tally in held) or 1
    rows = [
        (
            _cell(_moment(plan.listing_started_ms)),
            f'<td class="number">{tally.keys:,}</td><td class="number">{_size(tally.size)}</td>',
            f'<td class="number">{_size(plan.candidates.size)}</td>',
            '<td class="bar">'
            + _bar(tally.size / largest, plan.candidates.size / (tally.size or 1)),
        )
        for plan, tally in zip(plans, held, strict=True)
    ]
    heads = ("listing began", "keys", "bytes", "of them orphans", "")

    return f"<h2>{title}</h2>" + _table(heads, rows)


def _bar(share: float, of_orphans: float) -> str:
    orphans = f'<div class="orphans" style="width:{of_orphans:.1%}"></div>'
    return f'<td class="bar"><div style="width:{share:.1%}">{orphans}</div></td>'


def _held(plan: PlanResult, *verdicts: Verdict) -> Tally:
    found = [tally for verdict, tally in plan.classes.items() if verdict in verdicts]
    return Tally(sum(tally.keys for tally in found), sum(tally.size for tally in found))


def _bars(title: str, what: str, tallies: Sequence[tuple[str, Tally]]) -> str:
    """Return a section with a bar for the bytes of each name."""
    largest = max((tally.size for _, tally in tallies), default=0) or 1
    rows = [
        (
            _cell(name),
            f'<td class="number">{tally.keys:,}</td><td class="number">{_size(tally.size)}</td>',
            f'<td class="bar"><div style="width:{100 * tally.size / largest:.1f}%"></div></td>',
        )
        for name, tally in tallies
    ]
    if not rows:
        return f'<h2>{title}</h2><p class="faint">None.</p>'
    return f"<h2>{title}</h2>" + _table((what, "keys", "bytes", ""), rows)


def _named_ages(figures: Figures) -> list[tuple[str, Tally]]:
    steps = zip((name for name, _ in AGES), figures.ages, strict=True)
    return [(name, tally) for name, tally in steps if tally.keys]


def _named_nodes(figures: Figures) -> list[tuple[str, Tally]]:
    return [
        ("no node" if node == NO_NODE else str(node), tally)
        for node, tally in figures.by_node.items()
    ]


def _named_prefixes(figures: Figures) -> list[tuple[str, Tally]]:
    further = [("all others", figures.further)] if figures.further.keys else []
    return [*figures.by_prefix.items(), *further]


def _examples(figures: Figures) -> list[str]:
    return [
        f"<h2>First keys: {_shown(verdict)}</h2>"
        + _table(("key",), [(f"<td><code>{_shown(key)}</code></td>",) for key in keys])
        for verdict, keys in figures.examples.items()
    ]
