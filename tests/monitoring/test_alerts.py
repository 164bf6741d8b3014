"""Rules for alerts: each fires when it is to, and none in a cluster that is well.

promtool evaluates them where it is installed; that they name metrics that exist is tested anywhere.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from streammeta.cli.recovery.backup_command import VERIFY_METRICS
from streammeta.controller.backup.uploader import LATE_INTERVALS
from streammeta.controller.config import ControllerConfig
from tests.kit.tools import needs, path_of
from tests.monitoring.metrics_table import PAGE, TABLES, series_names

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "streammeta.rules.yml"
ALERTS: Sequence[Mapping[str, Any]] = [
    rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
]
DAY_S = 86_400
MINUTES = 65
"""Time of the evaluation, a little more than rules look back; one value a minute."""

PATIENCE_S = 240
"""Limit of a run of promtool, which takes 7 s of CPU for all cases."""

needs_promtool = needs("promtool")

REFUSED = "streammeta_requests_refused_total"
RELOADS = "streammeta_tls_reloads_total"
NOT_AFTER = "streammeta_tls_certificate_not_after_timestamp_seconds"


def of_controller(number: int) -> dict[str, str]:
    """Return the series of one controller that is well, each with its values."""
    series = {
        "streammeta_quorum_has_leader": "1x100",
        "streammeta_quorum_voters": "3x100",
        "streammeta_quorum_epoch": "7x100",
        "streammeta_quorum_is_leader": f"{int(number == 1)}x100",
        "streammeta_quorum_repairing": "0x100",
        "streammeta_disk_full": "0x100",
        "process_resident_memory_bytes": "500x100",
        "streammeta_memory_limit_bytes": "1000x100",
        "streammeta_audit_failing": "0x100",
        "streammeta_audit_dropped_total": "0x100",
        'streammeta_loop_lag_seconds_bucket{le="0.032"}': "0+600x100",
        'streammeta_loop_lag_seconds_bucket{le="0.064"}': "0+600x100",
        'streammeta_loop_lag_seconds_bucket{le="+Inf"}': "0+600x100",
        f'{REFUSED}{{reason="BUSY"}}': "0+1x100",
        f'{REFUSED}{{reason="NO_IDENTITY"}}': "0+1x100",
        'streammeta_connections_refused_total{plane="peers",cause="handshake_failed"}': "0+1x100",
        f'{RELOADS}{{plane="peers",result="refused"}}': "0x100",
        f'{RELOADS}{{plane="peers",result="replaced"}}': "0+1x100",
        f'{NOT_AFTER}{{plane="peers"}}': f"{15 * DAY_S}x100",
        "streammeta_deletions_unbacked_age_seconds": "10x100",
        **histogram("streammeta_commit_latency_seconds", 'verdict="accepted"', "0.131072"),
        **histogram("streammeta_log_flush_duration_seconds", "", "0.131072"),
        "streammeta_data_dir_free_bytes": "100000-1x100",
        "streammeta_checkpoints_put_off_total": "0x100",
        'streammeta_requests_total{method="KVService.GetKVs",result="answered"}': "0+600x100",
        f'{REFUSED}{{reason="DEFECT"}}': "0x100",
        'streammeta_admission_refused_total{class="scan"}': "0x100",
        'streammeta_map_used{quota="nodes"}': "70x100",
        'streammeta_map_limit{quota="nodes"}': "100x100",
        "streammeta_deletions_stuck": "0x100",
        "streammeta_deletions_ahead": "0x100",
        "streammeta_marker_lease_seconds": "25x100",
        'streammeta_bucket_calls_failed_total{operation="put"}': "0+1x100",
        'streammeta_bucket_throttled_total{operation="put"}': "0+1x100",
        'streammeta_node_sessions{state="fenced"}': "0x100",
        "streammeta_recoveries_assigned": "0x100",
        "streammeta_feature_level": "4x100",
        "streammeta_reconcile_last_success_timestamp_seconds": "60x100",
        "streammeta_reconcile_missing_objects": "0x100",
    }
    if number == 1:
        series['streammeta_quorum_replica_last_caught_up_age_seconds{peer="2"}'] = "1x100"
        series["streammeta_backup_lag_seconds"] = "12x100"
        series["streammeta_backup_failing"] = "0x100"
    return {with_labels(name, number): values for name, values in series.items()}


def histogram(name: str, labels: str, below: str) -> dict[str, str]:
    """Return the buckets of a histogram whose times are all below a bound."""
    before = f"{labels}," if labels else ""
    return {
        f'{name}_bucket{{{before}le="{bound}"}}': "0+600x100"
        for bound in (below, "0.262144", "0.524288", "1.04858", "+Inf")
    }


def with_labels(name: str, number: int) -> str:
    name, _, labels = name.partition("{")
    own = f'job="meta",instance="c{number}"'
    return f"{name}{{{own}}}" if not labels else f"{name}{{{own},{labels}"


COMMITS = "streammeta_client_commit_duration_seconds_count"
UPLOADS = "streammeta_client_uploads_total"
ERRORS = "streammeta_kafka_errors_total"
KAFKA_NOT_AFTER = "streammeta_kafka_tls_certificate_not_after_timestamp_seconds"


def of_broker(**other: str) -> dict[str, str]:
    """Return the series of a Kafka-shaped broker that is well, but for some of them."""
    series = {
        f'{COMMITS}{{verdict="accepted"}}': "0+600x100",
        f'{COMMITS}{{verdict="refused"}}': "3x100",
        f'{COMMITS}{{verdict="unanswered"}}': "1x100",
        f'{UPLOADS}{{result="stored"}}': "0+600x100",
        f'{UPLOADS}{{result="failed"}}': "0+1x100",
        "streammeta_client_oldest_unsettled_age_seconds": "1x100",
        "streammeta_client_leader_silent_seconds": "29x100",
        "streammeta_client_log_used_bytes": "70x100",
        "streammeta_client_log_limit_bytes": "100x100",
        "streammeta_kafka_serving": "1x100",
        "streammeta_kafka_partitions_unavailable": "0x100",
        f'{ERRORS}{{error="REQUEST_TIMED_OUT"}}': "0+1x100",
        f'{ERRORS}{{error="NOT_COORDINATOR"}}': "0+1x100",
        f'{ERRORS}{{error="NOT_LEADER_OR_FOLLOWER"}}': "0+90x100",
        KAFKA_NOT_AFTER: f"{15 * DAY_S}x100",
    } | other
    return {
        with_labels(name, 7).replace('job="meta"', 'job="brokers"'): values
        for name, values in series.items()
    }


VERIFIED = {
    'streammeta_backup_verify_damages{cluster_id="meta"}': "0x100",
    'streammeta_backup_verify_timestamp_seconds{cluster_id="meta"}': "0x100",
}
WELL = {
    **VERIFIED,
    **of_broker(),
    **{name: values for number in (1, 2, 3) for name, values in of_controller(number).items()},
}


def changed(name: str, values: str, number: int = 1) -> dict[str, str]:
    return {**WELL, with_labels(name, number): values}


CASES: Mapping[str, tuple[Mapping[str, str], Sequence[str]]] = {
    "well": (WELL, []),
    "all are gone": ({}, ["StreammetaNoLeader"]),
    "no leader": (
        {**WELL, **{with_labels("streammeta_quorum_has_leader", n): "0x100" for n in (1, 2, 3)}},
        ["StreammetaNoLeader"],
    ),
    "one sees no leader": (changed("streammeta_quorum_has_leader", "0x100"), []),
    "one is gone": (
        {name: values for name, values in WELL.items() if '"c3"' not in name},
        ["StreammetaMajorityAtRisk"],
    ),
    "alone by design": (
        {**of_controller(1), with_labels("streammeta_quorum_voters", 1): "1x100"},
        [],
    ),
    "elections": (
        changed("streammeta_quorum_epoch", "7x55 8 9 10 11 12x10"),
        ["StreammetaLeaderChanges"],
    ),
    "one election": (changed("streammeta_quorum_epoch", "7x55 8x20"), []),
    "a replica is behind": (
        changed('streammeta_quorum_replica_last_caught_up_age_seconds{peer="2"}', "61x100"),
        ["StreammetaReplicaBehind"],
    ),
    "repairing": (changed("streammeta_quorum_repairing", "1x100"), ["StreammetaRepairing"]),
    "repaired soon": (changed("streammeta_quorum_repairing", "0x59 1x10"), []),
    "disk full": (changed("streammeta_disk_full", "1x100"), ["StreammetaDiskFull"]),
    "expires soon": (
        changed(
            f'{NOT_AFTER}{{plane="peers"}}',
            f"{13 * DAY_S}x100",
        ),
        ["StreammetaCertificateExpiresSoon"],
    ),
    "expires": (
        changed(f'{NOT_AFTER}{{plane="peers"}}', "3x100"),
        ["StreammetaCertificateExpires", "StreammetaCertificateExpiresSoon"],
    ),
    "not replaced": (
        changed(f'{RELOADS}{{plane="peers",result="refused"}}', "0x35 1x40"),
        ["StreammetaCertificateNotReplaced"],
    ),
    "memory": (
        changed("process_resident_memory_bytes", "810x100"),
        ["StreammetaMemoryNearLimit"],
    ),
    "loop held": (
        changed('streammeta_loop_lag_seconds_bucket{le="0.032"}', "0+500x100"),
        ["StreammetaLoopHeld"],
    ),
    "denied": (
        changed(f'{REFUSED}{{reason="NO_IDENTITY"}}', "0+90x100"),
        ["StreammetaCallersRefused"],
    ),
    "connections": (
        changed(
            'streammeta_connections_refused_total{plane="peers",cause="handshake_failed"}',
            "0+90x100",
        ),
        ["StreammetaConnectionsRefused"],
    ),
    "busy": (changed(f'{REFUSED}{{reason="BUSY"}}', "0+90x100"), ["StreammetaOverloaded"]),
    "backup late": (
        changed("streammeta_backup_lag_seconds", "12x55 31x20"),
        ["StreammetaBackupLate"],
    ),
    "backup fails": (changed("streammeta_backup_failing", "1x100"), ["StreammetaBackupFailing"]),
    "backup failed for a moment": (changed("streammeta_backup_failing", "0x62 1x10"), []),
    "the bucket is out of the leader's reach": (
        changed("streammeta_marker_lease_seconds", "25x50 12x50"),
        ["StreammetaMarkerLeaseRunsOut"],
    ),
    "deletions wait": (
        changed("streammeta_deletions_unbacked_age_seconds", "0x25 1801x50"),
        ["StreammetaDeletionsWaitForBackup"],
    ),
    "backup damaged": (
        {**WELL, 'streammeta_backup_verify_damages{cluster_id="meta"}': "0x25 2x50"},
        ["StreammetaBackupDamaged"],
    ),
    "backup not verified": (
        {
            **WELL,
            'streammeta_backup_verify_timestamp_seconds{cluster_id="meta"}': f"{-2 * DAY_S}x100",
        },
        ["StreammetaBackupNotVerified"],
    ),
    "commits are slow": (
        changed(
            'streammeta_commit_latency_seconds_bucket{verdict="accepted",le="0.262144"}',
            "0+500x100",
        )
        | changed(
            'streammeta_commit_latency_seconds_bucket{verdict="accepted",le="0.131072"}',
            "0+500x100",
        ),
        ["StreammetaCommitsSlow"],
    ),
    "flushes are slow": (
        {
            **WELL,
            **{
                with_labels(f'streammeta_log_flush_duration_seconds_bucket{{le="{bound}"}}', 1): (
                    "0+500x100"
                )
                for bound in ("0.131072", "0.262144", "0.524288")
            },
        },
        ["StreammetaFlushesSlow"],
    ),
    "the disk fills": (
        changed("streammeta_data_dir_free_bytes", "100000-1000x100"),
        ["StreammetaDiskFills"],
    ),
    "no room for a checkpoint": (
        changed("streammeta_checkpoints_put_off_total", "0x35 1x40"),
        ["StreammetaCheckpointsPutOff"],
    ),
    "calls fail": (
        changed(f'{REFUSED}{{reason="DEFECT"}}', "0+12x100"),
        ["StreammetaCallsFail"],
    ),
    "calls wait": (
        changed('streammeta_admission_refused_total{class="scan"}', "0+1x100"),
        ["StreammetaCallsWait"],
    ),
    "the map is near a limit": (
        changed('streammeta_map_used{quota="nodes"}', "81x100"),
        ["StreammetaMapNearLimit"],
    ),
    "deletions are stuck": (
        changed("streammeta_deletions_stuck", "0x25 1x50"),
        ["StreammetaDeletionsStuck"],
    ),
    "objects are ahead of the map": (
        changed("streammeta_deletions_ahead", "0x25 1x50"),
        ["StreammetaObjectsAhead"],
    ),
    "deletions were stuck for a moment": (changed("streammeta_deletions_stuck", "0x45 1x30"), []),
    "the bucket fails": (
        changed('streammeta_bucket_calls_failed_total{operation="put"}', "0+12x100"),
        ["StreammetaBucketFails"],
    ),
    "a broker is silent": (
        changed('streammeta_node_sessions{state="fenced"}', "0x25 1x50"),
        ["StreammetaBrokersFenced"],
    ),
    "a recovery waits": (
        changed("streammeta_recoveries_assigned", "0x25 1x50"),
        ["StreammetaRecoveriesWait"],
    ),
    "levels differ": (changed("streammeta_feature_level", "3x100"), ["StreammetaLevelsDiffer"]),
    "objects are missing": (
        changed("streammeta_reconcile_missing_objects", "0x60 2x10"),
        ["StreammetaObjectsMissing"],
    ),
    "reconciled eight days ago": (
        {
            name: f"{-8 * DAY_S}x100" if "reconcile_last_success" in name else values
            for name, values in WELL.items()
        },
        ["StreammetaReconcileOld"],
    ),
    "one has not heard of a run": (
        changed("streammeta_reconcile_last_success_timestamp_seconds", f"{-8 * DAY_S}x100"),
        [],
    ),
    "a watch before its first success": (
        {**WELL, 'streammeta_reconcile_last_success_timestamp_seconds{job="node"}': "0x100"},
        [],
    ),
    "a client without a log": (
        {
            **WELL,
            **of_broker(
                streammeta_client_log_used_bytes="0x100", streammeta_client_log_limit_bytes="0x100"
            ),
        },
        [],
    ),
    "a client's commits are refused": (
        WELL | of_broker(**{f'{COMMITS}{{verdict="refused"}}': "3x50 4+1x25"}),
        ["StreammetaClientCommitsFail"],
    ),
    "one commit was refused": (
        WELL | of_broker(**{f'{COMMITS}{{verdict="refused"}}': "3x59 4x20"}),
        [],
    ),
    "a client's commits have no answer": (
        WELL | of_broker(**{f'{COMMITS}{{verdict="unanswered"}}': "0+1x100"}),
        ["StreammetaClientCommitsFail"],
    ),
    "a client's uploads fail": (
        WELL | of_broker(**{f'{UPLOADS}{{result="failed"}}': "0+90x100"}),
        ["StreammetaClientUploadsFail"],
    ),
    "a client uploads nothing": (
        WELL
        | of_broker(
            **{f'{UPLOADS}{{result="{result}"}}': "5x100" for result in ("stored", "failed")}
        ),
        [],
    ),
    "a client's writes are held": (
        WELL | of_broker(streammeta_client_oldest_unsettled_age_seconds="0x55 31+60x20"),
        ["StreammetaClientWritesHeld"],
    ),
    "a client hears nothing of the leader": (
        WELL | of_broker(streammeta_client_leader_silent_seconds="0x55 31+60x20"),
        ["StreammetaClientLeaderSilent"],
    ),
    "a client's log fills": (
        WELL | of_broker(streammeta_client_log_used_bytes="81x100"),
        ["StreammetaClientLogNearlyFull"],
    ),
    "a broker does not join": (
        WELL | of_broker(streammeta_kafka_serving="1x55 0x20"),
        ["StreammetaKafkaNotServing"],
    ),
    "a broker joined again": (WELL | of_broker(streammeta_kafka_serving="1x64 0 1x10"), []),
    "partitions have no leader": (
        WELL | of_broker(streammeta_kafka_partitions_unavailable="0x55 2x20"),
        ["StreammetaKafkaPartitionsUnavailable"],
    ),
    "requests to a broker fail": (
        WELL | of_broker(**{f'{ERRORS}{{error="REQUEST_TIMED_OUT"}}': "0+12x100"}),
        ["StreammetaKafkaRequestsFail"],
    ),
    "groups find no coordinator": (
        WELL | of_broker(**{f'{ERRORS}{{error="NOT_COORDINATOR"}}': "0+12x100"}),
        ["StreammetaKafkaGroupsFail"],
    ),
    "a broker's certificate ends soon": (
        WELL | of_broker(**{KAFKA_NOT_AFTER: f"{13 * DAY_S}x100"}),
        ["StreammetaKafkaCertificateExpiresSoon"],
    ),
    "a broker's certificate ends": (
        WELL | of_broker(**{KAFKA_NOT_AFTER: f"{2 * DAY_S}x100"}),
        ["StreammetaKafkaCertificateExpires", "StreammetaKafkaCertificateExpiresSoon"],
    ),
    "audit fails": (changed("streammeta_audit_failing", "1x100"), ["StreammetaAuditFailing"]),
    "audit loses": (
        changed("streammeta_audit_dropped_total", "0x55 1x5 2x20"),
        ["StreammetaAuditFailing"],
    ),
}


def promtool(*words: str | Path) -> None:
    ran = subprocess.run(
        [path_of("promtool"), *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env=os.environ | {"GOGC": "800"},  # a fifth of its time would go to its collector
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def unit_test(name: str) -> Mapping[str, Any]:
    series, expected = CASES[name]
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{MINUTES}m",
                "exp_samples": [
                    {"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in expected
                ],
            }
        ],
    }


@needs_promtool
@pytest.mark.timeout(2 * PATIENCE_S)
def test_alerts_fire_when_they_are_to_and_only_then(tmp_path: Path) -> None:
    tests = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "5m",  # a case is known at its end, and each evaluation costs
        "tests": [unit_test(name) for name in CASES],
    }
    file = tmp_path / "alerts.test.yml"
    file.write_text(json.dumps(tests))
    promtool("check", "rules", RULES)
    promtool("test", "rules", file)


def test_every_alert_has_a_case() -> None:
    assert {alert["alert"] for alert in ALERTS} == {
        name for _, expected in CASES.values() for name in expected
    }


def test_rules_speak_of_metrics_that_exist() -> None:
    known = set(VERIFY_METRICS).union(*(series_names(of) for of in TABLES))
    for alert in ALERTS:
        used = set(re.findall(r"\b(?:streammeta|process)_\w+", alert["expr"]))
        assert used
        assert used <= known, alert["alert"]
        assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
        assert alert["labels"]["severity"] in ("warning", "critical")


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_the_runbook_of_an_alert_is_a_section_of_a_page(alert: Mapping[str, Any]) -> None:
    path, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    heads = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.M)
    anchors = {re.sub(r"[^a-z0-9 -]", "", head.lower()).replace(" ", "-") for head in heads}
    assert anchor in anchors


def test_the_limit_of_a_late_backup_is_that_of_the_log() -> None:
    (rule,) = [alert for alert in ALERTS if alert["alert"] == "StreammetaBackupLate"]
    defaults: dict[str, Any] = {field.name: field.default for field in fields(ControllerConfig)}
    limit_s = LATE_INTERVALS * defaults["backup_interval_ms"] // 1000
    assert rule["expr"] == f"streammeta_backup_lag_seconds > {limit_s}"


def test_metrics_of_verifications_are_on_the_page() -> None:
    page = PAGE.read_text()
    for name, meaning in VERIFY_METRICS.items():
        assert f"| `{name}` | gauge | cluster_id, cluster_uuid | {meaning} |" in page
