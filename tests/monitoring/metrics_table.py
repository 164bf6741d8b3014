"""The table of metrics in docs/metrics.md; `python -m tests.monitoring.metrics_table` writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import Metric

from tests.monitoring.sampled import registry_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
BEGIN, END = "<!-- begin of the table -->\n", "<!-- end of the table -->\n"


def table() -> str:
    """Return the table of all metrics of a controller."""
    rows = "\n".join(_row(metric) for metric in _metrics())
    return f"| name | type | labels | meaning |\n|---|---|---|---|\n{rows}\n"


def written() -> str:
    """Return the table as the page has it."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def series_names() -> set[str]:
    """Return the names of all series, those of a histogram's parts among them."""
    of_parts = {sample.name for metric in _metrics() for sample in metric.samples}
    return of_parts | {_name(metric) for metric in _metrics()}


def _metrics() -> Iterator[Metric]:
    return iter(sorted(registry_of().collect(), key=lambda one: (not _is_ours(one), one.name)))


def _is_ours(metric: Metric) -> bool:
    return metric.name.startswith("streammeta_")


def _row(metric: Metric) -> str:
    labels = sorted({label for sample in metric.samples for label in sample.labels} - {"le"})
    return f"| `{_name(metric)}` | {metric.type} | {', '.join(labels)} | {metric.documentation} |"


def _name(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.type == "counter" else str(metric.name)


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
