"""Mutants of limits under starvation: slow disks, stopped processes, starved handshakes."""

from tests.mutants.mutant import Mutant, Tested

_DISKS = "tests/quorum/test_quorum_slow_disks.py::"
_PATIENCE = "tests/quorum/test_peer_patience.py::"
_LOOP = "tests/runtime/test_core_loop.py::"

STARVATION = (
    Mutant(
        "no-sign-of-life",
        "A follower whose disk is busy is silent, and loses its leader or costs it the majority.",
        "measured: fsync of 2 s on all voters left no leader at all",
        """
        streammeta.controller.quorum.following:
        - if oldest is None or is_apart:
        + if oldest is None or is_apart or replica.epoch:
        """,
        Tested(_DISKS + "test_a_fetch_that_waits_for_the_disk_gives_way_to_signs_of_life"),
    ),
    Mutant(
        "sign-of-life-acknowledges-unflushed",
        "A Fetch that goes ahead of the disk names the log's end, which is not flushed.",
        "an acknowledgement before the flush; Raft thesis, section 3.8",
        """
        streammeta.controller.quorum.following:
        - fetch_offset = log.flushed_end if is_ahead else log.end_offset
        + fetch_offset = log.flushed_end if replica.is_disk_full else log.end_offset
        """,
        Tested(_DISKS + "test_a_fetch_that_waits_for_the_disk_gives_way_to_signs_of_life"),
    ),
    Mutant(
        "sign-of-life-commits-uncompared",
        "The answer to a sign of life commits batches that the leader has not compared.",
        "a variant of committing by the leader's word alone",
        """
        streammeta.controller.quorum.following:
        - return role.is_keepalive and response.diverging is None
        + return False
        """,
        Tested(_DISKS + "test_the_answer_to_a_sign_of_life_commits_nothing_beyond_the_flushed_end"),
    ),
    Mutant(
        "sign-of-life-fed",
        "A leader sends batches to a Fetch that takes none, again and again.",
        "found while signs of life were added",
        """
        streammeta.controller.quorum.leading:
        - if request.max_bytes == 0:
        + if request.max_bytes < 0:
        """,
        Tested(_DISKS + "test_a_leader_sends_no_batches_to_a_sign_of_life_and_counts_it"),
    ),
    Mutant(
        "limit-runs-while-state-is-written",
        "A candidate's limit passes before its own vote is durable and its requests have left.",
        "measured: with fsync of 0.5 s no election ended",
        """
        streammeta.controller.quorum.replica:
        - return self.now >= deadline and not self.writes.is_state_pending
        + return self.now >= deadline
        """,
        Tested(_DISKS + "test_limits_wait_for_the_write_of_the_own_state"),
    ),
    Mutant(
        "late-votes-thrown-away",
        "A candidate opens another epoch each time, in which no earlier vote counts.",
        "measured: with fsync of 1 s elections went on for ever",
        """
        streammeta.controller.quorum.replica:
        - if is_candidacy and self.candidacy.may_resume(self.voters):
        + if is_candidacy and self.is_disk_full:
        """,
        Tested(_DISKS + "test_a_candidate_asks_again_in_its_epoch_for_votes_that_came_too_late"),
    ),
    Mutant(
        "candidacy-resumed-after-a-restart",
        "A restarted candidate asks again in an epoch in which it may have led already.",
        "found by the simulator: two batches of one epoch at one offset",
        """
        streammeta.controller.quorum.candidacy:
        - if not self._is_of_this_process:
        + if not voters:
        """,
        Tested(
            "tests/quorum/test_quorum_election.py::test_a_restarted_candidate_opens_another_epoch"
        ),
    ),
    Mutant(
        "split-vote-kept",
        "A refused candidate asks in the same epoch for ever.",
        "found by two voters beside a silent third, while candidacies were made to last",
        """
        streammeta.controller.quorum.candidacy:
        - may_ask_again = not self._denied_by or not self._has_resumed
        + may_ask_again = True
        """,
        Tested(_DISKS + "test_a_refused_candidate_asks_again_once_and_then_opens_another_epoch"),
    ),
    Mutant(
        "voter-impatient",
        "A voter competes with the candidate it has elected, whose disk is busy with its state.",
        "measured: five leaders in a row were deposed before they had written their own state",
        """
        streammeta.controller.quorum.candidacy:
        - self.patience = _WRITES_OF_A_LEADER
        + self.patience = 0
        """,
        Tested(_DISKS + "test_a_voter_waits_for_writes_of_its_own_before_it_competes"),
    ),
    Mutant(
        "vote-undercut",
        "A voter encourages another candidate while the vote that it gave is being written.",
        "found by simulation: two quick voters beside three slow ones",
        """
        streammeta.controller.quorum.election:
        - return not replica.writes.is_state_pending or replica.vote in (None, sender)
        + return True
        """,
        Tested(_DISKS + "test_a_vote_that_is_being_written_is_not_undercut_by_a_pre_vote"),
    ),
    Mutant(
        "leaders-name-not-written-first",
        "A leader announces itself before its name is durable, and may restart as another's voter.",
        "KIP-595 persists the leader before it announces itself",
        """
        streammeta.controller.quorum.replica:
        - if is_binding or state.leader_id == self.local.node_id:
        + if is_binding:
        """,
        Tested(
            _DISKS + "test_a_followers_answers_do_not_wait_for_news_of_a_leader_that_it_elected"
        ),
    ),
    Mutant(
        "lost-time-blamed-on-peers",
        "A process that was stopped deposes its leader before it reads what has arrived.",
        "measured: a starved cluster deposed its leaders for half a minute",
        """
        streammeta.controller.runtime.replication.core_loop:
        - if lost_ms > _LATE_MS and self.is_running:
        + if lost_ms > 1 << 40 and self.is_running:
        """,
        Tested(_LOOP + "test_what_comes_after_a_stall_finds_the_lost_time_noted"),
    ),
    Mutant(
        "stalls-repeated",
        "Flushes of seconds stop the event loop again after half a second.",
        "measured: fsync of 2 s stopped everything else for 2 s, time after time",
        """
        streammeta.controller.runtime.persistence.flush_scheduling:
        - self._thread_until = now + max(self._backoff_s, STALL_SHARE * took_s)
        + self._thread_until = now + self._backoff_s
        """,
        Tested(
            "tests/runtime/test_flush_place.py"
            "::test_flushes_of_seconds_take_the_loop_a_small_share_of_its_time"
        ),
    ),
    Mutant(
        "handshake-limit-fixed",
        "Each handshake with a starved peer is given up at the same time, and begun again.",
        "measured: a starved cluster over TLS had no leader for half a minute",
        """
        streammeta.controller.peers.patience:
        - self._doublings = min(self._doublings + 1, _DOUBLINGS_MAX)
        + self._doublings = 0
        """,
        Tested(_PATIENCE + "test_a_peer_that_takes_several_limits_for_its_hello_is_reached"),
    ),
    Mutant(
        "limit-never-shrinks",
        "A peer that was starved once is waited for eight times as long from then on.",
        "limits that grow and stay; the cut that follows is noticed late",
        """
        streammeta.controller.peers.patience:
        - while self._doublings and took_s * _SHARE_OF_ANSWER <= self.limit_s / 2:
        + while self._doublings and took_s < 0:
        """,
        Tested(_PATIENCE + "test_the_limit_doubles_with_each_cut_and_shrinks_with_quick_answers"),
    ),
    Mutant(
        "late-timer-ends-connections",
        "A process that was stopped ends its connections before it reads the answers on them.",
        "a variant of the time lost by the quorum's loop",
        """
        streammeta.controller.peers.dialled:
        - if now - self._timer_at > _LATE_S:
        + if now - self._timer_at > 1e9:
        """,
        Tested(
            _PATIENCE + "test_answers_that_arrived_while_the_process_was_stopped_are_read_first"
        ),
    ),
    Mutant(
        "silent-connections-patiently-kept",
        "Connections that say nothing keep their scarce places for as long as starved peers may.",
        "a slow-handshake attack; found while the limits were made longer",
        """
        streammeta.controller.peers.server:
        - return HELLO_TIMEOUT_S * (HELLO_PATIENCE if is_roomy else 1)
        + return HELLO_TIMEOUT_S * HELLO_PATIENCE
        """,
        Tested(_PATIENCE + "test_silent_connections_have_less_time_when_their_places_are_scarce"),
    ),
)
