"""The core's index of its log: equal to it, small in memory, cut where a recovery begins."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammeta.controller.errors import InvariantError, LogOfBeforeError
from streammeta.controller.ids import DirectoryId, EndOffset, Epoch, NodeId, SnapshotId
from streammeta.controller.quorum import messages, recovered_log, voters
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.log_view import LogStart, LogView
from streammeta.controller.quorum.messages import Batch
from tests.quorum.core_harness import Lone, batch, log_of


def make_log(epochs: list[int]) -> list[Batch]:
    return [batch(index, epoch) for index, epoch in enumerate(sorted(epochs))]


@given(st.lists(st.integers(1, 6), max_size=12), st.integers(0, 8))
def test_the_end_of_an_epoch_is_that_of_its_last_batch(epochs: list[int], asked: int) -> None:
    log = make_log(epochs)
    found = LogView(log_of(log), 1 << 20).end_of_epoch(Epoch(asked))
    earlier = [item for item in log if item.epoch <= asked]
    expected = (earlier[-1].epoch, earlier[-1].end_offset) if earlier else (0, 0)
    assert (found.epoch, found.end_offset) == expected


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.data())
def test_truncation_leaves_the_index_of_the_shorter_log(
    epochs: list[int], data: st.DataObject
) -> None:
    log = make_log(epochs)
    keep = data.draw(st.integers(0, len(log)))
    view = LogView(log_of(log), 1 << 20)
    view.truncate(EndOffset(keep))
    expected = LogView(log_of(log[:keep]), 1 << 20)
    assert (view.end_offset, view.last_epoch) == (expected.end_offset, expected.last_epoch)
    for epoch in range(8):
        assert view.end_of_epoch(Epoch(epoch)) == expected.end_of_epoch(Epoch(epoch))


def test_a_write_that_was_cut_does_not_vouch_for_what_replaced_it() -> None:
    view = LogView(LogStart(), 1 << 20)
    view.append([batch(0, 1), batch(1, 1), batch(2, 1)], token=5)
    view.truncate(EndOffset(1))
    view.append([batch(1, 2), batch(2, 2)], token=7)
    view.write_done(5)
    assert view.flushed_end == 1
    view.write_done(7)
    assert view.flushed_end == 3


def test_gaps_and_older_epochs_are_defects() -> None:
    view = LogView(log_of([batch(0, 2)]), 1 << 20)
    with pytest.raises(InvariantError):
        view.append([batch(2, 2)], token=1)
    with pytest.raises(InvariantError):
        view.append([batch(1, 1)], token=1)


def test_reads_give_whole_batches_at_least_one_and_none_for_the_old() -> None:
    log = [batch(index, 1, b"x" * 10) for index in range(10)]
    view = LogView(log_of(log), tail_bytes=4 * log[0].held_bytes)
    assert view.read(EndOffset(3), max_bytes=1) == (log[3],)
    assert view.read(EndOffset(3), max_bytes=25) == (log[3], log[4])
    assert view.read(EndOffset(3), max_bytes=1000, end=EndOffset(5)) == (log[3], log[4])
    assert view.read(EndOffset(10), max_bytes=1000) == ()
    view.trim_tail(EndOffset(9))
    assert view.read(EndOffset(3), max_bytes=1) is None
    assert view.read(EndOffset(9), max_bytes=1) == (log[9],)


def test_uncommitted_batches_stay_in_memory() -> None:
    log = [batch(index, 1, b"x" * 10) for index in range(10)]
    view = LogView(log_of(log), tail_bytes=4 * log[0].held_bytes)
    view.trim_tail(EndOffset(2))
    assert view.read(EndOffset(2), max_bytes=1) == (log[2],)


def memory_of(kept: Batch) -> int:
    parts = (kept, kept.base_offset, kept.size, kept.payloads, *kept.payloads)
    return sum(map(sys.getsizeof, parts))


@pytest.mark.parametrize(("payloads", "size"), [(1, 20), (1, 100), (30, 20), (1, 4_000)])
def test_the_newest_batches_take_the_memory_they_may_and_go_a_few_at_a_time(
    payloads: int, size: int
) -> None:
    """However small they are: the objects of a small commit take several times its bytes."""
    limit, first = 1 << 18, 1 << 32
    view = LogView(LogStart(EndOffset(first), EndOffset(first)), limit)
    taken = latest = 0
    while view.tail_start == first:
        taken += latest
        added = batch(view.end_offset, 1, *(bytes(size) for _ in range(payloads)))
        latest = memory_of(added)
        view.append([added], token=1)
        view.trim_tail(view.end_offset)
    assert limit * 3 // 4 < taken <= limit
    kept = view.read(view.tail_start, max_bytes=limit)
    assert kept is not None
    assert sum(map(memory_of, kept)) > taken * 7 // 8


@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), st.integers(0, 20))
def test_the_committed_end_is_flushed_by_a_majority_and_is_the_highest(
    raw: list[int], start: int
) -> None:
    ends = [EndOffset(value) for value in raw]
    end = voters.reached_by_majority(ends)
    assert sum(value >= end for value in ends) >= voters.majority(len(ends))
    assert sum(value > end for value in ends) < voters.majority(len(ends))
    assert voters.committed_end(ends, EndOffset(start)) == (end if end > start else None)


def cut_by_trim(log: list[Batch], start: int) -> LogView:
    view = LogView(log_of(log), 1 << 20)
    view.trim(EndOffset(start))
    return view


def cut_by_snapshot(log: list[Batch], start: int) -> LogView:
    view = LogView(LogStart(), 1 << 20)
    epoch = log[start - 1].epoch if start else Epoch(0)
    view.restart_at_snapshot(SnapshotId(EndOffset(start), epoch))
    view.append(log[start:], token=1)
    return view


def cut_and_recovered(log: list[Batch], start: int) -> LogView:
    whole = log_of(log)
    kept = LogStart(
        EndOffset(start),
        whole.end_offset,
        tuple(item for item in whole.epoch_starts if item.start_offset >= start),
        tuple(log[start:]),
        start_epoch=log[start - 1].epoch if start else Epoch(0),
    )
    return LogView(kept, 1 << 20)


@pytest.mark.parametrize("cut", [cut_by_trim, cut_by_snapshot, cut_and_recovered])
@given(st.lists(st.integers(1, 6), max_size=12), st.data())
def test_a_log_without_its_beginning_answers_like_the_whole_one(
    cut: Callable[[list[Batch], int], LogView], epochs: list[int], data: st.DataObject
) -> None:
    log = make_log(epochs)
    start = data.draw(st.integers(0, len(log)))
    end = data.draw(st.integers(start, len(log)))
    view, whole = cut(log, start), LogView(log_of(log), 1 << 20)
    view.truncate(EndOffset(end))
    whole.truncate(EndOffset(end))
    assert view.last_epoch == whole.last_epoch
    for offset in range(start, end + 1):
        assert view.epoch_before(EndOffset(offset)) == whole.epoch_before(EndOffset(offset))
    for epoch in range(view.start_epoch, 8):
        assert view.end_of_epoch(Epoch(epoch)) == whole.end_of_epoch(Epoch(epoch))


EPOCH = Epoch(1_005)
START = EndOffset(recovered_log.ERA_OFFSETS)
DISK = voters.ReplicaKey(NodeId(0), DirectoryId("new"))


def recovered() -> Lone:
    """Node 0 as a recovery leaves it: the only voter, its log begins in the second era."""
    log = LogStart(
        start_offset=START,
        end_offset=START,
        start_epoch=EPOCH,
        snapshots=(SnapshotId(START, EPOCH),),
        snapshot_voters=voters.VoterSet((voters.Voter(DISK, "n0:1"),)),
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
    assert recovered_log.is_from_before_recovery(end, own_end) is expected


def test_a_log_goes_on_in_the_era_after_its_own() -> None:
    for end in (0, 1, START - 1, START, START + 5):
        assert recovered_log.era_of(recovered_log.next_era(end)) == recovered_log.era_of(end) + 1
        assert recovered_log.next_era(end) > end


@pytest.mark.parametrize("offset", [1, 70, START - 1])
def test_a_log_of_before_is_not_fed(offset: int) -> None:
    node = recovered()
    node.fetch(voters.ReplicaKey(NodeId(1), DirectoryId("old")), offset, 4)
    answer = node.only(messages.FetchResponse)
    assert answer.header.error is messages.QuorumError.LOG_OF_BEFORE
    assert answer.snapshot_id is None
    assert not answer.batches


def test_an_empty_disk_gets_the_snapshot() -> None:
    node = recovered()
    node.fetch(voters.ReplicaKey(NodeId(1), DirectoryId("fresh")), 0, 0)
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
        header = replace(
            node.header(1, EPOCH + 50), receiver=voters.ReplicaKey(DISK.node_id, directory)
        )
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
