"""Acknowledgements count for one disk of a node, and a leader without room hands over.

A voter that the log names without a disk is the disk that its node was formed with. Whole cores
play the voters here; the test decides which of them hear each other.
"""

from collections import deque

import pytest

from streammeta.controller.ids import DirectoryId, EndOffset, NodeId
from streammeta.controller.quorum import events, messages
from streammeta.controller.quorum.messages import EndQuorumEpochRequest, FetchRequest, FetchResponse
from streammeta.controller.quorum.voters import ReplicaKey, Voter
from tests.quorum.core_harness import Lone, batch, elected
from tests.quorum.test_quorum_replication import established

NEW = ReplicaKey(NodeId(2), DirectoryId("new"))


def first_voters(*, is_last_heard: bool = True) -> tuple[Lone, Lone, Lone]:
    """Three voters that their configuration names without their disks; the first one leads.

    The last one follows it, or is cut off from the beginning.
    """
    nodes = [
        Lone(size=3, local=ReplicaKey(NodeId(node_id), DirectoryId(disk)))
        for node_id, disk in ((0, "a"), (1, "b"), (2, "old"))
    ]
    elect(*(nodes if is_last_heard else nodes[:2]))
    return nodes[0], nodes[1], nodes[2]


def replacement(leader: Lone) -> Lone:
    """An empty disk in the place of node 2's, which has fetched all of the leader's log."""
    node = Lone(size=0, local=NEW, seeds=[0])
    converse(leader, node)
    assert node.core.log.flushed_end == leader.core.log.end_offset
    return node


def converse(*nodes: Lone) -> list[events.Effect]:
    """Flush every write and deliver every message between these nodes, until all are silent.

    What is sent to others is lost, and so is whatever tells the leader which disk a voter has.
    Returns all effects.
    """
    by_id = {node.local.node_id: node for node in nodes}
    seen = [effect for node in nodes for effect in _everything_done(node)]
    under_way = _sent(seen)
    while under_way:
        message = under_way.popleft()
        header = message.header
        to = (
            header.receiver.node_id
            if isinstance(header, messages.RequestHeader)
            else header.receiver
        )
        if to in by_id and not isinstance(message, messages.UpdateVoterRequest):
            by_id[to].receive(message)
            effects = _everything_done(by_id[to])
            seen += effects
            under_way += _sent(effects)
    return seen


def _everything_done(node: Lone) -> list[events.Effect]:
    """The effects of a node's last step and of all its writes."""
    effects, node.effects = node.effects, []
    effects += node.flush()
    node.effects = []
    return effects


def _sent(effects: list[events.Effect]) -> deque[messages.Message]:
    return deque(effect.message for effect in effects if isinstance(effect, events.Send))


def elect(candidate: Lone, *voters: Lone) -> None:
    """Let a node win an election against its leader, and commit the first batch of its epoch."""
    for node in (candidate, *voters):
        node.now += 5000
    for _ in range(20):
        candidate.pass_time(1000)
        converse(candidate, *voters)
        if candidate.core.is_established:
            return
    raise AssertionError(f"node {candidate.local.node_id} was not elected, it is {candidate.role}")


def log_below(node: Lone, end_offset: EndOffset) -> list[bytes]:
    return [data for batch in node.batches() for data in batch.payloads][:end_offset]


@pytest.mark.parametrize("is_last_heard", [True, False])
def test_what_only_a_new_disk_flushed_is_not_committed_for_the_disk_it_replaced(
    *, is_last_heard: bool
) -> None:
    """The first disk returns, or has voted already: with another voter it knows nothing of it."""
    leader, other, first = first_voters(is_last_heard=is_last_heard)
    second = replacement(leader)
    leader.step(events.Append((b"acknowledged",)))
    converse(leader, second)
    assert second.core.log.flushed_end == leader.core.log.end_offset
    committed = log_below(leader, leader.core.high_watermark)
    elect(other, first)
    assert log_below(other, EndOffset(len(committed))) == committed


@pytest.mark.parametrize("is_last_heard", [True, False])
def test_a_new_disk_proves_no_leadership_for_the_disk_it_replaced(*, is_last_heard: bool) -> None:
    """The first disk follows another leader, which has committed what this one can't know."""
    deposed, other, first = first_voters(is_last_heard=is_last_heard)
    second = replacement(deposed)
    elect(other, first)
    other.step(events.Append((b"news",)))
    converse(other, first)
    assert other.core.high_watermark > deposed.core.high_watermark
    deposed.step(events.ReadIndexRequested(7))
    effects = converse(deposed, second)
    assert not [effect for effect in effects if isinstance(effect, events.ReadIndexReady)]


# -- two disks of a node, both formatted as the first voter's


def formatted_alike() -> tuple[Lone, ReplicaKey, ReplicaKey]:
    """A leader that has heard one disk of node 2, and another one that claims to be the same."""
    disks = [ReplicaKey(NodeId(2), DirectoryId(disk)) for disk in ("first", "second")]
    node = established()
    node.fetch(disks[0], 2, 1, hw=2)
    node.step(events.Append((b"x",)))
    return node, disks[0], disks[1]


def name_disk(node: Lone, key: ReplicaKey) -> None:
    """Tell the leader that the voter has this disk, before the leader has flushed its log."""
    assert node.update(Voter(key, "n2:1")) is messages.QuorumError.NONE


def test_the_acknowledgements_of_two_disks_are_not_taken_for_those_of_one() -> None:
    node, _, second = formatted_alike()
    node.flush()
    node.fetch(second, 3, 1)
    assert node.core.high_watermark == 2
    name_disk(node, second)
    node.fetch(second, 3, 1)
    assert node.core.high_watermark == 3


def test_what_one_disk_earned_is_not_handed_to_the_disk_that_the_log_names() -> None:
    node, first, second = formatted_alike()
    node.fetch(first, 3, 1, hw=2)
    name_disk(node, second)
    assert [answer.header.receiver for answer in node.sent(messages.FetchResponse)] == [2]
    node.flush()
    assert node.core.high_watermark == 2
    node.fetch(second, 4, 1)
    assert node.core.high_watermark == 4


def test_what_the_named_disk_has_earned_itself_stays_with_it() -> None:
    node, first, _ = formatted_alike()
    node.fetch(first, 3, 1, hw=2)
    name_disk(node, first)
    node.flush()
    assert node.core.high_watermark == 3


def test_leadership_promised_to_a_voter_is_handed_over_although_its_disk_becomes_known() -> None:
    node, first, _ = formatted_alike()
    node.step(events.TransferRequested(NodeId(2)))
    name_disk(node, first)
    assert not node.effects_of(events.TransferRejected)
    node.flush()
    node.fetch(first, 4, 1)
    assert node.role == "Resigned"


def leader() -> Lone:
    """An established leader whose two voters have fetched everything."""
    node = elected()
    for voter in (1, 2):
        node.fetch(voter, 2, 1)
    assert node.core.is_established
    assert (node.core.high_watermark, node.core.log.end_offset) == (2, 2)
    return node


def told(node: Lone) -> list[tuple[NodeId, ...]]:
    return [effect.full_voters for effect in node.effects_of(events.FullVotersChanged)]


def test_a_full_leader_hands_over_with_the_next_fetches_of_a_majority_with_room() -> None:
    node = leader()
    node.pass_time(100)
    node.step(events.DiskFull(is_full=True))
    assert node.role == "Leader", "what it knows of the others' disks is older than its own trouble"
    node.pass_time(10)
    node.fetch(1, 2, 1)
    node.pass_time(0)
    assert node.role == "Leader", "one voter with room is no majority of three"
    node.fetch(2, 2, 1)
    assert node.core.is_transferring
    assert node.core.next_deadline() == node.now, "nothing is waited for"
    node.pass_time(0)
    assert node.role == "Resigned"
    (ended,) = node.effects_of(events.LeadershipEnded)
    assert "disk is full" in ended.reason
    successors = node.sent(EndQuorumEpochRequest)[0].preferred_successors
    assert [key.node_id for key in successors] == [1]


def test_a_full_leader_waits_until_what_it_appended_is_committed() -> None:
    node = leader()
    node.step(events.Append((b"x",)))
    node.step(events.DiskFull(is_full=True))
    node.pass_time(1)
    node.fetch(1, 3, 1)
    node.fetch(2, 2, 1)
    node.pass_time(0)
    assert node.role == "Leader", "callers that wait for the last batch would hear nothing of it"
    node.fetch(2, 3, 1)
    assert node.core.high_watermark == 3
    node.pass_time(0)
    assert node.role == "Resigned"


def test_a_full_leader_stays_while_no_majority_has_room_and_proves_its_reads() -> None:
    node = leader()
    node.step(events.DiskFull(is_full=True))
    for moment in range(20):
        node.pass_time(100)
        node.fetch(1, 2, 1, is_disk_full=True, read_round=moment)
        node.fetch(2, 2, 1, read_round=moment)
        node.step(events.ReadIndexRequested(moment))
        node.fetch(1, 2, 1, is_disk_full=True, read_round=moment + 1)
        assert node.effects_of(events.ReadIndexReady) == [
            events.ReadIndexReady(moment, node.core.high_watermark)
        ]
    assert node.role == "Leader"
    assert node.core.full_majority == (0, 1)


def test_the_want_of_room_of_a_majority_is_told_once_and_so_is_its_end() -> None:
    node = leader()
    node.fetch(1, 2, 1, is_disk_full=True)
    assert told(node) == []
    node.fetch(2, 2, 1, is_disk_full=True)
    assert told(node) == [(1, 2)]
    node.fetch(2, 2, 1, is_disk_full=True)
    assert told(node) == []
    node.fetch(2, 2, 1)
    assert told(node) == [()]
    assert node.core.full_majority == ()


def test_a_full_voter_is_sent_batches_only_when_they_can_not_be_committed_without_it() -> None:
    node = leader()
    node.write(b"x")
    node.fetch(1, 2, 1, is_disk_full=True)
    assert node.sent(FetchResponse) == [], "its reserve is kept, and its Fetch waits as others do"
    node.fetch(2, 2, 1, is_disk_full=True)
    sent = {response.header.receiver: response.batches for response in node.sent(FetchResponse)}
    assert [len(sent[NodeId(voter)]) for voter in (1, 2)] == [1, 1]


def test_a_full_voter_whose_reserve_is_used_up_is_sent_nothing() -> None:
    node = leader()
    node.write(b"x")
    node.fetch_each(2, 1, is_disk_full=True, max_bytes=0)
    assert node.sent(FetchResponse) == []


def test_a_full_follower_takes_what_it_is_sent_until_it_can_not_flush_it() -> None:
    node = Lone()
    node.begin(1, 4)
    node.flush()
    node.step(events.DiskFull(is_full=True))
    request = node.only(FetchRequest)
    assert request.max_bytes > 0
    node.feed(request, batch(0, 4))
    assert node.core.log.end_offset == 1
    waiting = node.only(FetchRequest)
    assert (waiting.fetch_offset, waiting.max_bytes) == (0, 0), "the batch may not find room"
    node.flush()
    request = node.only(FetchRequest)
    assert (request.fetch_offset, request.max_bytes > 0) == (1, True), "told as soon as flushed"

    node.feed(request, batch(1, 4))
    refused = node.only(FetchRequest)
    node.feed(refused, batch(1, 4), batch(2, 4), hw=2)  # a leader of an older release
    assert node.core.log.end_offset == 2, "nothing more is taken"
    assert node.core.high_watermark == 1
    assert node.sent(FetchRequest) == [], "the same batches are not asked for at once"
    node.pass_time(node.config.timings.fetch_max_wait_ms)
    assert node.only(FetchRequest).fetch_offset == 1


def test_what_was_flushed_since_a_fetch_is_not_committed_by_its_answer() -> None:
    node = Lone()
    node.begin(1, 4)
    node.flush()
    node.feed(node.only(FetchRequest), batch(0, 4))
    (first,) = node.effects_of(events.AppendLog)
    node.feed(node.only(FetchRequest), batch(1, 4))
    node.step(events.DiskFull(is_full=True))
    request = node.only(FetchRequest)
    assert request.fetch_offset == 0
    node.step(events.WriteDone(first.token))
    assert node.core.log.flushed_end == 1, "the other batch still waits for room"
    node.feed(request, hw=1)
    assert node.core.high_watermark == 0, "the leader has compared nothing yet"


def test_a_silent_voter_is_no_help_where_another_is_full() -> None:
    node = leader()
    for _ in range(12):
        node.pass_time(200)
        node.fetch(1, 2, 1, is_disk_full=True)
    assert node.role == "Leader"
    assert node.core.full_majority == (1,)
    node.fetch(2, 2, 1)
    assert told(node) == [()]


def test_a_voter_is_silent_when_its_time_is_over_and_not_only_with_the_next_event() -> None:
    node = leader()
    node.fetch(2, 2, 1)
    due = node.now + node.config.timings.fetch_timeout_ms + 1
    node.fetch(1, 2, 1, is_disk_full=True)
    while node.now < due:
        deadline = node.core.next_deadline()
        assert deadline is not None
        node.pass_time(max(1, deadline - node.now))
    assert (node.now, told(node)) == (due, [(1,)])
