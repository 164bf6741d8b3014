"""The dashboard in deploy/grafana; `python -m tests.monitoring.dashboard` writes it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "streammeta.json"
OURS = 'job="$job"'
OF_BROKERS = 'job="$brokers"'
"""Brokers and other programs with a client are scraped as another job than the controllers."""

RATE = "$__rate_interval"
COLUMNS, WIDTH, HEIGHT = 3, 8, 7


@dataclass(frozen=True)
class Panel:
    """A chart; `lines` are pairs of an expression and the name of its lines."""

    title: str
    unit: str
    lines: Sequence[tuple[str, str]]
    text: str = ""


def now(name: str, by: str = "instance", labels: str = "", how: str = "max") -> tuple[str, str]:
    """Return the values of a gauge, the largest of each group by default."""
    return f"{how} by ({by}) ({_selected(name, labels)})", "{{" + by + "}}"


def rate(name: str, by: str = "instance", labels: str = "") -> tuple[str, str]:
    """Return the growth a second of a counter."""
    return f"sum by ({by}) (rate({_selected(name, labels)}[{RATE}]))", "{{" + by + "}}"


def share(name: str, part: float, by: str = "instance", labels: str = "") -> tuple[str, str]:
    """Return a quantile of a histogram."""
    buckets = f"rate({_selected(name + '_bucket', labels)}[{RATE}])"
    expression = f"histogram_quantile({part}, sum by ({by}, le) ({buckets}))"
    return expression, f"p{round(100 * part)} {{{{{by}}}}}"


def _selected(name: str, labels: str = "") -> str:
    prefix = "" if name.startswith("process_") else "streammeta_"
    job = OF_BROKERS if name.startswith(("client_", "kafka_")) else OURS
    return f"{prefix}{name}{{{job}{',' + labels if labels else ''}}}"


ROWS: Sequence[tuple[str, Sequence[Panel]]] = (
    (
        "Quorum",
        [
            Panel("Leader", "none", [now("quorum_is_leader")], "1 for the controller that leads."),
            Panel("Epoch", "none", [now("quorum_epoch")], "Grows by one with each election."),
            Panel("Has a leader", "none", [now("quorum_has_leader", how="min")]),
            Panel("Entries behind the leader", "none", [now("quorum_replica_lag_offsets", "peer")]),
            Panel(
                "Time since caught up",
                "s",
                [now("quorum_replica_last_caught_up_age_seconds", "peer")],
            ),
            Panel(
                "Failed requests to peers", "reqps", [rate("peer_requests_failed_total", "peer")]
            ),
        ],
    ),
    (
        "Commits",
        [
            Panel("Commits", "ops", [rate("commits_total", "verdict")]),
            Panel(
                "Latency of commits",
                "s",
                [share("commit_latency_seconds", 0.5), share("commit_latency_seconds", 0.99)],
            ),
            Panel("Entries committed", "ops", [rate("quorum_high_watermark")]),
        ],
    ),
    (
        "Calls",
        [
            Panel("Calls", "reqps", [rate("requests_total", "method")]),
            Panel("Refused calls by reason", "reqps", [rate("requests_refused_total", "reason")]),
            Panel("p99 by method", "s", [share("request_duration_seconds", 0.99, "method")]),
            Panel("Under way", "none", [now("requests_under_way", "method", how="sum")]),
            Panel("Waiting to be admitted", "none", [now("admission_waiting", "class", how="sum")]),
            Panel("Refused for too many", "reqps", [rate("admission_refused_total", "class")]),
        ],
    ),
    (
        "Log and checkpoints",
        [
            Panel(
                "Flush of the log",
                "s",
                [
                    share("log_flush_duration_seconds", 0.5),
                    share("log_flush_duration_seconds", 0.99),
                ],
            ),
            Panel("Appended", "Bps", [rate("log_appended_bytes_total")]),
            Panel("Log on disk", "bytes", [now("log_bytes")]),
            Panel("Room on the disk", "bytes", [now("data_dir_free_bytes", how="min")]),
            Panel("Newest checkpoint", "bytes", [now("checkpoint_bytes")]),
            Panel("Age of the newest checkpoint", "s", [now("checkpoint_age_seconds")]),
        ],
    ),
    (
        "Map",
        [
            Panel("Streams", "none", [now("map_streams")]),
            Panel("Objects by state", "none", [now("map_objects", "state")]),
            Panel("Bytes of committed objects", "bytes", [now("map_object_bytes")]),
            Panel(
                "Share of the limits",
                "percentunit",
                [
                    (
                        f"max by (quota) ({_selected('map_used')} / {_selected('map_limit')})",
                        "{{quota}}",
                    )
                ],
            ),
            Panel("Set objects", "none", [now("map_set_objects")]),
            Panel("Keys", "none", [now("map_keys")]),
        ],
    ),
    (
        "Bucket and deletions",
        [
            Panel("Calls of the bucket", "reqps", [rate("bucket_calls_total", "operation")]),
            Panel(
                "Failed and throttled",
                "reqps",
                [
                    rate("bucket_calls_failed_total", "operation"),
                    rate("bucket_throttled_total", "operation"),
                ],
            ),
            Panel(
                "Lease on the bucket's marker",
                "s",
                [now("marker_lease_seconds")],
                "At 0 the controller acknowledges no change.",
            ),
            Panel("Deletions by result", "ops", [rate("deletions_total", "result")]),
            Panel(
                "Deletions owed",
                "none",
                [
                    now("map_objects", "state", 'state="mark_destroyed"'),
                    now("deletions_refused"),
                    now("deletions_stuck"),
                ],
            ),
            Panel("Sessions of brokers", "none", [now("node_sessions", "state")]),
            Panel(
                "Work assigned to brokers",
                "none",
                [now("recoveries_assigned"), now("compactions_assigned")],
            ),
        ],
    ),
    (
        "Process",
        [
            Panel("Lag of the event loop, p99", "s", [share("loop_lag_seconds", 0.99)]),
            Panel("CPU", "percentunit", [rate("process_cpu_seconds_total")]),
            Panel("Memory", "bytes", [now("process_resident_memory_bytes")]),
            Panel("Connections", "none", [now("connections", "plane", how="sum")]),
            Panel("Requests in memory", "bytes", [now("request_memory_bytes")]),
            Panel("Open files", "none", [now("process_open_fds")]),
        ],
    ),
    (
        "Clients of the library",
        [
            Panel(
                "Appends and records",
                "ops",
                [rate("client_appends_total"), rate("client_append_records_total")],
            ),
            Panel("Appended", "Bps", [rate("client_append_bytes_total")]),
            Panel("Neither committed nor failed", "bytes", [now("client_buffered_bytes")]),
            Panel("Age of the oldest of it", "s", [now("client_oldest_unsettled_age_seconds")]),
            Panel(
                "Commits",
                "s",
                [
                    share("client_commit_duration_seconds", 0.5),
                    share("client_commit_duration_seconds", 0.99),
                ],
                "From handing in a commit to its verdict.",
            ),
            Panel(
                "Uploads",
                "s",
                [
                    share("client_upload_duration_seconds", 0.5),
                    share("client_upload_duration_seconds", 0.99),
                ],
            ),
            Panel("Uploads by result", "ops", [rate("client_uploads_total", "result")]),
            Panel("Retries by reason", "ops", [rate("client_retries_total", "reason")]),
            Panel(
                "Leader changes and restarted watches",
                "ops",
                [rate("client_leader_changes_total"), rate("client_watch_restarts_total")],
            ),
            Panel(
                "Time without an answer of the leader", "s", [now("client_leader_silent_seconds")]
            ),
            Panel("Write-ahead log", "Bps", [rate("client_log_bytes_total")]),
            Panel(
                "Kept in the write-ahead log",
                "bytes",
                [now("client_log_used_bytes"), now("client_log_limit_bytes")],
                "And its limit; 0 without a log.",
            ),
            Panel("Read from the bucket", "Bps", [rate("client_fetched_bytes_total")]),
            Panel("Found in memory", "ops", [rate("client_cache_hits_total", "cache")]),
            Panel("Asked for", "ops", [rate("client_cache_misses_total", "cache")]),
        ],
    ),
    (
        "Kafka brokers",
        [
            Panel("Serving", "none", [now("kafka_serving", how="min")], "1 while clients are."),
            Panel("Requests by API", "reqps", [rate("kafka_requests_total", "api")]),
            Panel("Errors in answers", "ops", [rate("kafka_errors_total", "error")]),
            Panel("Taken from producers", "Bps", [rate("kafka_produced_bytes_total")]),
            Panel("Sent to consumers", "Bps", [rate("kafka_fetched_bytes_total")]),
            Panel("Partitions led", "none", [now("kafka_partitions_led")]),
            Panel(
                "Partitions that take no records",
                "none",
                [now("kafka_partitions_unavailable")],
                "Those without a leader, and those whose leader has not opened them.",
            ),
            Panel("Connections", "none", [now("kafka_connections")]),
            Panel(
                "Connections begun and refused",
                "ops",
                [
                    rate("kafka_connections_opened_total"),
                    rate("kafka_connections_refused_total"),
                ],
            ),
            Panel("Consumer groups", "none", [now("kafka_groups")]),
            Panel(
                "Brokers to recover",
                "none",
                [now("kafka_recoveries_assigned")],
                "Brokers that died and whose streams this one closes.",
            ),
            Panel("Streams recovered", "ops", [rate("kafka_recovered_streams_total")]),
            Panel("Joins of the cluster", "ops", [rate("kafka_joins_total")]),
        ],
    ),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    return {
        "uid": "streammeta",
        "title": "streammeta",
        "tags": ["streammeta"],
        "timezone": "utc",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source(), *_jobs()]},
        "panels": list(_panels()),
    }


def expressions() -> Iterator[tuple[str, str]]:
    """Yield the title of a panel and an expression of it."""
    for _, panels in ROWS:
        for panel in panels:
            for expression, _ in panel.lines:
                yield panel.title, expression


def text() -> str:
    """Return what the file is to hold."""
    return json.dumps(dashboard(), indent=1) + "\n"


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _jobs() -> Iterator[dict[str, Any]]:
    for name, label, metric in (
        ("job", "Cluster", "quorum_epoch"),
        ("brokers", "Brokers", "client_appends_total"),
    ):
        yield {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": {"type": "prometheus", "uid": "$source"},
            "query": f"label_values(streammeta_{metric}, job)",
            "refresh": 2,
        }


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 0, 0
    for title, panels in ROWS:
        number += 1
        grid = {"x": 0, "y": top, "w": COLUMNS * WIDTH, "h": 1}
        yield {"id": number, "type": "row", "title": title, "gridPos": grid, "panels": []}
        top += 1
        for place, panel in enumerate(panels):
            number += 1
            yield _panel(panel, number, place % COLUMNS, top + place // COLUMNS * HEIGHT)
        top += -(-len(panels) // COLUMNS) * HEIGHT


def _panel(panel: Panel, number: int, column: int, top: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "$source"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": source,
        "gridPos": {"x": column * WIDTH, "y": top, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": source, "expr": expr, "legendFormat": name}
            for at, (expr, name) in enumerate(panel.lines)
        ],
    }


if __name__ == "__main__":
    FILE.write_text(text())
