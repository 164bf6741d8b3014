"""Metrics of continuous reconciliation: the last round, as text for node_exporter. Pure."""

from __future__ import annotations

from streammeta.reconcile.deletion.order import Outcome
from streammeta.reconcile.vocabulary import tables, verdicts
from streammeta.reconcile.watch import Round, RoundOutcome

METRICS = {
    "streammeta_reconcile_last_round_timestamp_seconds": "End of the last round.",
    "streammeta_reconcile_last_success_timestamp_seconds": (
        "End of the last round that settled every candidate, 0 before the first."
    ),
    "streammeta_reconcile_last_round_duration_seconds": "Time that the last round took.",
    "streammeta_reconcile_last_round_outcome": "1 for the outcome of the last round, else 0.",
    "streammeta_reconcile_lost_objects": "Objects of the metadata missing or damaged, confirmed.",
    "streammeta_reconcile_keys": "Keys of the last round, by verdict.",
    "streammeta_reconcile_bytes": "Bytes of the last round, by verdict.",
    "streammeta_reconcile_candidates": "Candidates of the last round, by what became of them.",
}
"""Gauges of the last round, by name. The label `store` is the bucket and its endpoint."""


def exposition(last: Round, place: str) -> str:
    """Return the last round in the format of Prometheus' textfile collector."""
    series: dict[str, list[tuple[str, float]]] = {
        "last_round_timestamp_seconds": [("", last.ended_ms / 1000)],
        "last_success_timestamp_seconds": [("", last.last_success_ms / 1000)],
        "last_round_duration_seconds": [("", (last.ended_ms - last.started_ms) / 1000)],
        "last_round_outcome": [
            (f',outcome="{outcome}"', int(outcome is last.outcome)) for outcome in RoundOutcome
        ],
        "lost_objects": [("", last.lost)],
        "keys": [
            (f',verdict="{verdict}"', last.verdicts.get(verdict, tables.Tally(0, 0)).keys)
            for verdict in verdicts.Verdict
        ],
        "bytes": [
            (f',verdict="{verdict}"', last.verdicts.get(verdict, tables.Tally(0, 0)).size)
            for verdict in verdicts.Verdict
        ],
        "candidates": [
            (f',outcome="{outcome}"', last.outcomes.get(outcome, tables.Tally(0, 0)).keys)
            for outcome in Outcome
        ],
    }
    store = place.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return "".join(
        f"# HELP {name} {meaning}\n# TYPE {name} gauge\n"
        + "".join(
            f'{name}{{store="{store}"{labels}}} {value}\n'
            for labels, value in series[name.removeprefix("streammeta_reconcile_")]
        )
        for name, meaning in METRICS.items()
    )
