"""An acknowledgement counts for the disk that gave it, never for another disk of the same node.

A voter that the log names without a disk is the disk that its node was formed with. Whole cores
play the voters here; the test decides which of them hear each other.
"""

from collections import deque

import pytest

from streammeta.controller.ids import DirectoryId, EndOffset, NodeId
from streammeta.controller.quorum import events, messages
from streammeta.controller.quorum.voters import ReplicaKey, Voter
from tests.quorum.core_harness import Lone
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
