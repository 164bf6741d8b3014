"""Alarms of the status page, each by the condition that it tells of."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from streammeta.controller.monitoring.status.alarms import BROKERS_NAMED, alarms

VOTER = {"node_id": 1, "last_caught_up_age_ms": 0}
CONTROLLER = {
    "node_id": 1,
    "votes": True,
    "answers": True,
    "reason": "",
    "disk_full": False,
    "repairing": False,
}
SILENT = {"node_id": 1007, "since_s": 940.0, "is_exact": True, "owes": "it has streams open"}
SOUND: dict[str, Any] = {
    "at_s": 1_000.0,
    "quorum": {"has_leader": True, "voters": [VOTER]},
    "controllers": [{**CONTROLLER, "node_id": node_id} for node_id in (1, 2, 3)],
    "bucket": {"problem": "", "lease_s": 20.0},
    "deletions": {"stuck": 0, "ahead": 0},
    "brokers": {"sessions": {"active": 3, "fenced": 1}, "silent": []},
    "reconcile": {"missing": 0},
    "backup": {"problem": "", "behind_s": 2.0},
    "certificates": [{"plane": "http", "not_after_s": 1_000.0 + 15 * 86_400}],
    "process": {"memory_bytes": 10, "memory_limit_bytes": 100, "audit_failing": False},
}


def changed(path: str, value: object) -> dict[str, Any]:
    """Return the sound document with one value changed, e.g. at `quorum.voters.0.node_id`."""
    document = copy.deepcopy(SOUND)
    place: Any = document
    *parents, last = path.split(".")
    for part in parents:
        place = place[int(part) if part.isdigit() else part]
    place[last] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("quorum.has_leader", False, ("critical", "no_leader")),
        ("quorum.voters.0.last_caught_up_age_ms", 31_000, ("warning", "voter_behind")),
        ("controllers.2.answers", False, ("warning", "controller_silent")),
        ("controllers.1.disk_full", True, ("critical", "disk_full")),
        ("controllers.1.repairing", True, ("warning", "repairing")),
        ("bucket.problem", "another cluster's", ("critical", "bucket")),
        ("bucket.lease_s", 14.0, ("critical", "lease")),
        ("deletions.stuck", 3, ("warning", "deletions_stuck")),
        ("deletions.ahead", 3, ("warning", "objects_ahead")),
        ("brokers.silent", [SILENT], ("warning", "brokers_fenced")),
        ("reconcile.missing", 2, ("critical", "objects_missing")),
        ("backup.problem", "away", ("critical", "backup_failing")),
        ("backup.behind_s", 301.0, ("warning", "backup_late")),
        ("process.memory_bytes", 91, ("warning", "memory")),
        ("process.audit_failing", True, ("critical", "audit_failing")),
        ("certificates.0.not_after_s", 2_000.0, ("warning", "certificate")),
        ("certificates.0.not_after_s", 999.0, ("critical", "certificate")),
    ],
)
def test_each_condition_has_its_alarm_alone(
    path: str, value: object, told: tuple[str, str]
) -> None:
    assert alarms(SOUND) == []
    assert [each[:2] for each in alarms(changed(path, value))] == [told]


def test_without_a_majority_silence_is_critical() -> None:
    document = changed("controllers.2.answers", False)
    document["controllers"][0]["answers"] = False
    assert [each.severity for each in alarms(document)] == ["critical", "critical"]


def test_without_a_backup_none_is_late() -> None:
    assert alarms({**SOUND, "backup": None}) == []


def test_a_silent_broker_is_named_with_the_time_and_a_link() -> None:
    (alarm,) = alarms(changed("brokers.silent", [SILENT]))
    assert alarm.text == (
        "Broker 1007 has been silent since 1970-01-01 00:15:40 UTC, and is fenced: it has streams"
        " open."
    )
    assert alarm.path == "/nodes?after=1006"
    (older,) = alarms(changed("brokers.silent", [{**SILENT, "node_id": 1, "is_exact": False}]))
    assert "Broker 1 has been silent since before 1970-01-01 00:15:40 UTC" in older.text
    assert older.path == "/nodes"


def test_many_silent_brokers_are_named_up_to_a_bound_and_counted() -> None:
    found = alarms(changed("brokers.silent", [{**SILENT, "node_id": 1 + at} for at in range(40)]))
    assert len(found) == BROKERS_NAMED + 1
    assert found[-1].text == f"{40 - BROKERS_NAMED} more brokers are silent, and fenced."
