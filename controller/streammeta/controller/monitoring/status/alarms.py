"""Alarms of the status page, derived from the status document.

Pure. An alarm is a condition that needs an operator's attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeAlias

Document: TypeAlias = Mapping[str, Any]

LAG_MS_MAX = 30_000
"""Milliseconds since a voter had the whole log, from which it counts as lagging."""

BACKUP_LATE_S = 300
"""Lag of the backup that raises an alarm, in seconds."""

LEASE_LOW_S = 15
"""Remaining lease on the bucket's marker that raises an alarm, in seconds."""

EXPIRES_SOON_S = 14 * 24 * 3600
"""Remaining validity of a certificate that raises an alarm, in seconds."""

MEMORY_SHARE = 0.9
"""Share of the memory limit that raises an alarm."""


BROKERS_NAMED = 5
"""Maximum number of silent brokers with a separate alarm. The others are counted in one."""


class Alarm(NamedTuple):
    """Alarm with a severity, `critical` or `warning`, a machine-readable name and a sentence.

    `path` is the page with details, empty if there is none.
    """

    severity: str
    name: str
    text: str
    path: str = ""


def alarms(document: Document) -> Sequence[Alarm]:
    """Return the alarms of a status document, critical ones first."""
    found = [
        *_of_quorum(document),
        *_of_controllers(document["controllers"]),
        *_of_data(document),
        *_of_process(document),
    ]
    # `critical` sorts before `warning`, and the sort keeps the order within each.
    return sorted(found, key=lambda alarm: alarm.severity)


def _of_quorum(document: Document) -> Iterator[Alarm]:
    quorum = document["quorum"]
    if not quorum["has_leader"]:
        yield Alarm("critical", "no_leader", "No leader answers this controller: writes wait.")
    for voter in quorum["voters"]:
        age_ms = voter["last_caught_up_age_ms"]
        if age_ms is not None and age_ms > LAG_MS_MAX:
            text = f"Controller {voter['node_id']} has not caught up for {age_ms // 1000} s."
            yield Alarm("warning", "voter_behind", text)


def _of_controllers(controllers: Sequence[Document]) -> Iterator[Alarm]:
    # Observers do not vote, so their silence does not endanger the quorum.
    voters = [controller for controller in controllers if controller["votes"]]
    silent = [voter for voter in voters if not voter["answers"]]
    # Without a majority nothing can commit, so the same silence is critical.
    has_majority = 2 * len(silent) < len(voters)
    for controller in silent:
        severity = "warning" if has_majority else "critical"
        text = f"Controller {controller['node_id']} does not answer: {controller['reason']}"
        yield Alarm(severity, "controller_silent", text)
    for controller in controllers:
        if controller["disk_full"]:
            text = f"The disk of controller {controller['node_id']} is full: writes fail."
            yield Alarm("critical", "disk_full", text)
        if controller["repairing"]:
            text = (
                f"Controller {controller['node_id']} lost entries and copies them from its peers."
            )
            yield Alarm("warning", "repairing", text)


def _of_data(document: Document) -> Iterator[Alarm]:
    if problem := document["bucket"]["problem"]:
        yield Alarm("critical", "bucket", f"The leader can't use the bucket: {problem}")

    lease_s = document["bucket"]["lease_s"]
    if lease_s is not None and lease_s < LEASE_LOW_S:
        text = f"Changes are acknowledged for {lease_s:.0f} s more: the bucket can't be reached."
        yield Alarm("critical", "lease", text)

    if stuck := document["deletions"]["stuck"]:
        text = f"{stuck} objects can't be deleted and are retried at growing intervals."
        yield Alarm("warning", "deletions_stuck", text)

    if ahead := document["deletions"]["ahead"]:
        text = (
            f"{ahead} objects have offsets past the ends of their streams: was a disk rolled back?"
        )
        yield Alarm("warning", "objects_ahead", text)

    yield from _of_brokers(document["brokers"]["silent"])
    if missing := document["reconcile"]["missing"]:
        text = f"The last reconciliation found {missing} objects missing or damaged in the bucket."
        yield Alarm("critical", "objects_missing", text)

    backup = document["backup"]
    if backup is not None and backup["problem"]:
        yield Alarm("critical", "backup_failing", f"The backup fails: {backup['problem']}")
    # A failing backup is also late, and one alarm is enough.
    elif backup is not None and backup["behind_s"] > BACKUP_LATE_S:
        text = f"The backup is {backup['behind_s']:.0f} s late."
        yield Alarm("warning", "backup_late", text)


def _of_brokers(silent: Sequence[Document]) -> Iterator[Alarm]:
    # A failed rack would otherwise bury all other alarms.
    for broker in silent[:BROKERS_NAMED]:
        node_id = broker["node_id"]
        since = datetime.fromtimestamp(broker["since_s"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        when = f"since {since}" if broker["is_exact"] else f"since before {since}"
        text = f"Broker {node_id} has been silent {when}, and is fenced: {broker['owes']}."
        # Pages begin after an id, so the one before shows the broker first.
        path = f"/nodes?after={node_id - 1}" if node_id > 1 else "/nodes"
        yield Alarm("warning", "brokers_fenced", text, path)
    if (more := len(silent) - BROKERS_NAMED) > 0:
        text = f"{more} more brokers are silent, and fenced."
        yield Alarm("warning", "brokers_fenced", text, "/nodes")


def _of_process(document: Document) -> Iterator[Alarm]:
    process = document["process"]
    if process["memory_bytes"] > MEMORY_SHARE * process["memory_limit_bytes"]:
        yield Alarm("warning", "memory", "Memory is near the limit at which calls are rejected.")
    if process["audit_failing"]:
        yield Alarm("critical", "audit_failing", "The audit log can't be written.")
    for certificate in document["certificates"]:
        left_s = certificate["not_after_s"] - document["at_s"]
        if left_s < EXPIRES_SOON_S:
            days = f"{left_s / 86_400:.1f}"
            text = f"The certificate for {certificate['plane']} ends in {days} days."
            yield Alarm("critical" if left_s < 0 else "warning", "certificate", text)
