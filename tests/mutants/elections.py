"""Mutants of elections: votes, epochs, campaigns, and leaders that do not let go."""

from tests.mutants.mutant import Mutant, Simulated, Tested

ELECTIONS = (
    Mutant(
        "vote-kept-in-memory",
        "The vote is not written down, so a replica that restarts votes twice in an epoch.",
        "the reason for persistent votes in Raft (thesis, section 3.8)",
        """
        streammeta.controller.quorum.replica:
        - effects.append(events.PersistQuorumState(self._token, state))
        + written = QuorumState(state.epoch, None, state.leader_id)
        + effects.append(events.PersistQuorumState(self._token, written))
        """,
        Simulated("crashy"),
    ),
    Mutant(
        "vote-sent-before-flush",
        "Messages leave before the epoch and the vote they promise are on disk.",
        "Raft thesis, section 3.8; etcd documents the order for users of its library",
        """
        streammeta.controller.quorum.replica:
        - return events.Send(to, message, self._state_token, vouches_for_log=False)
        + return events.Send(to, message, 0, vouches_for_log=False)
        """,
        Simulated("crashy"),
    ),
    Mutant(
        "epoch-learned-not-written",
        "An epoch learned from a message is written down only along with a vote.",
        "a variant of the lost vote; KIP-595 persists every change of epoch",
        """
        streammeta.controller.quorum.replica:
        - if self._is_probing or self._has_new_state():
        + if self._is_probing or (self.vote is not None and self._has_new_state()):
        """,
        Simulated("crashy"),
    ),
    Mutant(
        "restarted-leader-leads-on",
        "A leader that restarts goes on leading its epoch and uses lost offsets again.",
        "prevented in KRaft by the roles.Resigned state (KIP-595)",
        """
        streammeta.controller.quorum.core:
        - replica.become_resigned(successors, "restarted")
        + replica.become_leader()
        """,
        Simulated("crashy"),
    ),
    Mutant(
        "vote-dropped-on-fallback",
        "A candidate that falls back to asking for pre-votes forgets its vote in that epoch.",
        "a hazard of the states that KIP-996 added",
        """
        streammeta.controller.quorum.election:
        + self._replica.vote = None
          self._replica.become_prospective(self._replica.draw_backoff())
        """,
        Simulated("restless", range(1000), is_rare=True),
    ),
    Mutant(
        "vote-for-shorter-log",
        "Votes are granted without comparing logs, so a leader may lack committed batches.",
        "the election restriction of Raft (section 5.4.1)",
        """
        streammeta.controller.quorum.election:
        - is_up_to_date = (request.last_epoch, request.end_offset) >= (
        -     replica.log.last_epoch,
        -     replica.log.end_offset,
        - )
        + is_up_to_date = True
        """,
        Simulated("crashy"),
    ),
    Mutant(
        "longest-log-wins",
        "Logs are compared by their length before their last epoch.",
        "the mistake that Raft's section 5.4.1 warns of",
        """
        streammeta.controller.quorum.election:
        - is_up_to_date = (request.last_epoch, request.end_offset) >= (
        + is_up_to_date = (request.end_offset, request.last_epoch) >= (
        +     replica.log.end_offset,
              replica.log.last_epoch,
        -     replica.log.end_offset,
        """,
        Tested(
            "tests/quorum/test_quorum_election.py::test_votes_go_to_logs_at_least_as_up_to_date"
        ),
    ),
    Mutant(
        "equal-log-loses",
        "Only a longer log gets a vote, so equal ones can never elect a leader.",
        "a slip that needs a liveness check to be seen",
        """
        streammeta.controller.quorum.election:
        - is_up_to_date = (request.last_epoch, request.end_offset) >= (
        + is_up_to_date = (request.last_epoch, request.end_offset) > (
        """,
        Simulated("calm"),
    ),
    Mutant(
        "late-votes-counted",
        "Answers to requests of an earlier epoch count in the present one.",
        "CCF tallied votes wrongly (Howard et al., Smart Casual Verification, 2025)",
        """
        streammeta.controller.quorum.requests:
        - if waiting is None or waiting.request_id != header.request_id:
        -     return False
        - del self._pending[header.sender, kind]
        + self._pending.pop((header.sender, kind), None)
        streammeta.controller.quorum.core:
        - if is_rejected or header.epoch < replica.epoch:
        + is_vote = isinstance(response, messages.VoteResponse)
        + if is_rejected or (header.epoch < replica.epoch and not is_vote):
        """,
        Simulated("noisy"),
    ),
    Mutant(
        "votes-counted-twice",
        "A vote that arrives twice counts twice.",
        "CCF tallied votes wrongly (Howard et al., Smart Casual Verification, 2025)",
        """
        streammeta.controller.quorum.requests:
        - if waiting is None or waiting.request_id != header.request_id:
        -     return False
        - del self._pending[header.sender, kind]
        + self._pending.pop((header.sender, kind), None)
        streammeta.controller.quorum.election:
        - (role.granted if response.granted else role.denied).add(sender)
        + votes = role.granted if response.granted else role.denied
        + votes.add(NodeId(sender + 1000 * len(votes)))
        """,
        Simulated("noisy", seeds=range(32, 232)),
    ),
    Mutant(
        "half-is-a-majority",
        "Half of an even number of voters decides, so two halves can decide differently.",
        "a classic slip with 2 and 4 voters",
        """
        streammeta.controller.quorum.voters:
        - return voters // 2 + 1
        + return (voters + 1) // 2
        """,
        Simulated("split"),
    ),
    Mutant(
        "every-pre-vote-granted",
        "Pre-votes are granted although the leader is alive, so a voter cut off deposes it.",
        "the disruptive server of the Raft thesis (section 9.6); KIP-996",
        """
        streammeta.controller.quorum.election:
        - return messages.QuorumError.NONE, is_up_to_date and may_pre_vote
        + return messages.QuorumError.NONE, True
        """,
        Tested(
            "tests/quorum/test_quorum_election.py"
            "::test_a_follower_that_hears_its_leader_grants_no_pre_vote"
        ),
    ),
    Mutant(
        "campaign-without-pre-vote",
        "A replica opens a new epoch at once, so one that was cut off deposes the leader.",
        "the disruptive server of the Raft thesis (section 9.6); KIP-996",
        """
        streammeta.controller.quorum.election:
        - self._replica.become_prospective()
        + self._replica.become_candidate()
          self._advance()
        - if isinstance(self._replica.role, roles.Prospective):
        + if isinstance(self._replica.role, roles.Candidate):
        """,
        Tested(
            "tests/quorum/test_quorum_election.py"
            "::test_a_campaign_asks_for_pre_votes_before_it_opens_an_epoch"
        ),
    ),
    Mutant(
        "deposed-leader-stays",
        "A leader that no majority fetches from never resigns; its clients wait for ever.",
        "KAFKA-15489",
        """
        streammeta.controller.quorum.leading:
          if len(writable) == len(others) and not replica.is_disk_full:
        -     return deadline
        +     return None
        """,
        Tested(
            "tests/quorum/test_quorum_election.py"
            "::test_a_leader_without_a_majority_resigns_after_check_quorum"
        ),
    ),
    Mutant(
        "idle-leader-looks-away",
        "A leader with nothing overdue leaves what an event calls for until the next heartbeat.",
        "a time before which a leader only serves, kept to save looking again with each event",
        """
        streammeta.controller.quorum.core:
        - if not _is_routine(event):
        -     self._leading.clear_idle_time()
        """,
        Tested(
            "tests/quorum/test_quorum_disks.py"
            "::test_leadership_promised_to_a_voter_is_handed_over_although_its_disk_becomes_known"
        ),
    ),
    Mutant(
        "refused-fetch-hurries-a-voter",
        "A voter whose Fetch is refused campaigns beside the successor its leader has chosen.",
        "`quorum transfer` on a busy machine: one in eight ended with another leader",
        """
        streammeta.controller.quorum.following:
        - if has_resigned and not replica.may_campaign:
        + if has_resigned:
        """,
        Tested(
            "tests/quorum/test_quorum_election.py"
            "::test_a_voter_that_is_no_chosen_successor_waits_an_election_timeout"
        ),
    ),
    Mutant(
        "answers-of-another-life-taken",
        "Answers to the process before the restart are taken: request numbers begin anew.",
        "why etcd and gRPC based peers carry a session in their messages",
        """
        streammeta.controller.quorum.requests:
        - if header.incarnation != self.incarnation:
        -     return False
        """,
        Tested(
            "tests/mutants/test_mutants_scripted.py"
            "::test_an_answer_to_the_life_before_the_restart_is_not_taken"
        ),
    ),
    Mutant(
        "another-cluster-listened-to",
        "Messages of another cluster are taken for those of this one.",
        "KAFKA-12440",
        """
        streammeta.controller.quorum.core:
        - if request.header.cluster_id != self._replica.config.cluster_id:
        + if False:
        """,
        Tested("tests/quorum/test_quorum_election.py::test_another_cluster_is_not_listened_to"),
    ),
)
