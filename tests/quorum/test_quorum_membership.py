"""Voters change one at a time, by the log, and any majorities of successive sets meet."""

from dataclasses import replace
from itertools import combinations

import pytest

from streammeta.controller.errors import InvariantError
from streammeta.controller.ids import DirectoryId, EndOffset, Epoch, NodeId
from streammeta.controller.quorum import events, messages
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.roles import Leader
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterHistory, VoterSet, majority
from tests.quorum.core_harness import Lone, elected, log_of, voter_set
from tests.quorum.test_quorum_replication import established

NEW = Voter(ReplicaKey(NodeId(7), DirectoryId("disk7")), "n7:1")


def add(node: Lone, voter: Voter = NEW) -> None:
    node.step(events.VoterChangeRequested(1, voter))


def refusal(node: Lone) -> messages.QuorumError:
    (refused,) = node.effects_of(events.VoterChangeRejected)
    return refused.error


def named(node: Lone) -> VoterSet:
    """The voters named by what the last step appended."""
    (append,) = node.effects_of(events.AppendLog)
    (batch,) = append.batches
    voters = messages.decode_voters(batch)
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
    assert node.effects_of(events.VotersChanged) == [events.VotersChanged(node.core.voters)]
    assert [voter.key.node_id for voter in node.core.voters] == [0, 1, 2, 7]
    node.flush()
    node.fetch(1, 3, 1)
    assert node.core.high_watermark == 2  # two of four
    node.fetch(NEW.key, 3, 1)
    assert node.core.high_watermark == 3
    assert node.effects_of(events.VoterChangeDone) == [events.VoterChangeDone(1, EndOffset(3))]


def test_who_does_not_fetch_is_not_added() -> None:
    node = established()
    add(node)
    assert refusal(node) is messages.QuorumError.REQUEST_TIMED_OUT
    node.fetch(NEW.key, 2, 1, hw=2)
    node.now += 3000
    node.fetch_each(2, 1)
    add(node)
    assert refusal(node) is messages.QuorumError.REQUEST_TIMED_OUT


def test_a_node_that_votes_with_another_disk_is_not_added() -> None:
    node = established()
    newcomer = Voter(ReplicaKey(NodeId(2), DirectoryId("replaced")), "n2:1")
    add(node, newcomer)
    assert refusal(node) is messages.QuorumError.DUPLICATE_VOTER


def test_a_change_that_was_made_before_is_confirmed_and_changes_nothing() -> None:
    node = established()
    end = node.core.log.end_offset
    again = node.core.voters.find(NodeId(2))
    assert again is not None
    changes: tuple[Voter | ReplicaKey, ...] = (again, ReplicaKey(NodeId(9)))
    for number, change in enumerate(changes):
        node.step(events.VoterChangeRequested(number, change))
        (done,) = node.effects_of(events.VoterChangeDone)
        assert done.change_id == number
    assert node.core.log.end_offset == end


def test_only_one_change_runs_and_none_before_the_last_is_committed() -> None:
    node = adding()
    node.step(events.VoterChangeRequested(2, ReplicaKey(NodeId(1))))
    assert refusal(node) is messages.QuorumError.REQUEST_TIMED_OUT
    node.flush()
    node.fetch_each(3, 1)
    node.step(events.VoterChangeRequested(3, ReplicaKey(NodeId(1))))
    assert not node.effects_of(events.VoterChangeRejected)


def test_no_change_before_the_leader_has_committed_in_its_epoch() -> None:
    """Two leaders' changes could otherwise have majorities that do not meet (Ongaro, 2015)."""
    node = elected()
    node.fetch(1, 0, 0)
    node.step(events.VoterChangeRequested(1, ReplicaKey(NodeId(1))))
    assert refusal(node) is messages.QuorumError.REQUEST_TIMED_OUT


def test_a_laggard_is_added_after_a_round_it_keeps_up_with() -> None:
    node = established()
    node.write(*[b"x"] * 100)
    node.fetch(NEW.key, 2, 1)
    add(node)
    assert len(node.core.voters) == 3
    node.now += node.config.timings.election_timeout_ms + 1
    node.fetch_each(102, 1)
    node.step(events.Append((b"x",)))
    node.fetch(NEW.key, 102, 1)  # a slow round: another one begins
    assert len(node.core.voters) == 3
    node.fetch(NEW.key, 103, 1)
    assert len(node.core.voters) == 4


def test_who_does_not_catch_up_is_refused_and_stays_an_observer() -> None:
    node = established()
    node.step(events.Append((b"x",) * 100))
    node.fetch(NEW.key, 2, 1)
    add(node)
    limit = node.config.timings.election_timeout_ms * node.config.timings.catch_up_rounds
    refusals: list[events.VoterChangeRejected] = []
    for _ in range(limit // 500):
        node.pass_time(500)
        refusals += node.effects_of(events.VoterChangeRejected)
        node.fetch_each(102, 1)
    assert [item.error for item in refusals] == [messages.QuorumError.REQUEST_TIMED_OUT]
    assert len(node.core.voters) == 3


def test_a_removed_voter_no_longer_counts() -> None:
    node = established()
    node.step(events.VoterChangeRequested(1, ReplicaKey(NodeId(2))))
    node.flush()
    node.fetch(2, 3, 1)
    assert node.core.high_watermark == 2
    node.fetch(1, 3, 1)
    assert node.core.high_watermark == 3
    assert node.effects_of(events.VoterChangeDone)
    assert isinstance(node.core.role, Leader)
    assert [key.node_id for key in node.core.role.progress] == [1]
    node.fetch(2, 3, 1)
    assert [key.node_id for key in node.core.role.progress] == [1, 2]


def test_the_last_voter_is_not_removed() -> None:
    alone = Lone(size=1)
    alone.flush()
    alone.step(events.VoterChangeRequested(1, ReplicaKey(NodeId(0))))
    assert refusal(alone) is messages.QuorumError.INVALID_REQUEST


def test_a_leader_that_is_removed_leads_until_that_is_committed_without_counting_itself() -> None:
    node = established()
    node.step(events.VoterChangeRequested(1, ReplicaKey(NodeId(0))))
    node.flush()
    assert node.role == "Leader"
    node.fetch(1, 3, 1)
    assert (node.role, node.core.high_watermark) == ("Leader", 2)
    node.fetch(2, 3, 1)
    assert (node.role, node.core.high_watermark) == ("Resigned", 3)
    assert node.effects_of(events.VoterChangeDone)
    assert node.effects_of(events.LeadershipEnded)
    node.pass_time(5000)
    node.flush()
    assert node.role == "Unattached"
    node.pass_time(5000)
    assert not node.sent(messages.VoteRequest)


def test_who_alone_knows_of_its_removal_can_still_be_elected_but_not_by_its_own_vote() -> None:
    """With two voters no other could be elected (Ongaro, section 4.2.2)."""
    node = established(size=2)
    node.step(events.VoterChangeRequested(1, ReplicaKey(NodeId(0))))
    node.flush()
    node.step(events.Resign())
    node.pass_time(3000)
    node.flush()
    node.pass_time(3000)
    node.flush()
    assert node.role == "Prospective"
    for expected in ("Candidate", "Leader"):
        node.grant(node.sent(messages.VoteRequest)[0])
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
    leader.step(events.VoterChangeRequested(2, NEW.key))
    batches = leader.batches()
    log = replace(log_of(batches), control=batches)
    restarted = Lone(size=0, local=NEW.key, log=log, state=QuorumState(Epoch(1)))
    assert not restarted.core.is_voter
    restarted.pass_time(3000)
    assert restarted.sent(messages.VoteRequest)


def test_a_change_whose_leader_is_deposed_is_reported_as_unknown() -> None:
    node = adding()
    node.step(events.Resign())
    assert refusal(node) is messages.QuorumError.NOT_LEADER


def test_voters_named_by_a_log_that_is_cut_are_in_force_no_more() -> None:
    node = Lone()
    node.begin(1, 4)
    leader = adding()
    first, second = leader.batches()
    node.feed(node.only(messages.FetchRequest), first, second)
    assert len(node.core.voters) == 4
    node.flush()
    node.feed(node.follow(2, 5), diverging=messages.EpochEnd(Epoch(1), EndOffset(2)))
    assert len(node.core.voters) == 3


# -- the replica that is meant


def test_a_replaced_disk_neither_votes_nor_counts_for_the_lost_one() -> None:
    replaced = ReplicaKey(NodeId(2), DirectoryId("new"))
    node = Lone(size=0, local=replaced, seeds=[0, 1])
    for receiver in (ReplicaKey(NodeId(2)), ReplicaKey(NodeId(2), DirectoryId("old"))):
        node.ask_vote(1, 9, 8, 99, receiver=receiver)
        answer = node.only(messages.VoteResponse)
        assert (answer.granted, answer.header.error) == (
            False,
            messages.QuorumError.INVALID_VOTER_KEY,
        )


def test_a_new_voter_grants_its_vote_before_it_knows_that_it_votes() -> None:
    """Else adding a voter and losing another would end without a leader."""
    node = Lone(size=0, local=NEW.key, seeds=[0])
    assert node.ask_vote(1, 9, 8, 99)


# -- observers


def test_a_joining_replica_asks_the_seeds_until_one_names_the_leader() -> None:
    node = Lone(size=0, local=NEW.key, seeds=[1, 2])
    asked = set()
    for _ in range(40):
        for request in node.sent(messages.FetchRequest):
            asked.add(request.header.receiver.node_id)
        node.pass_time(600)
    assert asked == {1, 2}
    assert not node.sent(messages.VoteRequest)
    (request,) = node.sent(messages.FetchRequest)
    node.feed(request, epoch=4, leader=3, error=messages.QuorumError.FENCED_LEADER_EPOCH)
    assert (node.role, node.core.epoch, node.core.leader_id) == ("Follower", 4, 3)
    assert node.only(messages.FetchRequest).header.receiver.node_id == 3


def test_an_observer_that_lost_its_leader_looks_for_it_and_may_find_the_same() -> None:
    node = Lone(size=0, local=NEW.key, seeds=[1])
    node.begin(1, 4)
    node.pass_time(2000)
    assert node.role == "Unattached"
    assert not node.sent(messages.VoteRequest)
    node.pass_time(1)
    node.feed(node.only(messages.FetchRequest), leader=1)
    assert (node.role, node.core.epoch, node.core.leader_id) == ("Follower", 4, 1)


def test_an_observer_that_is_told_its_node_leads_keeps_looking() -> None:
    """An earlier disk of the same node may still be named as the leader."""
    node = Lone(size=0, local=NEW.key, seeds=[1])
    node.feed(node.only(messages.FetchRequest), leader=7)
    assert (node.role, node.core.leader_id) == ("Unattached", None)


# -- telling the leader where one is


def test_a_voter_tells_its_disk_and_the_leader_records_it() -> None:
    key = ReplicaKey(NodeId(1), DirectoryId("disk1"))
    voter = Lone(size=3, local=key)
    voter.feed(voter.follow(0, 1))
    (request,) = voter.sent(messages.UpdateVoterRequest)
    assert request.voter == Voter(key, "n1:1")

    leader = established()
    assert leader.update(request.voter) is messages.QuorumError.NONE
    assert leader.core.voters.find(NodeId(1)) == request.voter
    assert leader.update(request.voter) is messages.QuorumError.NONE
    assert not leader.effects_of(events.AppendLog)
    leader.flush()
    leader.fetch(key, 3, 1)
    assert leader.core.high_watermark == 3


def lone_as_recorded(record: Voter, client_endpoint: str) -> Lone:
    """Return a replica whose log names it so among three voters, of epoch 1."""
    payload = messages.encode_voters(voter_set(0, 1, 2).with_update(record))
    first = messages.Batch(EndOffset(0), Epoch(1), messages.BatchKind.CONTROL, (payload,))
    log = replace(log_of([first]), control=(first,))
    return Lone(
        local=record.key, log=log, state=QuorumState(Epoch(1)), client_endpoint=client_endpoint
    )


@pytest.mark.parametrize(
    ("recorded", "is_told"), [("n1:3", True), (None, True), ("n1:2", False)], ids=str
)
def test_a_voter_tells_where_clients_reach_it_until_the_record_says_so(
    recorded: str | None, is_told: bool
) -> None:
    key = ReplicaKey(NodeId(1), DirectoryId("disk1"))
    voter = lone_as_recorded(Voter(key, "n1:1", recorded), "n1:2")
    voter.feed(voter.follow(0, 2))
    told = [request.voter for request in voter.sent(messages.UpdateVoterRequest)]
    assert told == ([Voter(key, "n1:1", "n1:2")] if is_told else [])


@pytest.mark.parametrize("recorded", ["n0:3", None])
def test_a_leader_corrects_where_clients_reach_it(recorded: str | None) -> None:
    key = ReplicaKey(NodeId(0), DirectoryId("disk0"))
    leader = lone_as_recorded(Voter(key, "n0:1", recorded), "n0:2")
    leader.become_leader()
    leader.fetch(1, 2, 2)
    leader.pass_time(10)
    assert leader.core.voters.find(NodeId(0)) == Voter(key, "n0:1", "n0:2")


def test_a_disk_that_is_known_is_not_replaced_by_telling() -> None:
    leader = established()
    known, other = (Voter(ReplicaKey(NodeId(1), DirectoryId(disk)), "n1:1") for disk in "ab")
    assert leader.update(known) is messages.QuorumError.NONE
    assert leader.update(other) is messages.QuorumError.VOTER_NOT_FOUND


def test_an_announcement_for_the_lost_disk_still_tells_who_leads() -> None:
    node = Lone(size=0, local=ReplicaKey(NodeId(2), DirectoryId("new")), seeds=[0])
    old = ReplicaKey(NodeId(2), DirectoryId("old"))
    node.receive(messages.BeginQuorumEpochRequest(header=replace(node.header(1, 5), receiver=old)))
    error = node.only(messages.BeginQuorumEpochResponse).header.error
    assert error is messages.QuorumError.INVALID_VOTER_KEY
    assert (node.role, node.core.leader_id) == ("Follower", 1)


# -- handing over


def test_leadership_is_handed_over_once_the_successor_has_caught_up() -> None:
    node = established()
    node.fetch(2, 2, 1, hw=2)
    node.write(b"x")
    node.step(events.TransferRequested(NodeId(1)))
    assert node.core.is_transferring
    node.fetch(2, 3, 1)
    assert node.role == "Leader"
    node.fetch(1, 3, 1)
    assert node.role == "Resigned"
    for end in node.sent(messages.EndQuorumEpochRequest):
        assert [key.node_id for key in end.preferred_successors] == [1]


def test_a_successor_that_does_not_catch_up_in_time_is_passed_over() -> None:
    node = established()
    node.step(events.Append((b"x",)))
    node.step(events.TransferRequested(NodeId(2)))
    node.fetch(1, 2, 1)
    deadline = node.core.next_deadline()
    assert deadline is not None
    node.pass_time(node.config.timings.election_timeout_ms)
    assert node.effects_of(events.TransferRejected)
    assert (node.role, node.core.is_transferring) == ("Leader", False)


@pytest.mark.parametrize("to", [NodeId(0), NodeId(9)])
def test_nobody_else_to_hand_over_to(to: NodeId) -> None:
    node = established()
    node.step(events.TransferRequested(to))
    assert node.effects_of(events.TransferRejected)


def test_recovered_voters_are_those_of_the_log() -> None:
    leader = adding()
    batches = leader.batches()
    log = replace(log_of(batches), control=batches)
    node = Lone(log=log, state=QuorumState(Epoch(1)))
    assert node.core.voters == leader.core.voters
    assert node.core.voters_at(EndOffset(2)) == voter_set(0, 1, 2)


def voter(node: int, disk: str | None = "d") -> Voter:
    directory = None if disk is None else DirectoryId(f"{disk}{node}")
    return Voter(ReplicaKey(NodeId(node), directory), f"n{node}:1")


def voters(*nodes: int) -> VoterSet:
    return VoterSet(tuple(voter(node) for node in nodes))


def majorities(nodes: VoterSet) -> list[set[Voter]]:
    return [set(chosen) for chosen in combinations(nodes, majority(len(nodes)))]


@pytest.mark.parametrize("size", range(1, 6))
def test_sets_that_follow_each_other_have_majorities_that_meet(size: int) -> None:
    before = voters(*range(size))
    subsets = [
        voters(*nodes) for k in range(1, size + 3) for nodes in combinations(range(size + 2), k)
    ]
    followers = [after for after in subsets if after.follows(before)]
    assert before in followers
    assert len(followers) == 1 + 2 + (size if size > 1 else 0)
    for after in followers:
        for old in majorities(before):
            assert all(old & new for new in majorities(after)), (before, after)


def test_another_disk_is_another_voter_unless_the_first_was_not_known() -> None:
    pinned, unknown = VoterSet((voter(1),)), VoterSet((voter(1, None),))
    assert pinned.follows(unknown)
    assert not VoterSet((voter(1, "new"),)).follows(pinned)


def test_a_node_votes_once_in_a_set() -> None:
    with pytest.raises(ValueError, match="node ids"):
        voters(1, 2).with_voter(voter(2, "new"))


def control(base: int, *payloads: bytes) -> messages.Batch:
    return messages.Batch(EndOffset(base), Epoch(1), messages.BatchKind.CONTROL, payloads)


def test_voters_survive_their_record() -> None:
    named = VoterSet((voter(1), voter(2, None)))
    change = messages.encode_leader_change(NodeId(1), named, [NodeId(1)])
    assert messages.decode_voters(control(0, change, messages.encode_voters(named))) == named
    assert messages.decode_voters(control(0, change)) is None


def test_a_record_names_where_clients_reach_a_voter_once_that_is_known() -> None:
    """Records of voters that have not told it are as they always were."""
    told = Voter(ReplicaKey(NodeId(2), DirectoryId("d2")), "n2:1", "n2:2")
    untold, known = VoterSet((voter(1),)).with_voter(told).to_fields()
    assert untold == {"node_id": 1, "directory_id": "d1", "endpoint": "n1:1"}
    assert known["client_endpoint"] == "n2:2"
    named = voters(1).with_voter(told)
    assert messages.decode_voters(control(0, messages.encode_voters(named))) == named


@pytest.mark.parametrize(
    "payload", [b"{}", b"nonsense", b'{"type":"voters","version":9}', b'{"type":"voters"}', b"[]"]
)
def test_a_record_that_cannot_be_read_is_not_passed_over(payload: bytes) -> None:
    with pytest.raises(InvariantError, match="offset 7"):
        messages.decode_voters(control(7, payload))


def test_the_set_in_force_is_the_last_one_in_the_log() -> None:
    history = VoterHistory(voters(1), EndOffset(0))
    history.append(EndOffset(5), voters(1, 2))
    history.append(EndOffset(9), voters(1, 2, 3))
    assert [len(history.at(EndOffset(end))) for end in (0, 4, 5, 8, 9, 99)] == [1, 1, 2, 2, 3, 3]
    history.trim(EndOffset(6))
    assert history.at(EndOffset(6)) == voters(1, 2)
    history.truncate(EndOffset(8))
    assert (history.latest, history.latest_end) == (voters(1, 2), 5)


def test_sets_in_the_log_differ_by_one() -> None:
    history = VoterHistory(voters(1), EndOffset(3))
    with pytest.raises(InvariantError, match="more than one"):
        history.append(EndOffset(5), voters(1, 2, 3))
