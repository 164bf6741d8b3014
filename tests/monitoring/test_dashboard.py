"""The dashboard for Grafana: the file is what it is made from, and its expressions are sound.

That each gives values is tested against a Prometheus, where there is one.
"""

from __future__ import annotations

import re

from tests.monitoring.dashboard import FILE, dashboard, expressions, text
from tests.monitoring.metrics_table import series_names


def test_the_file_is_what_it_is_made_from() -> None:
    assert FILE.read_text() == text(), "run: python -m tests.monitoring.dashboard"


def test_expressions_speak_of_series_that_exist() -> None:
    for title, expression in expressions():
        used = set(re.findall(r"\b(?:streammeta|process)_\w+", expression))
        assert used, title
        assert used <= series_names() | series_names(" of clients") | series_names(
            " of Kafka brokers"
        ), title


def test_buckets_and_counters_are_within_a_rate() -> None:
    for title, expression in expressions():
        for name in re.findall(r"\w+_(?:bucket|total)\b", expression):
            assert re.search(rf"rate\({name}{{[^}}]*}}\[\$__rate_interval\]\)", expression), title


def test_panels_have_units_and_places_of_their_own() -> None:
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(panels)
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])
