"""Voters change one at a time, by the log; who lags or is unknown is not let in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streammeta.controller.ids import DirectoryId, EndOffset, Epoch, NodeId
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.events import (
    Append,
    AppendLog,
    LeadershipEnded,
    Resign,
    TransferRefused,
    TransferRequested,
    VoterChangeDone,
    VoterChangeRefused,
    VoterChangeRequested,
    VotersChanged,
)
from streammeta.controller.quorum.messages import (
    BeginQuorumEpochRequest,
    BeginQuorumEpochResponse,
    EndQuorumEpochRequest,
    EpochEnd,
    FetchRequest,
    FetchResponse,
    QuorumError,
    UpdateVoterRequest,
    UpdateVoterResponse,
    VoteRequest,
    VoteResponse,
    voters_named_by,
)
from streammeta.controller.quorum.roles import Leader
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from tests.quorum.core_harness import Lone, log_of, voter_set
from tests.quorum.test_quorum_replication import established

NEW = Voter(ReplicaKey(NodeId(7), DirectoryId("disk7")), "n7:1")


def add(node: Lone, voter: Voter = NEW) -> None:
    node.step(VoterChangeRequested(1, voter))


def refusal(node: Lone) -> QuorumError:
    (refused,) = node.effects_of(VoterChangeRefused)
    return refused.error


def named(node: Lone) -> VoterSet:
    """The voters named by what the last step appended."""
    (append,) = node.effects_of(AppendLog)
    (batch,) = append.batches
    voters = voters_named_by(batch)
    assert voters is not None
    return voters


def adding() -> Lone:
    """A leader of three that has appended the addition of node 7, at offset 2."""
    node = established()
    node.fetch(NEW.key, 2, 1, hw=2)
    add(node)
    return node


def test_a_new_voter_counts_as_soon_as_its_record_is_appended() -> None:
    node = adding()
    assert named(node) == node.core.voters
    assert node.effects_of(VotersChanged) == [VotersChanged(node.core.voters)]
    assert [voter.key.node_id for voter in node.core.voters] == [0, 1, 2, 7]
    node.flush()
    node.fetch(1, 3, 1)
    assert node.core.high_watermark == 2  # two of four
    node.fetch(NEW.key, 3, 1)
    assert node.core.high_watermark == 3
    assert node.effects_of(VoterChangeDone) == [VoterChangeDone(1, EndOffset(3))]


def test_who_does_not_fetch_is_not_added() -> None:
    node = established()
    add(node)
    assert refusal(node) is QuorumError.REQUEST_TIMED_OUT
    node.fetch(NEW.key, 2, 1, hw=2)
    node.now += 3000
    node.fetch(1, 2, 1)
    node.fetch(2, 2, 1)
    add(node)
    assert refusal(node) is QuorumError.REQUEST_TIMED_OUT


def test_a_node_that_votes_with_another_disk_is_not_added() -> None:
    node = established()
    newcomer = Voter(ReplicaKey(NodeId(2), DirectoryId("replaced")), "n2:1")
    add(node, newcomer)
    assert refusal(node) is QuorumError.DUPLICATE_VOTER


def test_only_one_change_runs_and_none_before_the_last_is_committed() -> None:
    node = adding()
    node.step(VoterChangeRequested(2, ReplicaKey(NodeId(1))))
    assert refusal(node) is QuorumError.REQUEST_TIMED_OUT
    node.flush()
    node.fetch(1, 3, 1)
    node.fetch(2, 3, 1)
    node.step(VoterChangeRequested(3, ReplicaKey(NodeId(1))))
    assert not node.effects_of(VoterChangeRefused)


def test_no_change_before_the_leader_has_committed_in_its_epoch() -> None:
    """Two leaders' changes could otherwise have majorities that do not meet (Ongaro, 2015)."""
    node = Lone()
    node.become_leader()
    node.fetch(1, 0, 0)
    node.step(VoterChangeRequested(1, ReplicaKey(NodeId(1))))
    assert refusal(node) is QuorumError.REQUEST_TIMED_OUT


def test_a_laggard_is_added_after_a_round_it_keeps_up_with() -> None:
    node = established()
    node.step(Append((b"x",) * 100))
    node.flush()
    node.fetch(NEW.key, 2, 1)
    add(node)
    assert len(node.core.voters) == 3
    node.now += node.config.timings.election_timeout_ms + 1
    node.fetch(1, 102, 1)
    node.fetch(2, 102, 1)
    node.step(Append((b"x",)))
    node.fetch(NEW.key, 102, 1)  # a slow round: another one begins
    assert len(node.core.voters) == 3
    node.fetch(NEW.key, 103, 1)
    assert len(node.core.voters) == 4


def test_who_does_not_catch_up_is_refused_and_stays_an_observer() -> None:
    node = established()
    node.step(Append((b"x",) * 100))
    node.fetch(NEW.key, 2, 1)
    add(node)
    limit = node.config.timings.election_timeout_ms * node.config.timings.catch_up_rounds
    refusals: list[VoterChangeRefused] = []
    for _ in range(limit // 500):
        node.pass_time(500)
        refusals += node.effects_of(VoterChangeRefused)
        node.fetch(1, 102, 1)
        node.fetch(2, 102, 1)
    assert [item.error for item in refusals] == [QuorumError.REQUEST_TIMED_OUT]
    assert len(node.core.voters) == 3


def test_a_removed_voter_no_longer_counts() -> None:
    node = established()
    node.step(VoterChangeRequested(1, ReplicaKey(NodeId(2))))
    node.flush()
    node.fetch(2, 3, 1)
    assert node.core.high_watermark == 2
    node.fetch(1, 3, 1)
    assert node.core.high_watermark == 3
    assert node.effects_of(VoterChangeDone)
    assert isinstance(node.core.role, Leader)
    assert [key.node_id for key in node.core.role.progress] == [1]
    node.fetch(2, 3, 1)
    assert [key.node_id for key in node.core.role.progress] == [1, 2]


def test_the_last_voter_and_unknown_ones_are_not_removed() -> None:
    node = established()
    node.step(VoterChangeRequested(1, ReplicaKey(NodeId(9))))
    assert refusal(node) is QuorumError.VOTER_NOT_FOUND
    alone = Lone(size=1)
    alone.flush()
    alone.step(VoterChangeRequested(1, ReplicaKey(NodeId(0))))
    assert refusal(alone) is QuorumError.INVALID_REQUEST


def test_a_leader_that_is_removed_leads_until_that_is_committed_without_counting_itself() -> None:
    node = established()
    node.step(VoterChangeRequested(1, ReplicaKey(NodeId(0))))
    node.flush()
    assert node.role == "Leader"
    node.fetch(1, 3, 1)
    assert (node.role, node.core.high_watermark) == ("Leader", 2)
    node.fetch(2, 3, 1)
    assert (node.role, node.core.high_watermark) == ("Resigned", 3)
    assert node.effects_of(VoterChangeDone)
    assert node.effects_of(LeadershipEnded)
    node.pass_time(5000)
    node.flush()
    assert node.role == "Unattached"
    node.pass_time(5000)
    assert not node.sent(VoteRequest)


def test_who_alone_knows_of_its_removal_can_still_be_elected_but_not_by_its_own_vote() -> None:
    """With two voters nobody else could be elected (Ongaro, section 4.2.2)."""
    node = established(size=2)
    node.step(VoterChangeRequested(1, ReplicaKey(NodeId(0))))
    node.flush()
    node.step(Resign())
    node.pass_time(3000)
    node.flush()
    node.pass_time(3000)
    node.flush()
    assert node.role == "Prospective"
    for expected in ("Candidate", "Leader"):
        node.grant(node.sent(VoteRequest)[0])
        assert node.role == expected
        node.flush()
    assert node.core.high_watermark == 2
    node.fetch(1, 4, node.core.epoch)
    assert (node.role, node.core.high_watermark) == ("Resigned", 4)


def test_it_can_be_elected_even_if_it_joined_later_and_has_just_restarted() -> None:
    """It knows nothing as committed then, and no voters but those of its log."""
    leader = established()
    leader.fetch(NEW.key, 2, 1, hw=2)
    add(leader)
    leader.flush()
    for other in (1, 2):
        leader.fetch(other, 3, 1)
    leader.step(VoterChangeRequested(2, NEW.key))
    batches = leader.core.log.read(EndOffset(0), max_bytes=9999) or ()
    log = replace(log_of(batches), control=batches)
    restarted = Lone(size=0, local=NEW.key, log=log, state=QuorumState(Epoch(1)))
    assert not restarted.core.is_voter
    restarted.pass_time(3000)
    assert restarted.sent(VoteRequest)


def test_a_change_whose_leader_is_deposed_is_reported_as_unknown() -> None:
    node = adding()
    node.step(Resign())
    assert refusal(node) is QuorumError.NOT_LEADER


def test_voters_named_by_a_log_that_is_cut_are_in_force_no_more() -> None:
    node = Lone()
    node.begin(1, 4)
    leader = adding()
    first, second = leader.core.log.read(EndOffset(0), max_bytes=9999) or ()
    node.feed(node.only(FetchRequest), first, second)
    assert len(node.core.voters) == 4
    node.flush()
    node.begin(2, 5)
    node.feed(node.only(FetchRequest), diverging=EpochEnd(Epoch(1), EndOffset(2)))
    assert len(node.core.voters) == 3


# -- who is meant


def test_a_replaced_disk_neither_votes_nor_counts_for_the_lost_one() -> None:
    replaced = ReplicaKey(NodeId(2), DirectoryId("new"))
    node = Lone(size=0, local=replaced, seeds=[0, 1])
    request = VoteRequest(
        header=node.header(1, 9), pre_vote=False, last_epoch=Epoch(8), end_offset=EndOffset(99)
    )
    for receiver in (ReplicaKey(NodeId(2)), ReplicaKey(NodeId(2), DirectoryId("old"))):
        header = type(request.header)(
            cluster_id=request.header.cluster_id,
            sender=request.header.sender,
            receiver=receiver,
            epoch=Epoch(9),
            incarnation=1,
            request_id=1,
        )
        node.receive(
            VoteRequest(
                header=header, pre_vote=False, last_epoch=Epoch(8), end_offset=EndOffset(99)
            )
        )
        answer = node.only(VoteResponse)
        assert (answer.granted, answer.header.error) == (False, QuorumError.INVALID_VOTER_KEY)


def test_a_new_voter_grants_its_vote_before_it_knows_that_it_votes() -> None:
    """Else adding a voter and losing another would end in nobody being elected."""
    node = Lone(size=0, local=NEW.key, seeds=[0])
    assert node.ask_vote(1, 9, 8, 99)


# -- observers


def test_a_joining_replica_asks_the_seeds_until_one_names_the_leader() -> None:
    node = Lone(size=0, local=NEW.key, seeds=[1, 2])
    asked = set()
    for _ in range(40):
        for request in node.sent(FetchRequest):
            asked.add(request.header.receiver.node_id)
        node.pass_time(600)
    assert asked == {1, 2}
    assert not node.sent(VoteRequest)
    (request,) = node.sent(FetchRequest)
    node.receive(
        FetchResponse(
            header=node.reply(request, epoch=4, leader=3, error=QuorumError.FENCED_LEADER_EPOCH),
            high_watermark=EndOffset(0),
            log_start_offset=EndOffset(0),
            read_round=0,
        )
    )
    assert (node.role, node.core.epoch, node.core.leader_id) == ("Follower", 4, 3)
    assert node.only(FetchRequest).header.receiver.node_id == 3


def test_an_observer_that_lost_its_leader_looks_for_it_and_may_find_the_same() -> None:
    node = Lone(size=0, local=NEW.key, seeds=[1])
    node.begin(1, 4)
    node.pass_time(2000)
    assert node.role == "Unattached"
    assert not node.sent(VoteRequest)
    node.pass_time(1)
    node.feed(node.only(FetchRequest), leader=1)
    assert (node.role, node.core.epoch, node.core.leader_id) == ("Follower", 4, 1)


def test_an_observer_that_is_told_its_node_leads_keeps_looking() -> None:
    """An earlier disk of the same node may still be named as the leader."""
    node = Lone(size=0, local=NEW.key, seeds=[1])
    node.feed(node.only(FetchRequest), leader=7)
    assert (node.role, node.core.leader_id) == ("Unattached", None)


# -- telling the leader where one is


def test_a_voter_tells_its_disk_and_the_leader_records_it() -> None:
    key = ReplicaKey(NodeId(1), DirectoryId("disk1"))
    voter = Lone(size=3, local=key)
    voter.begin(0, 1)
    voter.feed(voter.only(FetchRequest))
    (request,) = voter.sent(UpdateVoterRequest)
    assert request.voter == Voter(key, "n1:1")

    leader = established()
    update = UpdateVoterRequest(header=leader.header(key, 1), voter=request.voter)
    leader.receive(update)
    assert leader.only(UpdateVoterResponse).header.error is QuorumError.NONE
    assert leader.core.voters.find(NodeId(1)) == request.voter
    leader.receive(update)
    assert leader.only(UpdateVoterResponse).header.error is QuorumError.NONE
    assert not leader.effects_of(AppendLog)
    leader.flush()
    leader.fetch(key, 3, 1)
    assert leader.core.high_watermark == 3


def test_a_disk_that_is_known_is_not_replaced_by_telling() -> None:
    leader = established()
    for disk, error in (("a", QuorumError.NONE), ("b", QuorumError.VOTER_NOT_FOUND)):
        key = ReplicaKey(NodeId(1), DirectoryId(disk))
        request = UpdateVoterRequest(header=leader.header(key, 1), voter=Voter(key, "n1:1"))
        leader.receive(request)
        assert leader.only(UpdateVoterResponse).header.error is error


def test_an_announcement_for_the_lost_disk_still_tells_who_leads() -> None:
    node = Lone(size=0, local=ReplicaKey(NodeId(2), DirectoryId("new")), seeds=[0])
    header = node.header(1, 5)
    old = ReplicaKey(NodeId(2), DirectoryId("old"))
    node.receive(
        BeginQuorumEpochRequest(
            header=type(header)(
                cluster_id=header.cluster_id,
                sender=header.sender,
                receiver=old,
                epoch=header.epoch,
                incarnation=1,
                request_id=1,
            )
        )
    )
    error = node.only(BeginQuorumEpochResponse).header.error
    assert error is QuorumError.INVALID_VOTER_KEY
    assert (node.role, node.core.leader_id) == ("Follower", 1)


# -- handing over


def test_leadership_is_handed_over_once_the_successor_has_caught_up() -> None:
    node = established()
    node.fetch(2, 2, 1, hw=2)
    node.step(Append((b"x",)))
    node.flush()
    node.step(TransferRequested(NodeId(1)))
    assert node.core.is_transferring
    node.fetch(2, 3, 1)
    assert node.role == "Leader"
    node.fetch(1, 3, 1)
    assert node.role == "Resigned"
    for end in node.sent(EndQuorumEpochRequest):
        assert [key.node_id for key in end.preferred_successors] == [1]


def test_a_successor_that_does_not_catch_up_in_time_is_passed_over() -> None:
    node = established()
    node.step(Append((b"x",)))
    node.step(TransferRequested(NodeId(2)))
    node.fetch(1, 2, 1)
    deadline = node.core.next_deadline()
    assert deadline is not None
    node.pass_time(node.config.timings.election_timeout_ms)
    assert node.effects_of(TransferRefused)
    assert (node.role, node.core.is_transferring) == ("Leader", False)


@pytest.mark.parametrize("to", [NodeId(0), NodeId(9)])
def test_nobody_else_to_hand_over_to(to: NodeId) -> None:
    node = established()
    node.step(TransferRequested(to))
    assert node.effects_of(TransferRefused)


def test_recovered_voters_are_those_of_the_log() -> None:
    leader = adding()
    batches = leader.core.log.read(EndOffset(0), max_bytes=9999) or ()
    recovered = log_of(batches)
    log = type(recovered)(
        recovered.start_offset,
        recovered.end_offset,
        recovered.epoch_starts,
        recovered.tail,
        control=batches,
    )
    node = Lone(log=log, state=QuorumState(Epoch(1)))
    assert node.core.voters == leader.core.voters
    assert node.core.voters_at(EndOffset(2)) == voter_set(0, 1, 2)
