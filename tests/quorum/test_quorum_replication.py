"""Commits of a leader, acceptance by a follower, and the moments at which either reports them."""

import pytest

from streammeta.controller.errors import InvariantError
from streammeta.controller.ids import EndOffset, Epoch, NodeId
from streammeta.controller.quorum import events, messages
from streammeta.controller.quorum.config import QuorumState
from tests.quorum.core_harness import Lone, batch, elected


def established(size: int = 3) -> Lone:
    """A leader whose first batch, of a leader change and the voters, is committed below 2."""
    node = elected(size=size)
    for other in range(1, size // 2 + 1):
        node.fetch(other, 2, 1)
    assert node.core.is_established
    node.pass_time(10)  # the Fetches that acknowledged it are answered
    return node


def test_an_epoch_begins_with_a_control_batch() -> None:
    node = Lone(batches=[batch(0, 1)], state=QuorumState(Epoch(1)))
    node.become_leader()
    (appended,) = node.core.log.read(EndOffset(1), max_bytes=1000) or ()
    assert (appended.kind, appended.epoch, appended.base_offset) == (
        messages.BatchKind.CONTROL,
        2,
        1,
    )
    assert messages.decode_voters(appended) == node.config.bootstrap_voters


def test_batches_of_earlier_epochs_commit_only_with_one_of_the_leaders_own() -> None:
    """Raft, figure 8: a majority holds the old batch, which proves nothing."""
    node = Lone(batches=[batch(0, 1), batch(1, 1)], state=QuorumState(Epoch(1)))
    node.become_leader()
    for offset, last_epoch in ((1, 1), (2, 1)):
        for sender in (1, 2):
            node.fetch(sender, offset, last_epoch)
            assert node.core.high_watermark == 0
    node.fetch(1, 4, 2)
    assert node.core.high_watermark == 4


def test_the_leader_counts_itself_only_up_to_what_it_flushed() -> None:
    node = established()
    node.step(events.Append((b"a", b"b")))
    (append,) = node.effects_of(events.AppendLog)
    node.fetch(1, 4, 1)
    assert node.core.high_watermark == 2
    node.step(events.WriteDone(append.token))
    assert node.core.high_watermark == 4
    assert node.effects_of(events.CommitAdvanced) == [events.CommitAdvanced(EndOffset(4))]


def test_a_single_voter_commits_after_its_flush() -> None:
    node = Lone(size=1)
    assert node.core.high_watermark == 0
    node.flush()
    assert node.core.high_watermark == 2
    node.step(events.Append((b"a",)))
    assert node.core.high_watermark == 2
    node.flush()
    assert node.core.high_watermark == 3


@pytest.mark.parametrize(
    ("offset", "last_epoch", "diverging"),
    [
        (0, 0, None),
        (2, 1, None),
        (1, 1, None),
        (4, 3, None),
        (3, 1, messages.EpochEnd(Epoch(1), EndOffset(2))),
        (3, 2, messages.EpochEnd(Epoch(1), EndOffset(2))),
        (9, 3, messages.EpochEnd(Epoch(3), EndOffset(4))),
        (5, 0, messages.EpochEnd(Epoch(0), EndOffset(0))),
    ],
)
def test_a_fetch_is_credited_only_where_the_logs_agree(
    offset: int, last_epoch: int, diverging: messages.EpochEnd | None
) -> None:
    log = [batch(0, 1), batch(1, 1), batch(2, 3), batch(3, 3)]
    node = Lone(batches=log, state=QuorumState(Epoch(3)))
    node.become_leader()
    node.fetch(1, offset, last_epoch)
    response = node.only(messages.FetchResponse)
    assert response.diverging == diverging
    assert bool(response.batches) is (diverging is None)
    described = node.core.role.progress[node.core.voters.voters[1].key]  # type: ignore[union-attr]
    assert described.end_offset == (offset if diverging is None else 0)


def test_a_parked_fetch_is_answered_by_an_append_before_the_flush() -> None:
    node = established()
    node.fetch(1, 2, 1, hw=2)
    assert not node.sent(messages.FetchResponse)
    node.step(events.Append((b"a",)))
    assert node.only(messages.FetchResponse).batches[0].payloads == (b"a",)


def test_a_parked_fetch_is_answered_at_its_time_and_for_a_new_high_watermark() -> None:
    node = established()
    node.fetch(1, 2, 1, hw=2)
    node.pass_time(499)
    assert not node.sent(messages.FetchResponse)
    node.pass_time(1)
    assert node.only(messages.FetchResponse).batches == ()
    node.fetch(2, 2, 1, hw=0)
    node.pass_time(node.config.timings.high_watermark_linger_ms - 1)
    assert not node.sent(messages.FetchResponse)
    node.pass_time(1)
    assert node.only(messages.FetchResponse).high_watermark == 2


def test_parked_fetches_are_refused_when_leadership_ends() -> None:
    node = established()
    node.fetch(1, 2, 1, hw=2)
    node.step(events.Resign())
    assert node.only(messages.FetchResponse).header.error is messages.QuorumError.NOT_LEADER


def test_a_fetch_of_another_epoch_is_refused_and_not_adopted() -> None:
    node = established()
    for epoch, error in (
        (0, messages.QuorumError.FENCED_LEADER_EPOCH),
        (9, messages.QuorumError.UNKNOWN_LEADER_EPOCH),
    ):
        node.fetch(1, 0, 0, epoch=epoch)
        assert node.only(messages.FetchResponse).header.error is error
    assert (node.role, node.core.epoch) == ("Leader", 1)


# -- followers


def following() -> tuple[Lone, messages.FetchRequest]:
    node = Lone()
    return node, node.follow(1, 4)


def waits_for(node: Lone) -> tuple[messages.FetchRequest, int]:
    """The Fetch of the last step, and the write that must be durable before it leaves."""
    (send,) = [
        send
        for send in node.effects_of(events.Send)
        if isinstance(send.message, messages.FetchRequest)
    ]
    assert isinstance(send.message, messages.FetchRequest)
    return send.message, send.after


def test_the_next_fetch_waits_until_what_it_acknowledges_is_flushed() -> None:
    node, request = following()
    node.feed(request, batch(0, 2, b"a"), batch(1, 4, b"b"), hw=1)
    (append,) = node.effects_of(events.AppendLog)
    fetch, after = waits_for(node)
    assert (fetch.fetch_offset, fetch.last_epoch, after) == (2, 4, append.token)
    assert node.core.high_watermark == 1


@pytest.mark.parametrize("before", [0, 3])
def test_a_fetch_that_carries_a_new_round_waits_for_the_flush_too(before: int) -> None:
    """It proves leadership and acknowledges the log below it, in one: the latter must be true."""
    node, request = following()
    if before:
        node.feed(request, read_round=before)
        request = node.only(messages.FetchRequest)
    node.feed(request, batch(0, 4, b"a"), read_round=before + 1)
    (append,) = node.effects_of(events.AppendLog)
    fetch, after = waits_for(node)
    assert (fetch.fetch_offset, fetch.read_round) == (1, before + 1)
    assert after == append.token


def test_a_fetch_that_carries_a_new_round_waits_for_what_it_cuts_off() -> None:
    log = [batch(0, 1), batch(1, 1), batch(2, 3)]
    node = Lone(batches=log, state=QuorumState(Epoch(3)))
    node.feed(node.follow(1, 4), diverging=messages.EpochEnd(Epoch(1), EndOffset(2)), read_round=2)
    (cut,) = node.effects_of(events.TruncateLog)
    fetch, after = waits_for(node)
    assert (fetch.fetch_offset, fetch.read_round, after) == (2, 2, cut.token)


def test_no_fetch_proves_leadership_before_its_epoch_is_durable() -> None:
    """After a restart the replica could follow, and vote for, the leader of an earlier epoch."""
    node = Lone()
    node.begin(1, 4)
    (state,) = node.effects_of(events.PersistQuorumState)
    assert waits_for(node)[1] == state.token
    node.step(events.DiskFull(is_full=True))
    request, after = waits_for(node)
    assert (request.is_disk_full, after) == (True, state.token)
    node.feed(request, read_round=1)
    request, after = waits_for(node)
    assert (request.read_round, after) == (1, state.token)


def test_a_fetch_answer_counts_once() -> None:
    node, request = following()
    node.feed(request, batch(0, 4, b"a"))
    node.feed(request, batch(0, 4, b"a"))
    assert not node.effects
    assert node.core.log.end_offset == 1


@pytest.mark.parametrize(
    "batches",
    [[batch(1, 4)], [batch(0, 5)], [batch(0, 4), batch(2, 4)], [batch(0, 4), batch(1, 3)]],
)
def test_batches_that_do_not_continue_the_log_are_not_taken(batches: list[object]) -> None:
    node, request = following()
    node.feed(request, *batches)  # type: ignore[arg-type]
    assert node.core.log.end_offset == 0
    assert not node.effects_of(events.AppendLog)


@pytest.mark.parametrize(
    ("theirs", "cut"),
    [
        (messages.EpochEnd(Epoch(1), EndOffset(2)), 2),
        (messages.EpochEnd(Epoch(1), EndOffset(1)), 1),
        (messages.EpochEnd(Epoch(2), EndOffset(9)), 2),
        (messages.EpochEnd(Epoch(3), EndOffset(3)), 3),
        (messages.EpochEnd(Epoch(0), EndOffset(0)), 0),
    ],
)
def test_a_diverging_log_is_cut_where_both_may_agree(theirs: messages.EpochEnd, cut: int) -> None:
    log = [batch(0, 1), batch(1, 1), batch(2, 3), batch(3, 3)]
    node = Lone(batches=log, state=QuorumState(Epoch(3)))
    node.feed(node.follow(1, 4), diverging=theirs)
    assert [effect.end_offset for effect in node.effects_of(events.TruncateLog)] == [cut]
    assert node.only(messages.FetchRequest).fetch_offset == cut


def test_committed_batches_are_never_cut() -> None:
    node, request = following()
    node.feed(request, batch(0, 4), batch(1, 4), hw=2)
    with pytest.raises(InvariantError, match="committed"):
        node.feed(
            node.only(messages.FetchRequest), diverging=messages.EpochEnd(Epoch(4), EndOffset(1))
        )


def test_the_high_watermark_never_falls_nor_passes_the_log() -> None:
    node, request = following()
    node.feed(request, batch(0, 4), hw=50)
    assert node.core.high_watermark == 1
    node.feed(node.only(messages.FetchRequest), hw=0)
    assert node.core.high_watermark == 1


# -- reads


def test_a_read_waits_for_a_round_that_began_after_it() -> None:
    """A Fetch that was under way when the read arrived proves nothing."""
    node = established()
    node.fetch(1, 2, 1, hw=2)
    node.step(events.ReadIndexRequested(7))
    assert not node.effects_of(events.ReadIndexReady)
    round_sent = node.only(messages.FetchResponse).read_round
    node.fetch(2, 2, 1, hw=2, read_round=round_sent - 1)
    assert not node.effects_of(events.ReadIndexReady)
    node.fetch(1, 2, 1, hw=2, read_round=round_sent)
    assert node.effects_of(events.ReadIndexReady) == [events.ReadIndexReady(7, EndOffset(2))]


def ready(node: Lone) -> list[int]:
    """The reads that the last step let go on."""
    return [item.read_id for item in node.effects_of(events.ReadIndexReady)]


@pytest.mark.parametrize("size", [3, 4, 5])
@pytest.mark.parametrize("pause", [0, 1, 5, 49, 499, 1499])
def test_a_young_leader_proves_its_leadership_like_any_other(size: int, pause: int) -> None:
    """The Fetches that commit its first batch were sent before the read; it may be deposed now."""
    node = elected(size=size)
    others = range(1, size // 2 + 1)
    for other in others:
        assert not node.core.is_established
        node.fetch(other, 2, 1, read_round=5)  # a round that this leader has not begun
    assert node.core.is_established
    node.now += pause
    for read_id in (7, 8):
        node.step(events.ReadIndexRequested(read_id))
        assert not ready(node)
    for other in others:
        node.fetch(other, 2, 1, hw=2, read_round=0)  # sent before
        assert not ready(node)
    for other in others[:-1]:
        node.fetch(other, 2, 1, hw=2, read_round=2)
        assert not ready(node)
    node.fetch(others[-1], 2, 1, hw=2, read_round=1)
    assert ready(node) == [7]
    node.fetch(others[-1], 2, 1, hw=2, read_round=2)
    assert ready(node) == [8]


def test_a_read_index_is_that_of_its_round_whatever_is_committed_since() -> None:
    node = established()
    node.step(events.ReadIndexRequested(7))
    node.write(b"x")
    node.fetch(2, 3, 1)
    assert (node.core.high_watermark, ready(node)) == (3, [])
    node.fetch(1, 3, 1, read_round=1)
    assert node.effects_of(events.ReadIndexReady) == [events.ReadIndexReady(7, EndOffset(2))]


def test_the_rounds_of_an_earlier_leadership_prove_nothing() -> None:
    node = established()
    for _ in range(3):
        node.step(events.ReadIndexRequested(1))
    node.fetch(1, 2, 1, read_round=3)
    node.step(events.Resign())
    node.pass_time(5000)
    node.flush()
    node.become_leader()
    node.fetch(1, 3, node.core.epoch)
    assert node.core.is_established
    node.step(events.ReadIndexRequested(7))
    assert not ready(node)
    node.fetch(1, 3, node.core.epoch, read_round=1)
    assert ready(node) == [7]


def test_a_read_is_refused_before_the_leader_has_committed_in_its_epoch() -> None:
    node = elected()
    node.step(events.ReadIndexRequested(7))
    assert node.effects_of(events.ReadIndexRejected) == [events.ReadIndexRejected(7)]


def test_waiting_reads_are_refused_when_leadership_ends() -> None:
    node = established()
    node.step(events.ReadIndexRequested(7))
    node.ask_vote(1, 9, 8, 100)
    assert node.effects_of(events.ReadIndexRejected) == [events.ReadIndexRejected(7)]


def test_fetching_followers_need_no_heartbeat() -> None:
    node = established()
    node.fetch_each(2, 1, hw=2)
    for _ in range(3):
        node.pass_time(400)
        node.fetch_each(2, 1, hw=2)
    assert node.core.role.progress[node.core.voters.voters[1].key].has_fetched  # type: ignore[union-attr]
    assert node.core.leader_id == NodeId(0)
