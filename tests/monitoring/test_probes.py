"""Readiness by state of the controller."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streammeta.controller.ids import EndOffset, Epoch, NodeId
from streammeta.controller.monitoring.http.probes import (
    BEHIND_MAX,
    Condition,
    Phase,
    report,
    unready,
)
from streammeta.controller.runtime.replication.operations import QuorumDescription

QUORUM = QuorumDescription(
    node_id=NodeId(1),
    role="follower",
    leader_id=NodeId(2),
    has_leader=True,
    epoch=Epoch(3),
    high_watermark=EndOffset(50_000),
    end_offset=EndOffset(50_000),
    flushed_end=EndOffset(50_000),
    log_start_offset=EndOffset(0),
    snapshot_id=None,
    is_repairing=False,
    is_disk_full=False,
    is_transferring=False,
    voters=(),
    observers=(),
)
READY = Condition(phase=Phase.SERVING, quorum=QUORUM, applied=50_000)


@pytest.mark.parametrize(
    ("condition", "told"),
    [
        (READY, ""),
        (replace(READY, quorum=replace(QUORUM, is_disk_full=True)), ""),
        (replace(READY, applied=50_000 - BEHIND_MAX), ""),
        (replace(READY, applied=49_999 - BEHIND_MAX), "caught_up: 10001 committed entries are not"),
        (replace(READY, phase=Phase.STARTING), "serving: it starts"),
        (replace(READY, phase=Phase.STOPPING), "serving: it stops"),
        (replace(READY, quorum=replace(QUORUM, has_leader=False)), "leader: no leader answers"),
        (replace(READY, quorum=replace(QUORUM, is_repairing=True)), "repair: its log lost entries"),
    ],
    ids=["ready", "full", "nearly", "behind", "starting", "stopping", "leaderless", "repairing"],
)
def test_what_is_not_ready_is_said(condition: Condition, told: str) -> None:
    is_ready, text = report(unready(condition))
    failed = [line for line in text.splitlines() if not line.startswith("[+] ")]

    assert len(text.splitlines()) == 4
    assert is_ready == (not told)
    assert len(failed) == bool(told)
    assert all(line.startswith(f"[-] {told}") for line in failed)
