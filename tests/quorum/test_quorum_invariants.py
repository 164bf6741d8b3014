"""The quorum stops, instead of voting or leading, when one of its invariants is broken."""

from typing import Any

import pytest

from streammeta.controller.ids import EndOffset, Epoch, NodeId
from streammeta.controller.quorum.log_view import LostEntries
from streammeta.controller.quorum.pending import PendingWrites
from streammeta.controller.quorum.replica import Replica
from tests.quorum.core_harness import Lone

LOST = LostEntries(EndOffset(1), Epoch(1))


def replica_that_may_lead() -> Replica:
    """Return a replica that has voted for itself."""
    replica = Lone().core._replica
    replica.vote = replica.local
    return replica


def test_a_replica_that_voted_for_itself_leads() -> None:
    replica = replica_that_may_lead()
    replica.become_leader()
    assert replica.leader_id == replica.local.node_id


@pytest.mark.parametrize(
    ("field", "value"), [("vote", None), ("leader_id", NodeId(2)), ("lost", LOST)]
)
def test_no_other_replica_leads(field: str, value: Any) -> None:
    replica = replica_that_may_lead()
    setattr(replica, field, value)

    with pytest.raises(AssertionError):
        replica.become_leader()


def test_a_damaged_replica_grants_no_vote() -> None:
    lone = Lone()
    lone.core._replica.lost = LOST

    with pytest.raises(AssertionError):
        lone.core._election._grant(lone.local, is_up_to_date=True)


def test_committed_entries_are_in_the_log() -> None:
    replica = Lone().core._replica
    replica.high_watermark = EndOffset(replica.log.end_offset + 1)

    with pytest.raises(AssertionError):
        replica.finish()


def test_tokens_of_writes_ascend() -> None:
    writes = PendingWrites()
    writes.begin(2, 0, is_state=False)

    with pytest.raises(AssertionError):
        writes.begin(2, 1, is_state=False)
