"""Mutants of membership: the voters, from when on they vote, and changes of them."""

from tests.mutants.mutant import Mutant, Simulated, Tested

_AGAIN = "tests/quorum/test_quorum_membership.py"

MEMBERSHIP = (
    Mutant(
        "change-before-own-commit",
        "A leader changes the voters before it has committed a batch of its epoch.",
        "the bug of single-server changes (Ongaro, raft-dev, 2015)",
        """
        streammeta.controller.quorum.membership:
        - if replica.high_watermark <= role.epoch_start:
        + if False:
        """,
        Simulated("reconfig"),
    ),
    Mutant(
        "two-changes-at-once",
        "A change of the voters begins before the one before it is committed.",
        "the gates of etcd and of KIP-853",
        """
        streammeta.controller.quorum.membership:
        - if role.voter_change is not None:
        + if False:
              return "another change of the voters is in progress, retry when it has ended"
        streammeta.controller.quorum.membership:
        - if replica.voters_named_at > replica.high_watermark:
        + if False:
        """,
        Simulated("reconfig"),
    ),
    Mutant(
        "voters-survive-cut",
        "A change of the voters stays in force after its record was cut from the log.",
        "Raft thesis, section 4.1; KIP-853 keeps a history of voter sets for it",
        """
        streammeta.controller.quorum.replica:
        - self._history.truncate(end_offset)
        """,
        Simulated("reconfig"),
    ),
    Mutant(
        "voters-change-on-commit",
        "A change of the voters takes effect only once it is committed.",
        "mixing etcd's rule into Raft's (thesis, section 4.1)",
        """
        streammeta.controller.quorum.replica:
        - self.voters = self._history.latest
        + self.voters = self._history.at(self.high_watermark)
        streammeta.controller.quorum.replica:
        + self._cache_voters()
          self._last.append(events.CommitAdvanced(end_offset))
        """,
        Simulated("reconfig"),
    ),
    Mutant(
        "wiped-voter-votes",
        "A voter whose disk was replaced counts as the one it was before.",
        "the motive of directory ids in KIP-853; replicated state of static voters before it",
        """
        streammeta.controller.quorum.replica:
        - return key == self.local
        + return key.node_id == self.local.node_id
        """,
        Tested(
            "tests/quorum/test_quorum_membership.py"
            "::test_a_replaced_disk_neither_votes_nor_counts_for_the_lost_one"
        ),
    ),
    Mutant(
        "disks-not-told-apart",
        "Replicas are matched by node id alone, so two disks of a node are taken for one.",
        "the motive of directory ids in KIP-853",
        """
        streammeta.controller.quorum.voters:
        - return self.directory_id == other.directory_id
        + return True
        """,
        Tested(
            "tests/quorum/test_quorum_voters.py"
            "::test_another_disk_is_another_voter_unless_the_first_was_not_known"
        ),
    ),
    Mutant(
        "new-disk-counts-for-the-first",
        "A voter named without a disk is credited with the Fetches of whatever disk its node has.",
        "found here by the simulator; static voters of KRaft before KIP-853",
        """
        streammeta.controller.quorum.leading:
        - if voter is None or voter.key.directory_id is not None or not header.is_founder:
        -     return sender
        - unnamed = voter.key
        - is_taken = role.progress[unnamed].earned_by not in (None, sender)
        - return sender if is_taken else unnamed
        + return sender if voter is None or voter.key.directory_id is not None else voter.key
        """,
        Simulated("rotten"),
    ),
    Mutant(
        "founder-not-asked-for",
        "A disk that joined later is credited as a first voter's if the leader heard it first.",
        "found here by the simulator; static voters of KRaft before KIP-853",
        """
        streammeta.controller.quorum.leading:
        - if voter is None or voter.key.directory_id is not None or not header.is_founder:
        + if voter is None or voter.key.directory_id is not None:
        """,
        Tested(
            "tests/quorum/test_quorum_disks.py"
            "::test_what_only_a_new_disk_flushed_is_not_committed_for_the_disk_it_replaced"
        ),
    ),
    Mutant(
        "two-disks-taken-for-one",
        "Two disks that both claim to be a first voter's are credited as one.",
        "found here by the simulator; replicated state of static voters before KIP-853",
        """
        streammeta.controller.quorum.leading:
        - return sender if is_taken else unnamed
        + return unnamed
        """,
        Tested(
            "tests/quorum/test_quorum_disks.py"
            "::test_the_acknowledgements_of_two_disks_are_not_taken_for_those_of_one"
        ),
    ),
    Mutant(
        "acknowledgements-handed-on",
        "What one disk has acknowledged is credited to the disk that the log comes to name.",
        "found here by the simulator, profile rotten, seed 7450253",
        """
        streammeta.controller.quorum.membership:
        - progress.key = progress.earned_by
        + progress.key = named
        """,
        Tested(
            "tests/quorum/test_quorum_disks.py"
            "::test_what_one_disk_earned_is_not_handed_to_the_disk_that_the_log_names"
        ),
    ),
    Mutant(
        "observer-campaigns",
        "A replica that does not vote, or votes no more, campaigns and counts itself.",
        "removed servers that disturb (Raft thesis, section 4.2.3)",
        """
        streammeta.controller.quorum.replica:
        - return self.is_voter or self._may_be_voter()
        + return len(self.voters) > 0
        streammeta.controller.quorum.replica:
        - return {self.local.node_id} if self.is_voter else set()
        + return {self.local.node_id}
        """,
        Simulated("reconfig"),
    ),
    Mutant(
        "removed-voter-counts-itself",
        "A candidate that its own log has removed counts its own vote.",
        "removed servers (Raft thesis, section 4.2.2)",
        """
        streammeta.controller.quorum.replica:
        - return {self.local.node_id} if self.is_voter else set()
        + return {self.local.node_id}
        """,
        Simulated("reconfig", range(1000), is_rare=True),
    ),
    Mutant(
        "uncommitted-removal-locks-up",
        "A voter removed by a change that is not committed never campaigns: none can win.",
        "found here by the simulator; Raft thesis, section 4.2.2",
        """
        streammeta.controller.quorum.replica:
        - return self.is_voter or self._may_be_voter()
        + return self.is_voter
        """,
        Tested(
            "tests/quorum/test_quorum_membership.py"
            "::test_who_alone_knows_of_its_removal_can_still_be_elected_but_not_by_its_own_vote"
        ),
    ),
    Mutant(
        "removed-leader-counts-itself",
        "A leader that is being removed goes on counting itself.",
        "KAFKA-16530",
        """
        streammeta.controller.quorum.leading:
        + if not replica.is_voter:
        +     ends.append(replica.log.flushed_end)
          end = committed_end(ends, role.epoch_start)
        """,
        Tested(
            "tests/quorum/test_quorum_membership.py"
            "::test_a_leader_that_is_removed_leads_until_that_is_committed_without_counting_itself"
        ),
    ),
    Mutant(
        "removed-leader-stays",
        "A leader that was removed does not resign.",
        "KAFKA-16531 and the cases around it",
        """
        streammeta.controller.quorum.membership:
        - return not replica.is_voter and replica.voters_named_at <= end_offset
        + return False
        """,
        Tested(
            "tests/quorum/test_quorum_membership.py"
            "::test_a_leader_that_is_removed_leads_until_that_is_committed_without_counting_itself"
        ),
    ),
    Mutant(
        "voter-refuses-as-observer",
        "A voter that does not know yet that it votes refuses its vote.",
        "Raft thesis, section 4.1; etcd had to let learners vote",
        """
        streammeta.controller.quorum.election:
        - if not replica.is_self(request.header.receiver):
        + if not replica.is_voter or not replica.is_self(request.header.receiver):
        """,
        Tested(
            "tests/quorum/test_quorum_membership.py"
            "::test_a_new_voter_grants_its_vote_before_it_knows_that_it_votes"
        ),
    ),
    Mutant(
        "voter-added-at-once",
        "A replica becomes a voter however far it lags, and holds up every commit.",
        "the availability gap of the Raft thesis, section 4.2.1",
        """
        streammeta.controller.quorum.membership:
        - if change.adding.key != progress.key or progress.end_offset < change.round_end:
        + if change.adding.key != progress.key:
        """,
        Tested(
            "tests/quorum/test_quorum_membership.py"
            "::test_a_laggard_is_added_after_a_round_it_keeps_up_with"
        ),
    ),
    Mutant(
        "two-voters-swapped-at-once",
        "One voter is replaced by another in one step: majorities need not meet.",
        "why single-server changes add or remove one (Raft thesis, section 4.1)",
        """
        streammeta.controller.quorum.voters:
        - return came + went <= 1
        + return came <= 1 and went <= 1
        """,
        Tested(
            "tests/quorum/test_quorum_voters.py::test_sets_that_follow_each_other_have_majorities_that_meet"
        ),
    ),
    Mutant(
        "repeated-addition-refused",
        "Adding a voter again after an unknown outcome is refused for ever.",
        "the hint of an unknown outcome says to repeat the command",
        """
        streammeta.controller.quorum.membership:
        - if named.key == key:
        + if named.key == key and named.endpoint == "":
        """,
        Tested(f"{_AGAIN}::test_a_change_that_was_made_before_is_confirmed_and_changes_nothing"),
    ),
    Mutant(
        "any-disk-confirmed",
        "Adding a node that votes with another disk is confirmed, though that disk has no vote.",
        "a lost disk would be taken for replaced",
        """
        streammeta.controller.quorum.membership:
        - if named.key == key:
        + if named.key.node_id == key.node_id:
        """,
        Tested(f"{_AGAIN}::test_a_node_that_votes_with_another_disk_is_not_added"),
    ),
    Mutant(
        "repeated-removal-refused",
        "Removing a voter again after an unknown outcome is refused for ever.",
        "as for the addition",
        """
        streammeta.controller.quorum.membership:
        - if voter is None:
        -     self._confirm(change_id)
        - elif not voter.key.matches(key):
        + if voter is None or not voter.key.matches(key):
        """,
        Tested(f"{_AGAIN}::test_a_change_that_was_made_before_is_confirmed_and_changes_nothing"),
    ),
)
