"""Mutants of wall clocks: what a machine with a wrong clock deletes, expires or locks."""

from tests.mutants.mutant import Mutant, Simulated, Tested

_CLOCKS = "tests/lifecycle/test_lifecycle_clocks.py"
_CHAINS = "tests/backup/test_backup_chains.py"
_LEASE = "tests/reconcile/test_reconcile_lease.py"
_EPOCHS = "tests/broker_client/test_node_epochs.py"

CLOCKS = (
    Mutant(
        "log-time-runs-to-the-wall",
        "Log time reaches a wall clock that is ahead as fast as it is asked for.",
        "a leader 400 days ahead for 20 s: objects that nobody could delete for 400 days",
        """
        streammeta.storage.steady_time:
        - most = passed_ms // self._slew
        + most = abs(ahead_ms)
        """,
        Simulated("clocks", range(10)),
    ),
    Mutant(
        "log-time-jumps",
        "A jump of the leader's wall clock moves log time at once.",
        "a leader 400 days ahead for 20 s: objects that nobody could delete for 400 days",
        """
        streammeta.storage.steady_time:
        - correction_ms = max(-most, min(most, ahead_ms))
        + correction_ms = ahead_ms
        """,
        Tested(f"{_CLOCKS}::test_log_time_follows_the_monotonic_clock_within_a_term"),
    ),
    Mutant(
        "deadlines-of-a-wrong-clock-expire",
        "A new leader whose clock is ahead expires the uploads of the term before.",
        "lease expiry by the clock of whoever looks",
        """
        streammeta.controller.lifecycle.sweeps:
        - return max(0, log_time.began_ms - JUMP_MS), INT64_MAX
        + return 0, INT64_MAX
        """,
        Tested(
            f"{_CLOCKS}::test_a_new_leaders_clock_expires_nothing_early_and_keeps_nothing_for_ever"
        ),
    ),
    Mutant(
        "far-deadlines-kept",
        "A deadline that a fast clock left keeps its object until then.",
        "a leader 400 days ahead for 20 s: objects that nobody could delete for 400 days",
        """
        streammeta.controller.lifecycle.sweeps:
        - return 0, log_time.now_ms() + TTL_MS_MAX + JUMP_MS
        + return 0, INT64_MAX
        """,
        Tested(
            f"{_CLOCKS}::test_a_new_leaders_clock_expires_nothing_early_and_keeps_nothing_for_ever"
        ),
    ),
    Mutant(
        "marks-in-the-future-wait",
        "An object that a fast leader marked destroyed is not deleted until that time.",
        "a leader 400 days ahead for 20 s: objects that nobody could delete for 400 days",
        """
        streammeta.controller.metadata.decisions.maintenance:
        - return found + self._objects.list_destroyed(INT64_MAX, limit - len(found), future_ms)
        + return found[: max(0, future_ms)]
        """,
        Tested(f"{_CLOCKS}::test_marks_of_a_fast_leader_are_deletable_after_the_delay"),
    ),
    Mutant(
        "hold-ended-by-a-fast-clock",
        "A new leader whose clock is ahead ends a hold of deletions.",
        "lease expiry by the clock of whoever looks",
        """
        streammeta.controller.lifecycle.deletion:
        - if jump_ms > JUMP_MS and newest_ms < hold.until_ms:
        + if jump_ms < 0:
        """,
        Tested(f"{_CLOCKS}::test_a_fast_leader_does_not_end_a_hold"),
    ),
    Mutant(
        "hold-of-a-fast-clock-kept",
        "A hold that a fast clock left bars deletions until that time.",
        "a lease written by a fast clock blocked other machines for 400 days",
        """
        streammeta.controller.metadata.decisions.maintenance:
        - until_ms = max(until_ms, min(self._hold.until_ms, now_ms + TTL_MS_MAX))
        + until_ms = max(until_ms, self._hold.until_ms)
        """,
        Tested(f"{_CLOCKS}::test_a_hold_of_a_fast_clock_is_cut_to_the_longest_one"),
    ),
    Mutant(
        "backup-gap-not-bounded",
        "A jump of the clock that stamps the files of a backup makes all earlier ones old.",
        "a clock 30 days ahead for 8 s deleted every earlier backup",
        """
        streammeta.controller.backup.chains:
        - age_ms += min(max(0, later_ms - written_ms), gap_max_ms)
        + age_ms += max(0, later_ms - written_ms)
        """,
        Tested(f"{_CHAINS}::test_a_jump_of_the_clock_that_stamps_files_removes_none_early"),
    ),
    Mutant(
        "newest-checkpoints-not-kept",
        "Retention leaves a single checkpoint if the bucket's times say so.",
        "retention by age alone",
        """
        streammeta.controller.backup.chains:
        - last_end = min(newest.start_offset, inventory.checkpoints[-KEPT_MIN].end_offset)
        + last_end = newest.start_offset
        """,
        Tested(f"{_CHAINS}::test_retention_keeps_the_newest_checkpoints_whatever_their_age"),
    ),
    Mutant(
        "point-in-time-by-a-leaders-clock",
        "A point in time is looked for by times that a wrong clock left in manifests.",
        "binary search over times that do not ascend",
        """
        streammeta.controller.backup.points:
        - if not apart or median(apart) > JUMP_MS:
        + if len(apart) >= 0:
        """,
        Tested(
            "tests/backup/test_backup_points.py::test_a_leader_with_a_wrong_clock_moves_no_point"
        ),
    ),
    Mutant(
        "lease-of-a-fast-clock-believed",
        "A lease that a fast clock left blocks every other machine until that time.",
        "a lease written by a fast clock blocked other machines for 400 days",
        """
        streammeta.reconcile.cluster.lease:
        - if 0 < left_ms <= LEASE_MS:
        + if 0 < left_ms:
        """,
        Tested(f"{_LEASE}::test_a_lease_by_a_wrong_clock_is_taken_after_its_length"),
    ),
    Mutant(
        "lease-over-by-the-observers-clock",
        "A run whose clock is fast takes a lease that another one renews.",
        "lease expiry by the clock of whoever looks",
        """
        streammeta.reconcile.cluster.lease:
        - number = self._watch(number)
        + number = self._watch(number) if left_ms > 0 else number
        """,
        Tested(f"{_LEASE}::test_a_lease_by_a_wrong_clock_that_is_renewed_is_not_taken"),
    ),
    Mutant(
        "epoch-of-a-fast-clock-locks-out",
        "A node that once started with a fast clock can't register until that time.",
        "a broker started once with a clock 10 years ahead was locked out until 2036",
        """
        streammeta.client.nodes.node_epochs:
        - if ahead_ms <= 0:
        + if ahead_ms:
        """,
        Tested(f"{_EPOCHS}::test_a_clock_that_was_set_back_registers_above_the_process_before"),
    ),
    Mutant(
        "overtaken-process-fences-the-newer",
        "A process that started earlier and registers later fences the newer one.",
        "the last one to register wins",
        """
        streammeta.client.nodes.node_epochs:
        - if ahead_ms <= 0:
        + if registered < 0:
        """,
        Tested(f"{_EPOCHS}::test_a_process_that_another_overtook_does_not_fence_it"),
    ),
    Mutant(
        "retention-by-a-brokers-clock",
        "A broker that starts with a fast clock deletes all closed segments.",
        "Kafka: log retention with a clock that jumped",
        """
        streammeta.brokers.stamped_time:
        - start_ms = min(now_ms, newest_ms + AHEAD_MS)
        + start_ms = max(now_ms, newest_ms)
        """,
        Tested(
            "tests/brokers/test_log_clock.py::"
            "test_a_broker_that_starts_with_a_fast_clock_keeps_the_records"
        ),
    ),
)
