"""A leader without room hands over where another can commit; else it stays, for the reads."""

from streammeta.controller.ids import NodeId
from streammeta.controller.quorum import events
from streammeta.controller.quorum.messages import EndQuorumEpochRequest, FetchRequest, FetchResponse
from tests.quorum.core_harness import Lone, batch, elected


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
