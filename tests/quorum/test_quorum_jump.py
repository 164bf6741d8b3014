"""Logs of before a recovery are told apart by their end, and have no part in the quorum."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streammeta.controller.errors import LogOfBeforeError
from streammeta.controller.ids import DirectoryId, EndOffset, Epoch, NodeId, SnapshotId
from streammeta.controller.quorum import messages
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.log_view import LogStart
from streammeta.controller.quorum.recovered_log import (
    ERA_OFFSETS,
    era_of,
    is_from_before_recovery,
    next_era,
)
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from tests.quorum.core_harness import Lone, batch

EPOCH = Epoch(1_005)
START = EndOffset(ERA_OFFSETS)
DISK = ReplicaKey(NodeId(0), DirectoryId("new"))


def recovered() -> Lone:
    """Node 0 as a recovery leaves it: the only voter, its log begins in the second era."""
    log = LogStart(
        start_offset=START,
        end_offset=START,
        start_epoch=EPOCH,
        snapshots=(SnapshotId(START, EPOCH),),
        snapshot_voters=VoterSet((Voter(DISK, "n0:1"),)),
    )
    node = Lone(size=0, state=QuorumState(EPOCH), local=DISK, log=log)
    node.flush()
    return node


def test_the_only_survivor_leads_at_once_behind_all_epochs_of_before() -> None:
    node = recovered()
    assert node.role == "Leader"
    assert node.core.epoch == EPOCH + 1
    assert node.core.high_watermark > START


@pytest.mark.parametrize(
    ("end", "own_end", "expected"),
    [
        (0, START, False),  # an empty disk is of no time
        (1, START, True),
        (START - 1, START, True),
        (START, START, False),
        (START + 9, START, False),
        (1, START - 1, False),
        (START + 9, 2 * START, True),
        (START, 1, False),  # it is the other one that must notice
    ],
)
def test_eras(end: int, own_end: int, expected: bool) -> None:
    assert is_from_before_recovery(end, own_end) is expected


def test_a_log_goes_on_in_the_era_after_its_own() -> None:
    for end in (0, 1, START - 1, START, START + 5):
        assert era_of(next_era(end)) == era_of(end) + 1
        assert next_era(end) > end


@pytest.mark.parametrize("offset", [1, 70, START - 1])
def test_a_log_of_before_is_not_fed(offset: int) -> None:
    node = recovered()
    node.fetch(ReplicaKey(NodeId(1), DirectoryId("old")), offset, 4)
    answer = node.only(messages.FetchResponse)
    assert answer.header.error is messages.QuorumError.LOG_OF_BEFORE
    assert answer.snapshot_id is None
    assert not answer.batches


def test_an_empty_disk_gets_the_snapshot() -> None:
    node = recovered()
    node.fetch(ReplicaKey(NodeId(1), DirectoryId("fresh")), 0, 0)
    assert node.only(messages.FetchResponse).snapshot_id == SnapshotId(START, EPOCH)


@pytest.mark.parametrize("pre_vote", [True, False])
def test_a_candidate_of_before_deposes_nobody(pre_vote: bool) -> None:
    node = recovered()
    granted = node.ask_vote(1, EPOCH + 50, 4, 100, pre_vote=pre_vote)
    assert not granted
    answer = node.only(messages.VoteResponse)
    assert answer.header.error is messages.QuorumError.LOG_OF_BEFORE
    assert (node.role, node.core.epoch) == ("Leader", EPOCH + 1)


@pytest.mark.parametrize("directory", [DirectoryId("old"), None])
def test_a_leader_of_before_is_not_followed(directory: DirectoryId | None) -> None:
    for kind in (messages.BeginQuorumEpochRequest, messages.EndQuorumEpochRequest):
        node = recovered()
        header = replace(node.header(1, EPOCH + 50), receiver=ReplicaKey(DISK.node_id, directory))
        if kind is messages.BeginQuorumEpochRequest:
            node.receive(messages.BeginQuorumEpochRequest(header=header))
            refused = node.only(messages.BeginQuorumEpochResponse).header
        else:
            node.receive(messages.EndQuorumEpochRequest(header=header, preferred_successors=()))
            refused = node.only(messages.EndQuorumEpochResponse).header
        assert refused.error is messages.QuorumError.INVALID_VOTER_KEY
        assert (node.role, node.core.epoch) == ("Leader", EPOCH + 1)


def test_a_replica_that_is_told_that_its_log_is_of_before_stops() -> None:
    node = Lone(state=QuorumState(Epoch(5)), batches=[batch(0, 4)])
    fetch = node.follow(1, 6)
    with pytest.raises(LogOfBeforeError, match="controller 1"):
        node.feed(fetch, error=messages.QuorumError.LOG_OF_BEFORE, epoch=int(EPOCH))


def test_an_answer_to_nothing_asked_stops_nobody() -> None:
    node = Lone(state=QuorumState(Epoch(5)), batches=[batch(0, 4)])
    fetch = node.follow(1, 6)
    header = replace(fetch.header, request_id=fetch.header.request_id + 1)
    node.feed(replace(fetch, header=header), error=messages.QuorumError.LOG_OF_BEFORE)
    assert node.role == "Follower"
