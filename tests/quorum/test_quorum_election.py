"""Votes, campaigns, durable promises before announcements, and the stop at a broken invariant."""

from collections.abc import Callable
from typing import Any

import pytest

from streammeta.controller.errors import InvariantError
from streammeta.controller.ids import ClusterId, DirectoryId, EndOffset, Epoch, NodeId
from streammeta.controller.quorum import events, messages
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.log_view import LostEntries
from streammeta.controller.quorum.pending import PendingWrites
from streammeta.controller.quorum.replica import Replica
from streammeta.controller.quorum.voters import ReplicaKey
from tests.quorum.core_harness import ME, Lone, batch, elected

LOG = [batch(0, 1), batch(1, 1), batch(2, 3)]


@pytest.mark.parametrize(
    ("last_epoch", "end", "granted"),
    [(3, 3, True), (3, 4, True), (4, 1, True), (3, 2, False), (2, 100, False), (1, 3, False)],
)
def test_votes_go_to_logs_at_least_as_up_to_date(last_epoch: int, end: int, granted: bool) -> None:
    for pre_vote in (True, False):
        node = Lone(state=QuorumState(Epoch(5)), batches=LOG)
        assert node.ask_vote(1, 6, last_epoch, end, pre_vote=pre_vote) is granted


def test_one_vote_an_epoch_and_the_same_again_when_repeated() -> None:
    node = Lone()
    assert node.ask_vote(1, 4, 0, 0)
    assert node.ask_vote(1, 4, 0, 0)
    assert not node.ask_vote(2, 4, 0, 0)
    assert node.ask_vote(2, 5, 0, 0)


def test_a_vote_is_remembered_over_a_restart() -> None:
    node = Lone(state=QuorumState(Epoch(4), ReplicaKey(NodeId(1))))
    assert not node.ask_vote(2, 4, 0, 0)
    assert node.ask_vote(1, 4, 0, 0)


def test_a_restarted_candidate_opens_another_epoch() -> None:
    """It may have led in that epoch: its entries outlive the state that it had not written yet."""
    node = Lone(state=QuorumState(Epoch(4), ReplicaKey(ME)))
    while node.role != "Prospective" or not node.sent(messages.VoteRequest):
        node.pass_time(1_000)
    for request in node.sent(messages.VoteRequest):
        node.grant(request)
    assert node.role == "Candidate"
    assert node.core.epoch == 5


def test_a_vote_waits_for_its_record() -> None:
    node = Lone()
    assert node.ask_vote(1, 4, 0, 0)
    (written,) = node.effects_of(events.PersistQuorumState)
    assert written.state == QuorumState(Epoch(4), ReplicaKey(NodeId(1)))
    (send,) = node.effects_of(events.Send)
    assert send.after == written.token


def test_a_vote_survives_following_and_falling_back_in_one_epoch() -> None:
    node = Lone()
    assert node.ask_vote(1, 4, 0, 0)
    node.begin(1, 4)
    node.pass_time(5000)
    assert node.role == "Prospective"
    assert not node.ask_vote(2, 4, 0, 0)


def test_pre_votes_leave_no_trace() -> None:
    node = Lone(state=QuorumState(Epoch(4)))
    deadline = node.core.next_deadline()
    for sender in (1, 2):
        assert node.ask_vote(sender, 4, 0, 0, pre_vote=True)
        assert not node.effects_of(events.PersistQuorumState)
    assert node.core.next_deadline() == deadline
    assert node.core.epoch == 4


def test_a_campaign_asks_for_pre_votes_before_it_opens_an_epoch() -> None:
    node = Lone(state=QuorumState(Epoch(4)))
    node.pass_time(5000)
    requests = node.sent(messages.VoteRequest)
    assert [(r.pre_vote, r.header.epoch) for r in requests] == [(True, 4)] * 2
    assert not node.effects_of(events.PersistQuorumState)

    node.grant(requests[0])
    (written,) = node.effects_of(events.PersistQuorumState)
    assert written.state == QuorumState(Epoch(5), ReplicaKey(NodeId(0)))
    assert all(not r.pre_vote and r.header.epoch == 5 for r in node.sent(messages.VoteRequest))
    assert all(send.after == written.token for send in node.effects_of(events.Send))


def test_a_follower_about_to_give_up_its_leader_grants_pre_votes_to_who_already_has() -> None:
    """Followers lose patience one after the other; the first must not wait for a timeout."""
    node = Lone()
    node.feed(node.follow(1, 4))
    node.flush()
    node.pass_time(1500)
    assert not node.ask_vote(2, 4, 4, 9, pre_vote=True)
    node.pass_time(400)
    assert node.ask_vote(2, 4, 4, 9, pre_vote=True)
    assert node.role == "Follower"


def test_a_follower_that_hears_its_leader_grants_no_pre_vote() -> None:
    node = Lone()
    request = node.follow(1, 4)
    assert node.ask_vote(2, 4, 0, 0, pre_vote=True), "it has not fetched yet (KAFKA-17641)"
    node.feed(request)
    assert not node.ask_vote(2, 4, 0, 0, pre_vote=True)
    node.step(events.PeerConnectionLost(NodeId(1)))
    assert node.ask_vote(2, 4, 0, 0, pre_vote=True), "the leader's process is gone"


def test_answers_of_another_election_are_not_counted() -> None:
    node = Lone(size=5)
    node.pass_time(5000)
    old = node.sent(messages.VoteRequest)
    node.pass_time(10_000)  # lost by timeout
    node.pass_time(10_000)
    assert node.role == "Prospective"
    for request in old:
        node.grant(request)
    assert node.role == "Prospective"
    fresh = Lone(size=5)
    fresh.pass_time(5000)
    first = fresh.sent(messages.VoteRequest)[0]
    fresh.grant(first)
    fresh.grant(first)
    assert fresh.role == "Prospective", "the same voter counts once"


@pytest.mark.parametrize(("size", "needed"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_it_takes_a_majority_to_win(size: int, needed: int) -> None:
    node = Lone(size=size)
    if size > 1:
        node.pass_time(5000)
        for stage in ("Prospective", "Candidate"):
            requests = node.sent(messages.VoteRequest)
            for request in requests[:needed]:
                assert node.role == stage
                node.grant(request)
    assert node.role == "Leader"


def test_a_lost_pre_vote_returns_to_the_leader() -> None:
    node = Lone()
    node.begin(1, 4)
    node.pass_time(5000)
    for request in node.sent(messages.VoteRequest):
        node.grant(request, granted=False, leader=1)
    assert node.role == "Follower"
    assert node.core.epoch == 4


def test_a_restarted_leader_is_resigned_and_grants_no_vote_in_its_epoch() -> None:
    node = Lone(state=QuorumState(Epoch(4), ReplicaKey(NodeId(0)), NodeId(0)))
    assert node.role == "Resigned"
    assert len(node.sent(messages.EndQuorumEpochRequest)) == 2
    assert not node.ask_vote(1, 4, 3, 100)
    node.pass_time(5000)
    assert (node.role, node.core.epoch) == ("Unattached", 5)


def test_a_leader_without_a_majority_resigns_after_check_quorum() -> None:
    node = elected()
    node.fetch(1, 0, 0)
    node.pass_time(2900)
    assert node.role == "Leader"
    node.pass_time(200)
    assert node.role == "Resigned"
    assert isinstance(node.effects[0], events.LeadershipEnded)


def still_leads_after(node: Lone, milliseconds: int, fetch: Callable[[], object]) -> bool:
    """Whether it does when `fetch` happens every half second."""
    for _ in range(milliseconds // 500):
        node.pass_time(500)
        if node.role != "Leader":
            return False
        fetch()
    return True


def test_a_voter_that_hears_nothing_does_not_keep_its_leader_in_office() -> None:
    """Its Fetches arrive, but nothing could be committed with it."""
    node = elected()
    node.fetch(1, 2, 1)
    assert not still_leads_after(node, 6000, lambda: node.fetch(1, 2, 1, hears=False))


@pytest.mark.parametrize("is_leader_full", [True, False])
def test_voters_with_full_disks_keep_a_leader_for_its_reads(is_leader_full: bool) -> None:
    """A majority that could commit with the disk of a leader with room would have to hear it."""
    node = elected()
    node.fetch(1, 2, 1)
    node.step(events.DiskFull(is_full=is_leader_full))
    assert still_leads_after(node, 6000, lambda: node.fetch(1, 2, 1, is_disk_full=True))


def test_full_voters_keep_no_leader_when_a_majority_with_room_may_be_out_of_its_reach() -> None:
    node = elected(size=5)
    node.fetch(1, 2, 1)

    def fetch() -> None:
        node.fetch(1, 2, 1, is_disk_full=True)
        node.fetch(2, 2, 1, is_disk_full=False)

    assert not still_leads_after(node, 6000, fetch)


def test_a_resigning_leader_names_the_longest_log_first() -> None:
    node = elected()
    node.fetch(2, 1, 1)
    node.step(events.Resign())
    request = node.sent(messages.EndQuorumEpochRequest)[0]
    assert [key.node_id for key in request.preferred_successors] == [2, 1]


def test_the_preferred_successor_campaigns_at_once() -> None:
    first, second = Lone(), Lone()
    for node in (first, second):
        node.begin(1, 4)
        node.feed(node.only(messages.FetchRequest))
    first.end(1, 4, 0, 2)
    assert first.role == "Prospective"
    second.end(1, 4, 2, 0)
    assert second.role == "Follower"


@pytest.mark.parametrize("refused", ["never", "before", "after"])
def test_a_voter_that_is_no_chosen_successor_waits_an_election_timeout(refused: str) -> None:
    """A leader that hands over refuses the Fetches it holds in the step that names the chosen."""
    node = Lone()
    node.feed(node.follow(1, 4))
    waiting = node.only(messages.FetchRequest)
    for when in ("before", "at", "after"):
        if when == "at":
            node.end(1, 4, 2)
        elif when == refused:
            refuse(node, waiting)
    node.pass_time(node.config.timings.election_timeout_ms - 1)
    assert node.role == "Follower"
    node.pass_time(node.config.timings.election_timeout_ms)
    assert node.role == "Prospective"


def test_an_observer_whose_fetch_is_refused_soon_looks_for_another_leader() -> None:
    """It is not told of the end of the epoch."""
    node = Lone(size=0, local=ReplicaKey(NodeId(7), DirectoryId("d")), seeds=[1, 2])
    node.feed(node.follow(1, 4))
    refuse(node, node.only(messages.FetchRequest))
    node.pass_time(node.config.timings.election_timeout_ms // 10)
    assert node.role == "Unattached"


def refuse(node: Lone, request: messages.FetchRequest) -> None:
    """Answer as its leader does once it has resigned."""
    node.feed(request, leader=1, error=messages.QuorumError.NOT_LEADER)


def test_a_voter_that_missed_the_end_of_an_epoch_is_soon_told_again() -> None:
    node = elected()
    node.step(events.Resign())
    first = node.sent(messages.EndQuorumEpochRequest)[0]
    voter = first.header.receiver.node_id
    node.step(events.RequestFailed(voter, first.header.request_id))
    assert not node.sent(messages.EndQuorumEpochRequest)
    node.pass_time(node.config.timings.heartbeat_ms // 2)
    assert node.only(messages.EndQuorumEpochRequest).header.receiver.node_id == voter


def test_a_broken_connection_starts_a_campaign_within_the_stagger() -> None:
    node = Lone()
    request = node.follow(1, 4)
    node.feed(request)
    node.step(events.RequestFailed(NodeId(1), node.only(messages.FetchRequest).header.request_id))
    node.step(events.PeerConnectionLost(NodeId(1)))
    node.pass_time(60)
    assert node.role == "Prospective"


def test_a_higher_epoch_deposes_a_leader_and_its_reads() -> None:
    node = elected()
    assert node.ask_vote(1, 9, 8, 100)
    assert isinstance(node.effects[0], events.LeadershipEnded)
    assert node.role == "Unattached"


def test_another_cluster_is_not_listened_to() -> None:
    node = Lone()
    assert not node.ask_vote(1, 99, 1, 1, cluster_id=ClusterId("other"))
    answer = node.only(messages.VoteResponse)
    assert answer.header.error is messages.QuorumError.INCONSISTENT_CLUSTER_ID
    assert node.core.epoch == 0


def test_two_leaders_of_one_epoch_stop_the_process() -> None:
    node = Lone()
    node.begin(1, 4)
    with pytest.raises(InvariantError, match="two leaders"):
        node.begin(2, 4)


def test_a_log_newer_than_the_quorum_state_stops_the_process() -> None:
    with pytest.raises(InvariantError, match="quorum-state"):
        Lone(state=QuorumState(Epoch(2)), batches=LOG)


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
