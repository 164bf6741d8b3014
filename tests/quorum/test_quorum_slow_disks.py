"""Disks of which every sync takes seconds leave a leader and service, and nothing behind them."""

import random

import pytest

from streammeta.controller.ids import EndOffset, NodeId
from streammeta.controller.quorum import events, messages
from tests.quorum.core_harness import Lone, batch
from tests.quorum.slow_cluster import SlowCluster

SYNCS_OF_AN_ELECTION = 30
"""Syncs, one after the other, within which disks that are slow elect a leader that commits."""


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("fsync_ms", [300, 1000, 2000, 5000])
def test_a_leader_is_elected_and_stays_however_slow_the_disks_are(fsync_ms: int, size: int) -> None:
    for seed in range(4):
        rng = random.Random(seed)
        slow = rng.sample(range(size), rng.choice([size, size, rng.randrange(1, size + 1)]))
        cluster = SlowCluster(seed, size)
        cluster.starve(fsync_ms, *slow)
        cluster.start()
        assert cluster.commit(SYNCS_OF_AN_ELECTION * fsync_ms + 5000), (seed, slow)

        ended = len(cluster.ended)
        for _ in range(3):
            assert cluster.commit(6 * fsync_ms + 1000), (seed, slow)
        cluster.run(60_000)
        assert cluster.ended[ended:] == [], f"seed {seed}, slow are {slow}"

        assert cluster.leader is not None
        cluster.kill(cluster.leader)
        assert cluster.commit(SYNCS_OF_AN_ELECTION * fsync_ms + 5000), (seed, slow)


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("had_leader", [True, False])
def test_service_is_back_within_5_s_of_the_end_of_a_starvation(
    size: int, *, had_leader: bool
) -> None:
    for seed in range(10):
        rng = random.Random(seed)
        cluster = SlowCluster(seed, size)
        if not had_leader:
            cluster.starve(5000)
        cluster.start()
        if had_leader:
            assert cluster.commit(5000)
            cluster.starve(5000)
        cluster.commit(rng.randrange(1000, 60_000))
        cluster.run(rng.randrange(60_000))
        cluster.heal()
        assert cluster.commit(5000), f"seed {seed}"


def test_nothing_of_a_starvation_slows_later_failovers() -> None:
    took = []
    for seed in range(15):
        cluster = SlowCluster(seed)
        cluster.starve(5000)
        cluster.start()
        cluster.run(90_000)
        cluster.heal()
        assert cluster.commit(5000)
        cluster.run(3000)
        assert cluster.all_follow()
        assert cluster.leader is not None
        cluster.kill(cluster.leader)
        began = cluster.now
        assert cluster.commit(5000)
        took.append(cluster.now - began)
    assert sorted(took)[len(took) // 2] <= 60
    assert max(took) <= 200


def test_a_healthy_leader_with_one_slow_follower_serves_at_its_own_pace() -> None:
    cluster = SlowCluster(1)
    cluster.start()
    assert cluster.commit(5000)
    leader = cluster.leader
    assert leader is not None
    cluster.starve(5000, (leader.node_id + 1) % 3)
    for _ in range(20):
        assert cluster.commit(100)
    cluster.run(60_000)
    assert cluster.leader is leader


# -- the rules one by one


def slow_follower() -> Lone:
    """A follower of node 1 in epoch 4 whose disk is busy with a batch."""
    node = Lone()
    node.feed(node.follow(1, 4), batch(0, 4))
    return node


def test_a_fetch_that_waits_for_the_disk_gives_way_to_signs_of_life() -> None:
    node = slow_follower()
    assert node.only(messages.FetchRequest).fetch_offset == 1
    node.pass_time(node.config.timings.fetch_max_wait_ms + 1)
    sign = node.only(messages.FetchRequest)
    assert (sign.fetch_offset, sign.max_bytes, sign.is_disk_full) == (0, 0, False)
    (effect,) = node.effects_of(events.Send)
    assert not effect.vouches_for_log, "it acknowledges nothing that is not flushed"
    node.flush()
    assert node.only(messages.FetchRequest).fetch_offset == 1


def test_signs_of_life_keep_the_leader_from_being_given_up() -> None:
    node = slow_follower()
    node.pass_time(node.config.timings.fetch_max_wait_ms + 1)
    for _ in range(20):
        sign = node.only(messages.FetchRequest)
        node.now += node.config.timings.fetch_max_wait_ms
        node.feed(sign, hw=1)
    assert node.role == "Follower"
    node.pass_time(2 * node.config.timings.fetch_timeout_ms)
    assert node.role == "Prospective", "one that no longer answers is"


def test_the_answer_to_a_sign_of_life_commits_nothing_beyond_the_flushed_end() -> None:
    """The leader has not compared the logs any further."""
    node = slow_follower()
    node.pass_time(node.config.timings.fetch_max_wait_ms + 1)
    node.feed(node.only(messages.FetchRequest), batch(0, 4), hw=1)
    assert node.core.high_watermark == 0
    assert node.core.log.end_offset == 1, "what an older leader sends all the same is not taken"


def test_a_leader_sends_no_batches_to_a_sign_of_life_and_counts_it() -> None:
    node = Lone()
    node.become_leader()
    node.fetch(1, 0, 0, max_bytes=0)
    node.pass_time(node.config.timings.fetch_max_wait_ms)
    assert node.only(messages.FetchResponse).batches == ()
    for _ in range(10):
        node.fetch(1, 0, 0, max_bytes=0)
        node.pass_time(node.config.timings.check_quorum_ms - 1)
        assert node.role == "Leader"
    node.pass_time(1)
    assert node.role == "Resigned"


def test_limits_wait_for_the_write_of_the_own_state() -> None:
    node = Lone()
    node.writes_states = False
    node.pass_time(5000)
    for request in node.sent(messages.VoteRequest)[:1]:
        node.grant(request)
    assert node.role == "Candidate"
    node.pass_time(60_000)
    assert node.role == "Candidate", "its votes have not even left"
    assert node.core.next_deadline() is None
    node.flush()
    assert node.role == "Candidate"
    deadline = node.core.next_deadline()
    assert deadline is not None
    assert deadline > node.now, "the limit counts from there"
    node.pass_time(2 * node.config.timings.election_timeout_ms)
    assert node.role == "Prospective"


def test_a_leader_whose_state_is_being_written_does_not_wake_in_vain() -> None:
    node = Lone()
    node.writes_states = False
    node.pass_time(5000)
    for _ in range(2):
        node.grant(node.sent(messages.VoteRequest)[0])
    node.pass_time(60_000)
    assert node.role == "Leader"
    deadline = node.core.next_deadline()
    assert deadline is not None
    assert deadline > node.now


def test_a_candidate_asks_again_in_its_epoch_for_votes_that_came_too_late() -> None:
    node = Lone()
    node.pass_time(5000)
    node.grant(node.sent(messages.VoteRequest)[0])
    epoch = node.core.epoch
    for _ in range(3):
        node.pass_time(5000)
        while node.role != "Candidate":
            requests = node.sent(messages.VoteRequest)
            node.grant(requests[0]) if requests else node.pass_time(2000)
        assert node.core.epoch == epoch
    node.grant(node.sent(messages.VoteRequest)[0])
    assert (node.role, node.core.epoch) == ("Leader", epoch)


def test_a_refused_candidate_asks_again_once_and_then_opens_another_epoch() -> None:
    """A split vote with a voter that never answers must not last."""
    node = Lone()
    node.pass_time(5000)
    node.grant(node.sent(messages.VoteRequest)[0])
    epochs = [node.core.epoch]
    while len(epochs) < 3:
        node.grant(node.sent(messages.VoteRequest)[0], granted=False)
        node.pass_time(2000)
        while node.role != "Candidate":
            requests = node.sent(messages.VoteRequest)
            node.grant(requests[0]) if requests else node.pass_time(2000)
        epochs.append(node.core.epoch)
    assert epochs == [1, 1, 2]


@pytest.mark.parametrize("is_for_another", [True, False])
def test_a_voter_waits_for_writes_of_its_own_before_it_competes(*, is_for_another: bool) -> None:
    """A leader needs as many, on a disk that may be as slow."""
    node = Lone()
    node.writes_states = False
    node.ask_vote(1, 1, 0 if is_for_another else -1, 0)
    node.flush()
    node.pass_time(5000)
    writes = 0
    while node.effects_of(events.PersistQuorumState):
        assert node.role == "Unattached"
        writes += 1
        node.pass_time(60_000)
        assert node.role == "Unattached"
        node.flush()
        if node.role == "Prospective":
            break
    assert (writes, node.role) == ((2, "Prospective") if is_for_another else (0, "Prospective"))


def test_a_vote_that_is_being_written_is_not_undercut_by_a_pre_vote() -> None:
    node = Lone()
    node.writes_states = False
    assert node.ask_vote(1, 1, 0, 0)
    assert not node.ask_vote(2, 1, 0, 0, pre_vote=True)
    assert node.ask_vote(1, 1, 0, 0, pre_vote=True)
    node.step(events.WriteDone(99))
    assert node.ask_vote(2, 1, 0, 0, pre_vote=True)


def test_time_that_a_process_lost_deposes_nobody() -> None:
    """Neither a leader that was stopped nor one whose follower was: both first hear each other."""
    leader = Lone()
    leader.become_leader()
    leader.now += 60_000
    leader.step(events.TimeLost(60_000))
    leader.step(events.Tick())
    assert leader.role == "Leader"
    leader.pass_time(leader.config.timings.check_quorum_ms)
    assert leader.role == "Resigned"

    follower = Lone()
    follower.feed(follower.follow(1, 4))
    follower.now += 60_000
    follower.step(events.TimeLost(60_000))
    assert follower.role == "Follower"
    follower.pass_time(2 * follower.config.timings.fetch_timeout_ms)
    assert follower.role == "Prospective"


def test_a_followers_answers_do_not_wait_for_news_of_a_leader_that_it_elected() -> None:
    """The epoch and the vote bind it, the name of the winner does not. A leader's own name does."""
    node = Lone()
    node.writes_states = False
    node.ask_vote(1, 1, 0, 0)
    (vote,) = node.effects_of(events.PersistQuorumState)
    node.flush()
    node.begin(1, 1)
    assert node.effects_of(events.PersistQuorumState)
    after = {type(effect.message): effect.after for effect in node.effects_of(events.Send)}
    assert after[messages.BeginQuorumEpochResponse] == vote.token

    leader = Lone()
    leader.writes_states = False
    leader.pass_time(5000)
    for _ in range(2):
        leader.grant(leader.sent(messages.VoteRequest)[0])
    (state,) = leader.effects_of(events.PersistQuorumState)
    begins = [effect for effect in leader.effects_of(events.Send) if effect.to == NodeId(1)]
    assert [effect.after for effect in begins] == [state.token]
    assert leader.core.log.end_offset > EndOffset(0)
