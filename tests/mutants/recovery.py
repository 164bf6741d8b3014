"""Mutants of recoveries from the loss of a majority: the survivor, the jumps, the marker."""

from tests.mutants.mutant import Mutant, Simulated, Tested

_PLAN = "tests/recover/test_recover_plan.py"
_CASES = f"{_PLAN}::test_the_survivor_that_goes_on_or_the_refusal"
_SURVIVOR = "tests/recover/test_recover_survivor.py"
_APPLY = "tests/recover/test_recover_apply.py"
_COMMAND = "tests/recover/test_recover_command.py"
_JUMP = "tests/quorum/test_quorum_jump.py"

RECOVERY = (
    Mutant(
        "recovery-beside-a-majority",
        "A cluster of one is made from a survivor while a majority could go on.",
        "etcd --force-new-cluster does so unless other members happen to live",
        """
        streammeta.controller.recover.planning:
        - if len(reports) >= majority(count):
        + if False:
        """,
        Tested(_CASES),
    ),
    Mutant(
        "stale-survivor-goes-on",
        "The survivor that goes on is the one with the shortest log.",
        "CockroachDB's loqrecovery takes the highest applied index, for this reason",
        """
        streammeta.controller.recover.planning:
        - best = max(reports, key=lambda report: (report.progress, -report.node_id))
        + best = min(reports, key=lambda report: (report.progress, -report.node_id))
        """,
        Tested(_CASES),
    ),
    Mutant(
        "any-survivor-goes-on",
        "Of several survivors the one with the lowest id goes on, whatever its log holds.",
        "etcd --force-new-cluster takes the member that it is called on",
        """
        streammeta.controller.recover.planning:
        - best = max(reports, key=lambda report: (report.progress, -report.node_id))
        + best = max(reports, key=lambda report: -report.node_id)
        """,
        Simulated("lost", range(47, 87)),
    ),
    Mutant(
        "own-marker-taken-for-anothers",
        "A takeover whose answer was lost finds its own marker, and gives up.",
        "a conditional put that is repeated finds what it has put itself",
        """
        streammeta.cli.recovery.restore_command:
        - if found != wanted or read_generations(objects, plan.namespace)[-1] != wanted:
        + if found is not wanted or read_generations(objects, plan.namespace)[-1] != wanted:
        """,
        Tested(f"{_COMMAND}::test_a_takeover_whose_answer_was_lost_is_repeated"),
    ),
    Mutant(
        "longest-log-of-any-epoch",
        "Survivors are compared by the ends of their logs alone, as if all epochs were one.",
        "Raft, section 5.4.1: the later epoch is the more up-to-date log",
        """
        streammeta.controller.recover.report:
        - return self.last_epoch, self.end_offset
        + return 0, self.end_offset
        """,
        Tested(_CASES),
    ),
    Mutant(
        "dead-not-compared",
        "Any list of dead voters is taken: a living one that is forgotten may vote on.",
        "CockroachDB's loqrecovery refuses a list that is not exactly what is missing",
        """
        streammeta.controller.recover.planning:
        - if living | dead != wanted:
        + if False:
        """,
        Tested(_CASES),
    ),
    Mutant(
        "foreign-report-taken",
        "Reports of another cluster, or of before a recovery, count among the survivors.",
        "CockroachDB's loqrecovery refuses replica info of several clusters",
        """
        streammeta.controller.recover.planning:
        - if len(names) > 1 or len(uuids) > 1:
        + if False:
        """,
        Tested(_CASES),
    ),
    Mutant(
        "repairing-survivor-goes-on",
        "A replica that has lost flushed batches to damage becomes the only voter.",
        "the reason for promises of damaged replicas, here forgotten by another way",
        """
        streammeta.controller.recover.planning:
        - if report.is_repairing:
        + if False:
        """,
        Tested(_CASES),
    ),
    Mutant(
        "backup-that-is-further-ignored",
        "A survivor goes on although the backup holds committed entries that it lacks.",
        "restores and recoveries are chosen between by hand elsewhere",
        """
        streammeta.controller.recover.planning:
        - if backup is not None and backup > best.progress:
        + if False:
        """,
        Tested(_CASES),
    ),
    Mutant(
        "recovered-in-an-old-epoch",
        "The recovered cluster goes on in the epoch of before, in which the lost ones vote too.",
        "etcd --force-new-cluster keeps the term",
        """
        streammeta.controller.recover.planning:
        - epoch=max(report.epoch for report in reports) + EPOCH_JUMP,
        + epoch=survivor.last_epoch,
        """,
        Tested(f"{_PLAN}::test_a_plan_jumps_in_all_numbers_that_others_remember"),
    ),
    Mutant(
        "recovered-under-the-old-disk",
        "The survivor keeps its directory id, so voters of before count on its vote.",
        "CockroachDB's loqrecovery gives the survivor another replica id",
        """
        streammeta.controller.recover.applying:
        - directory_id=DirectoryId(plan.directory_id),
        + directory_id=DirectoryId(plan.from_directory_id),
        """,
        Tested(f"{_APPLY}::test_the_survivor_keeps_its_whole_flushed_log_and_what_it_was"),
    ),
    Mutant(
        "known-commits-alone-survive",
        "The survivor keeps what it knew to be committed, and drops acknowledged writes behind it.",
        "etcd --force-new-cluster drops entries that are not known to be committed",
        """
        streammeta.controller.recover.survivor:
        - for batch in _batches(inspection, base):
        + for batch in ():
        """,
        Tested(f"{_SURVIVOR}::test_a_report_of_a_whole_directory"),
    ),
    Mutant(
        "plan-of-another-directory",
        "A plan is applied to whatever directory it is given.",
        "CockroachDB's apply-plan checks node, store and range descriptor first",
        """
        streammeta.controller.recover.applying:
        - if not self.plan.sees(survivor.report):
        + if False:
        """,
        Tested(f"{_APPLY}::test_a_directory_that_is_not_what_the_plan_saw_is_left_alone"),
    ),
    Mutant(
        "recovered-without-a-marker",
        "No marker is put into the bucket: a majority that returns writes and deletes beside it.",
        "two clusters over one bucket, as forks of Litestream's replicas were",
        """
        streammeta.controller.recover.applying:
        - fence()
        """,
        Tested(f"{_APPLY}::test_without_its_marker_nothing_is_exchanged"),
    ),
    Mutant(
        "marker-overwritten",
        "The marker is put without a condition: of two survivors both go on.",
        "the reason for conditional puts in the bucket, decision 0006",
        """
        streammeta.storage.cluster_files.bucket_marker:
        - store.put(key, json_files.encode(generation), if_absent=True)
        + store.put(key, json_files.encode(generation))
        """,
        Tested(f"{_COMMAND}::test_of_two_survivors_one_goes_on"),
    ),
    Mutant(
        "identity-arrives-first",
        "The new identity is moved in before log and state: a controller starts on half of them.",
        "the classic of a commit point that is not the last step",
        """
        streammeta.controller.recover.applying:
        - for name in sorted(new, key=lambda name: name == META_NAME):
        + for name in sorted(new, key=lambda name: name != META_NAME):
        """,
        Tested(f"{_APPLY}::test_killed_or_cut_off_from_power_at_every_step_it_can_be_repeated"),
    ),
    Mutant(
        "log-of-before-fed",
        "A disk of before that returns is fed, and loses what only it had.",
        "CockroachDB's replicas of before a recovery are refused by their ids",
        """
        streammeta.controller.quorum.recovered_log:
        - return end_offset > 0 and era_of(end_offset) < era_of(own_end)
        + return False
        """,
        Tested(f"{_JUMP}::test_a_log_of_before_is_not_fed"),
    ),
    Mutant(
        "recovered-log-goes-on-in-its-era",
        "The recovered log goes on where the old one ended: both look alike.",
        "KIP-101: logs that were cut and went on at the same offsets",
        """
        streammeta.controller.quorum.recovered_log:
        - return EndOffset((era_of(end_offset) + 1) * ERA_OFFSETS)
        + return EndOffset(end_offset)
        """,
        Tested(f"{_JUMP}::test_a_log_goes_on_in_the_era_after_its_own"),
    ),
    Mutant(
        "leader-of-before-followed",
        "A leader that takes a voter for its former disk is followed, log and all.",
        "KIP-853 gives voters directory ids, for this reason",
        """
        streammeta.controller.quorum.core:
        - return self._replica.is_voter and not self._replica.is_self(request.header.receiver)
        + return False
        """,
        Tested(f"{_JUMP}::test_a_leader_of_before_is_not_followed"),
    ),
    Mutant(
        "empty-log-is-foreign",
        "A voter's directory that never got an entry is taken for one of another cluster.",
        "found by trying a recovery beside a controller that was formatted and never started",
        """
        streammeta.controller.recover.planning:
        - uuids = {report.cluster_uuid for report in reports if report.cluster_uuid}
        + uuids = {report.cluster_uuid for report in reports}
        """,
        Tested(_CASES),
    ),
)
