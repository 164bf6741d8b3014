"""Tables of metrics in docs/metrics.md; `python -m tests.monitoring.metrics_table` writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from tests.monitoring.sampled import client_registry, kafka_registry, registry_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"

TABLES: Mapping[str, Callable[[], CollectorRegistry]] = {
    "": registry_of,
    " of clients": client_registry,
    " of Kafka brokers": kafka_registry,
}
"""Registries with all metrics of a program, by the words that name its table."""


def table(of: str = "") -> str:
    """Return the table of all metrics of a program, by default of a controller."""
    rows = "\n".join(_row(metric) for metric in _metrics(of))
    return f"| name | type | labels | meaning |\n|---|---|---|---|\n{rows}\n"


def written(of: str = "") -> str:
    """Return a table as the page has it."""
    begin, end = _marks(of)
    return PAGE.read_text().partition(begin)[2].partition(end)[0]


def _marks(of: str) -> tuple[str, str]:
    return f"<!-- begin of the table{of} -->\n", f"<!-- end of the table{of} -->\n"


def series_names(of: str = "") -> set[str]:
    """Return the names of all series of a program, those of a histogram's parts among them."""
    of_parts = {sample.name for metric in _metrics(of) for sample in metric.samples}
    return of_parts | {_name(metric) for metric in _metrics(of)}


def _metrics(of: str) -> Iterator[Metric]:
    return iter(sorted(TABLES[of]().collect(), key=lambda one: (not _is_ours(one), one.name)))


def _is_ours(metric: Metric) -> bool:
    return metric.name.startswith("streammeta_")


def _row(metric: Metric) -> str:
    labels = sorted({label for sample in metric.samples for label in sample.labels} - {"le"})
    return f"| `{_name(metric)}` | {metric.type} | {', '.join(labels)} | {metric.documentation} |"


def _name(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.type == "counter" else str(metric.name)


if __name__ == "__main__":
    for table_ in TABLES:
        begin, end = _marks(table_)
        before, _, rest = PAGE.read_text().partition(begin)
        assert rest, f"{PAGE.name} has no line {begin!r}"
        PAGE.write_text(before + begin + table(table_) + end + rest.partition(end)[2])
