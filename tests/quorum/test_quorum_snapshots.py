"""A log that was cut at its beginning is as good as the whole one, and damage is never voted on."""

from dataclasses import replace
from typing import Any

import pytest

from streammeta.controller.errors import InvariantError
from streammeta.controller.ids import DirectoryId, EndOffset, Epoch, NodeId, SnapshotId
from streammeta.controller.quorum import events, messages
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.log_view import LogStart, LostEntries
from tests.quorum.core_harness import Lone, batch, log_of, voter_set
from tests.quorum.test_quorum_replication import established

DIGEST = b"d" * 32


def snapshot(end: int, epoch: int) -> SnapshotId:
    return SnapshotId(EndOffset(end), Epoch(epoch))


def trimmed_leader() -> Lone:
    """Leads epoch 1; its log begins at 4, where the older of two snapshots ends; committed is 8."""
    node = established()
    for end in (4, 6, 8):
        node.write(b"x", b"y")
        node.fetch_each(end, 1, hw=end)
        if end < 8:
            node.step(events.SnapshotTaken(snapshot(end, 1)))
    return node


# -- taking them


def test_the_log_begins_at_the_older_of_two_snapshots() -> None:
    node = established()
    node.write(b"x", b"y")
    node.fetch(1, 4, 1)
    node.step(events.SnapshotTaken(snapshot(2, 1)))
    assert not node.effects_of(events.TrimLog)
    node.step(events.SnapshotTaken(snapshot(4, 1)))
    (trim,) = node.effects_of(events.TrimLog)
    assert (trim.start_offset, node.core.log.start_offset) == (2, 2)
    assert node.core.newest_snapshot == snapshot(4, 1)


@pytest.mark.parametrize("wrong", [snapshot(3, 1), snapshot(2, 2), snapshot(2, 0)])
def test_a_snapshot_of_what_is_not_committed_stops_the_process(wrong: SnapshotId) -> None:
    node = established()
    node.step(events.Append((b"x",)))
    with pytest.raises(InvariantError):
        node.step(events.SnapshotTaken(wrong))


def test_an_older_snapshot_than_known_changes_nothing() -> None:
    node = trimmed_leader()
    node.step(events.SnapshotTaken(snapshot(2, 1)))
    assert not node.effects
    assert node.core.log.start_offset == 4


def test_a_restart_knows_everything_in_the_newest_snapshot_as_committed() -> None:
    log = LogStart(
        EndOffset(4),
        EndOffset(4),
        start_epoch=Epoch(3),
        snapshots=(snapshot(4, 3),),
        snapshot_voters=voter_set(0, 1),
    )
    node = Lone(log=log, state=QuorumState(Epoch(3)))
    assert (node.core.high_watermark, node.core.log.last_epoch) == (4, 3)
    assert node.core.voters == voter_set(0, 1)
    assert not node.ask_vote(1, 4, 2, 99)
    assert node.ask_vote(1, 4, 3, 4)


# -- serving them


@pytest.mark.parametrize(
    ("offset", "last_epoch", "needs"),
    [
        (0, 0, True),
        (2, 1, True),
        (3, 1, True),
        (4, 1, False),
        (4, 0, True),
        (6, 1, False),
        (8, 1, False),
        (6, 0, True),
    ],
)
def test_a_fetch_below_the_log_gets_the_newest_snapshot(
    offset: int, last_epoch: int, needs: bool
) -> None:
    node = trimmed_leader()
    node.fetch(1, offset, last_epoch)
    sent = node.sent(messages.FetchResponse)
    if not needs:
        assert all(response.snapshot_id is None for response in sent)
        return
    assert sent[-1].snapshot_id == snapshot(6, 1)
    assert not sent[-1].batches


def ask_chunk(node: Lone, position: int, answered_request_id: int = 0) -> None:
    """Ask for ten bytes of the newest snapshot as node 1."""
    node.receive(
        messages.FetchSnapshotRequest(
            header=node.header(1, 1),
            snapshot_id=snapshot(6, 1),
            position=position,
            max_bytes=10,
            answered_request_id=answered_request_id,
        )
    )


def test_a_fetch_that_gets_a_snapshot_acknowledges_nothing_but_life() -> None:
    node = trimmed_leader()
    before = node.core.high_watermark
    node.fetch(1, 0, 0)
    node.write(b"x")
    assert node.core.high_watermark == before
    for position in range(10):
        node.pass_time(500)
        ask_chunk(node, position, answered_request_id=1000 + position)
    assert node.role == "Leader"


def test_chunks_are_read_and_sent() -> None:
    node = trimmed_leader()
    ask_chunk(node, 5)
    (read,) = node.effects_of(events.ReadSnapshot)
    assert (read.snapshot_id, read.position, read.max_bytes) == (snapshot(6, 1), 5, 10)
    node.step(events.SnapshotReadDone(read.read_id, events.SnapshotChunk(20, b"bytes", DIGEST)))
    answer = node.only(messages.FetchSnapshotResponse)
    assert (answer.position, answer.data, answer.total_bytes) == (5, b"bytes", 20)


@pytest.mark.parametrize(
    ("position", "chunk", "error"),
    [
        (0, None, messages.QuorumError.SNAPSHOT_NOT_FOUND),
        (20, events.SnapshotChunk(20, b"", DIGEST), messages.QuorumError.POSITION_OUT_OF_RANGE),
        (-1, None, messages.QuorumError.POSITION_OUT_OF_RANGE),
    ],
)
def test_chunks_that_do_not_exist(
    position: int, chunk: events.SnapshotChunk | None, error: messages.QuorumError
) -> None:
    node = trimmed_leader()
    ask_chunk(node, position)
    for read in node.effects_of(events.ReadSnapshot):
        node.step(events.SnapshotReadDone(read.read_id, chunk))
    assert node.only(messages.FetchSnapshotResponse).header.error is error


# -- downloading them


def begun() -> tuple[Lone, messages.FetchSnapshotRequest]:
    """A follower of node 1 in epoch 4 that was told to fetch the snapshot that ends at 6."""
    node = Lone(batches=[batch(0, 1), batch(1, 1)], state=QuorumState(Epoch(1)))
    node.feed(node.follow(1, 4), snapshot_id=snapshot(6, 3))
    return node, node.only(messages.FetchSnapshotRequest)


def chunk_for(
    node: Lone,
    request: messages.FetchSnapshotRequest,
    data: bytes,
    *,
    total: int = 8,
    digest: bytes = DIGEST,
    error: messages.QuorumError = messages.QuorumError.NONE,
) -> None:
    node.receive(
        messages.FetchSnapshotResponse(
            header=node.reply(request, leader=1, error=error),
            snapshot_id=request.snapshot_id,
            total_bytes=total,
            position=request.position,
            data=data,
            file_digest=digest,
        )
    )


def test_a_snapshot_is_downloaded_chunk_by_chunk_then_installed_then_fetching_goes_on() -> None:
    node, request = begun()
    assert request.position == 0
    chunk_for(node, request, b"01234")
    assert node.effects_of(events.WriteSnapshotChunk) == [
        events.WriteSnapshotChunk(snapshot(6, 3), 0, b"01234")
    ]
    request = node.only(messages.FetchSnapshotRequest)
    assert request.position == 5
    chunk_for(node, request, b"567")
    (install,) = node.effects_of(events.InstallSnapshot)
    assert (install.total_bytes, install.digest) == (8, DIGEST)
    node.pass_time(10_000)
    assert not node.effects
    node.flush()
    node.step(events.SnapshotInstalled(snapshot(6, 3), voter_set(0, 1, 2, 3)))
    assert node.effects_of(events.CommitAdvanced) == [events.CommitAdvanced(EndOffset(6))]
    assert (node.core.log.start_offset, node.core.log.end_offset) == (6, 6)
    assert node.core.voters == voter_set(0, 1, 2, 3)
    fetch = node.only(messages.FetchRequest)
    assert (fetch.fetch_offset, fetch.last_epoch) == (6, 3)
    node.feed(fetch, batch(6, 4), hw=7)
    assert node.core.high_watermark == 7


def test_each_chunk_keeps_the_follower_from_campaigning() -> None:
    node, request = begun()
    for _ in range(7):
        node.now += 1500
        chunk_for(node, request, b"x")
        request = node.only(messages.FetchSnapshotRequest)
    assert node.role == "Follower"
    assert not node.sent(messages.VoteRequest)


@pytest.mark.parametrize(
    ("data", "other"),
    [
        (b"", {}),
        (b"x", {"total": 9}),
        (b"x", {"digest": b"other" * 6}),
        (b"x" * 9, {}),
        (b"", {"total": 0, "digest": b"", "error": messages.QuorumError.SNAPSHOT_NOT_FOUND}),
    ],
)
def test_a_chunk_of_another_file_begins_everything_anew(data: bytes, other: Any) -> None:
    node, request = begun()
    chunk_for(node, request, b"01")
    chunk_for(node, node.only(messages.FetchSnapshotRequest), data, **other)
    assert not node.effects_of(events.WriteSnapshotChunk)
    node.pass_time(node.config.timings.retry_backoff_ms)
    assert node.only(messages.FetchRequest).fetch_offset == 2


def test_a_chunk_that_does_not_come_in_time_is_asked_for_in_smaller_pieces() -> None:
    node, request = begun()
    asked = [request.max_bytes]
    for _ in range(3):
        node.begin(1, node.core.epoch + 1)  # another epoch begins before the chunk is here
        node.feed(node.only(messages.FetchRequest), snapshot_id=snapshot(6, 3))
        asked.append(node.only(messages.FetchSnapshotRequest).max_bytes)
    whole = node.config.limits.snapshot_chunk_bytes
    assert asked == [whole, whole // 2, whole // 4, whole // 8]
    chunk_for(node, node.only(messages.FetchSnapshotRequest), b"0123")
    assert node.only(messages.FetchSnapshotRequest).max_bytes == whole // 8


def test_another_leaders_file_is_never_continued() -> None:
    node, request = begun()
    chunk_for(node, request, b"01234")
    late = node.only(messages.FetchSnapshotRequest)
    node.begin(2, 5)
    chunk_for(node, late, b"567")
    assert not node.effects_of(events.WriteSnapshotChunk)
    node.begin(2, 5)
    node.pass_time(2000)
    assert not node.effects_of(events.InstallSnapshot)


def test_a_file_that_is_refused_changes_nothing() -> None:
    node, request = begun()
    chunk_for(node, request, b"01234567")
    node.step(events.SnapshotInstalled(snapshot(6, 3), None))
    assert (node.core.log.start_offset, node.core.log.end_offset) == (0, 2)
    node.pass_time(node.config.timings.retry_backoff_ms)
    assert node.only(messages.FetchRequest).fetch_offset == 2


def test_nothing_is_written_and_nobody_campaigns_while_a_snapshot_is_installed() -> None:
    node, request = begun()
    chunk_for(node, request, b"01234567")
    node.ask_vote(2, 9, 8, 99)
    node.pass_time(60_000)
    assert not node.sent(messages.VoteRequest)
    assert not node.sent(messages.FetchRequest)
    assert node.core.next_deadline() is None
    node.step(events.SnapshotInstalled(snapshot(6, 3), voter_set(0, 1, 2)))
    assert node.sent(messages.VoteRequest)


def test_a_snapshot_of_what_is_committed_here_stops_the_process() -> None:
    node = Lone()
    node.feed(node.follow(1, 4), batch(0, 4), batch(1, 4), hw=2)
    node.flush()
    with pytest.raises(InvariantError, match="committed"):
        node.feed(node.only(messages.FetchRequest), snapshot_id=snapshot(2, 4))


def test_with_a_full_disk_nothing_is_downloaded() -> None:
    """What is flushed may end below the leader's log, and what is committed beyond its snapshot."""
    node = Lone()
    node.feed(node.follow(1, 4), batch(0, 4), batch(1, 4), hw=2)
    node.step(events.DiskFull(is_full=True))
    request = node.only(messages.FetchRequest)
    assert (request.fetch_offset, request.is_disk_full) == (0, True)
    node.feed(request, snapshot_id=snapshot(2, 4), hw=2)
    node.pass_time(node.config.timings.fetch_max_wait_ms)
    assert not node.sent(messages.FetchSnapshotRequest)
    assert node.only(messages.FetchRequest).is_disk_full
    node.step(events.DiskFull(is_full=False))
    node.flush()
    assert node.only(messages.FetchRequest).fetch_offset == 2


def test_with_a_full_disk_a_log_that_was_not_compared_is_not_committed() -> None:
    """The leader's log begins behind what is flushed here, which may be of another history."""
    node = Lone()
    node.feed(node.follow(1, 4), batch(0, 4), batch(1, 4), hw=1)
    node.flush()
    node.begin(2, 5)
    node.step(events.DiskFull(is_full=True))
    request = node.only(messages.FetchRequest)
    assert (request.fetch_offset, node.core.high_watermark) == (2, 1)
    node.feed(request, snapshot_id=snapshot(4, 5), hw=6)
    assert node.core.high_watermark == 1


# -- damage


def damaged(promised: int = 4, epoch: int = 3) -> Lone:
    """A voter whose log was cut to 2; it had acknowledged more."""
    log = replace(
        log_of([batch(0, 1), batch(1, 1)]), lost=LostEntries(EndOffset(promised), Epoch(epoch))
    )
    return Lone(log=log, state=QuorumState(Epoch(epoch)))


def test_a_damaged_replica_neither_votes_nor_campaigns_but_asks_for_the_leader() -> None:
    node = damaged()
    asked = len(node.sent(messages.FetchRequest))
    for _ in range(20):
        node.pass_time(1000)
        asked += len(node.sent(messages.FetchRequest))
        assert not node.sent(messages.VoteRequest)
    assert asked > 5
    assert not node.ask_vote(1, 9, 8, 99)
    assert not node.ask_vote(2, 9, 8, 99, pre_vote=True)
    assert node.core.epoch == 9


def test_a_damaged_leader_steps_aside() -> None:
    log = replace(log_of([batch(0, 1)]), lost=LostEntries(EndOffset(4), Epoch(1)))
    node = Lone(log=log, state=QuorumState(Epoch(1), leader_id=NodeId(0)))
    for _ in range(10):
        node.pass_time(1000)
        node.flush()
        assert not node.sent(messages.VoteRequest)
    assert node.role == "Unattached"


def test_it_votes_again_once_what_it_promised_in_this_epoch_is_back() -> None:
    node = damaged(promised=4, epoch=3)
    node.feed(node.follow(1, 3), batch(2, 3), hw=3)
    node.flush()
    node.feed(node.only(messages.FetchRequest), hw=3)
    assert node.core.is_repairing
    node.feed(node.only(messages.FetchRequest), batch(3, 3), hw=4)
    assert node.core.is_repairing  # not flushed yet
    node.flush()
    node.feed(node.only(messages.FetchRequest), hw=4)
    assert node.effects_of(events.ClearDamage)
    assert not node.core.is_repairing
    assert node.ask_vote(2, 9, 8, 99)


def test_it_votes_again_once_all_that_was_committed_before_a_later_epoch_is_back() -> None:
    node = damaged(promised=40, epoch=3)
    node.feed(node.follow(1, 5), batch(2, 4), hw=2)
    node.flush()
    node.feed(node.only(messages.FetchRequest), batch(3, 5), hw=3)
    node.flush()
    node.feed(node.only(messages.FetchRequest), hw=3)
    assert node.core.is_repairing  # the leader has committed nothing of its epoch
    node.feed(node.only(messages.FetchRequest), hw=4)
    assert not node.core.is_repairing


def test_a_snapshot_repairs_too() -> None:
    node = damaged(promised=4, epoch=3)
    node.feed(node.follow(1, 5), snapshot_id=snapshot(9, 5))
    chunk_for(node, node.only(messages.FetchSnapshotRequest), b"01234567")
    node.step(events.SnapshotInstalled(snapshot(9, 5), voter_set(0, 1, 2)))
    node.feed(node.only(messages.FetchRequest), hw=9)
    assert not node.core.is_repairing


def test_the_log_cannot_be_cut_below_an_installed_snapshot() -> None:
    node, request = begun()
    chunk_for(node, request, b"01234567")
    node.step(events.SnapshotInstalled(snapshot(6, 3), voter_set(0, 1, 2)))
    with pytest.raises(InvariantError, match="committed"):
        node.feed(
            node.only(messages.FetchRequest), diverging=messages.EpochEnd(Epoch(2), EndOffset(5))
        )
    assert not node.effects_of(events.TruncateLog)


def test_a_directory_that_joined_has_no_voters_before_it_fetched() -> None:
    node = Lone(size=0, local=replace(voter_set(7).voters[0].key, directory_id=DirectoryId("d")))
    assert len(node.core.voters) == 0
    assert not node.core.is_voter
