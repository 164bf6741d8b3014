"""Mutants of the lease on the bucket's marker, and of the wait for the end of another's."""

from tests.mutants.mutant import Mutant, Simulated, Tested

_LEASE = "tests/runtime/test_runtime_marker_lease.py"
_WATCH = "tests/lifecycle/test_lifecycle_marker_watch.py"
_WAIT = "tests/cli/test_cli_predecessors.py"

LEASES = (
    Mutant(
        "lease-without-end",
        "A cluster that can't read the bucket acknowledges changes for ever.",
        "Restored clusters of etcd and Consul are told to stop the old members by hand",
        """
        streammeta.controller.runtime.writer.marker_lease:
        - return max(0, self._proven_ms + LEASE_MS - self.now_ms())
        + return LEASE_MS
        """,
        Simulated("fenced", range(40)),
    ),
    Mutant(
        "failed-look-renews-the-lease",
        "A look that got no answer counts as one that found the own marker.",
        "ZooKeeper clients that took a lost connection for a living session",
        """
        streammeta.controller.lifecycle.marker_watch:
        - self._lease.note_failure(str(error))
        + self._lease.renew(began_ms)
        """,
        Simulated("fenced", range(40)),
    ),
    Mutant(
        "lease-from-the-answer",
        "The lease counts from the end of a look, whose answer may be old by then.",
        "the classic of leases: Gray and Cheriton count from the request",
        """
        streammeta.controller.lifecycle.marker_watch:
        - self._lease.renew(began_ms)
        + self._lease.renew(self._lease.now_ms())
        """,
        Simulated("fenced", range(40, 110)),
    ),
    Mutant(
        "answer-after-the-lease",
        "The lease is asked when a change is decided, and not when it is acknowledged.",
        "Kleppmann's paused client of a lock service",
        """
        streammeta.controller.runtime.writer.submission:
        - self._lease.require_for_answer()
        + pass
        """,
        Simulated("fenced", range(90, 120)),
    ),
    Mutant(
        "decided-after-the-lease",
        "A change goes into the log of a cluster that another one may own the bucket of.",
        "a check in one place of two",
        """
        streammeta.controller.runtime.writer.controller:
        - lease.require()
        + pass
        """,
        Tested(f"{_LEASE}::test_without_a_lease_no_change_is_decided"),
    ),
    Mutant(
        "repeat-after-the-lease",
        "An answer that appends nothing is acknowledged although the lease is over.",
        "read-only paths that skip the checks of writes",
        """
        streammeta.controller.runtime.writer.submission:
        - if self._lease is not None:
        + if self._lease is not None and self._is_proven:
        """,
        Tested(f"{_LEASE}::test_a_repeat_that_appends_nothing_is_not_acknowledged_after_the_lease"),
    ),
    Mutant(
        "older-look-lifts-a-fence",
        "A look that began before another cluster's marker was seen brings the lease back.",
        "answers that are applied in the order of their arrival",
        """
        streammeta.controller.runtime.writer.marker_lease:
        - if self._refused_ms is not None and began_ms <= self._refused_ms:
        -     return  # a later check has found another owner
        """,
        Tested(f"{_LEASE}::test_an_older_look_does_not_bring_back_what_a_later_one_ended"),
    ),
    Mutant(
        "restored-cluster-begins-at-once",
        "A restored cluster acknowledges changes while the one before may do so too.",
        "a fence that takes effect when it is put, and not when it is seen",
        """
        streammeta.controller.lifecycle.marker_watch:
        - if left_ms > 0:
        + if left_ms > FENCE_WAIT_MS:
        """,
        Tested(f"{_WATCH}::test_a_restored_cluster_waits_until_no_other_lease_can_be_held"),
    ),
    Mutant(
        "wait-for-an-earlier-generation",
        "A wait for one restore counts for the next one too.",
        "a timer that is not reset with its subject",
        """
        streammeta.controller.lifecycle.marker_watch:
        - if self._seen_unfenced is None or self._seen_unfenced[0] != generation.number:
        + if self._seen_unfenced is None:
        """,
        Tested(f"{_WATCH}::test_a_wait_for_one_generation_does_not_count_for_the_next"),
    ),
    Mutant(
        "command-does-not-wait",
        "A command declares the old cluster fenced without having waited.",
        "a timeout that is checked with the wrong sign",
        """
        streammeta.cli.recovery.predecessors:
        - if is_declared or now >= ends_at:
        + if is_declared or now <= ends_at:
        """,
        Tested(f"{_WAIT}::test_nothing_is_marked_before_the_wait_is_over"),
    ),
    Mutant(
        "late-command-marks-anothers-generation",
        "A late repeat of a recovery declares the predecessors of another restore stopped.",
        "commands that act on the newest state, whoever made it",
        """
        streammeta.cli.recovery.predecessors:
        - if generation.cluster_uuid != cluster_uuid:
        + if False:
        """,
        Tested(f"{_WAIT}::test_another_clusters_generation_is_never_marked"),
    ),
    Mutant(
        "recovery-does-not-wait",
        "A recovery takes it for declared that all other controllers are stopped.",
        "the default of an option that should be asked for",
        """
        streammeta.cli.recovery.recover_command:
        - is_declared=old_controllers_stopped,
        + is_declared=True,
        """,
        Tested(
            "tests/recover/test_recover_command.py"
            "::test_the_lease_of_lost_controllers_is_waited_out_unless_they_are_declared_stopped"
        ),
    ),
    Mutant(
        "finish-reads-before-the-wait",
        "Recovery mode ends by a look at the bucket that the old cluster still added to.",
        "the order of a check and of what makes it last",
        """
        streammeta.cli.recovery.adoption_command:
        - _wait_for_fence(cluster, store, is_declared=old_controllers_stopped)
        - surveyed = _survey(client, cluster, store)
        - if surveyed is not None:
        + surveyed = _survey(client, cluster, store)
        + _wait_for_fence(cluster, store, is_declared=old_controllers_stopped)
        + if surveyed is not None:
        """,
        Tested(f"{_WAIT}::test_the_bucket_is_read_after_the_wait"),
    ),
    Mutant(
        "empty-bucket-renews-the-lease",
        "A bucket without any marker counts as the cluster's own.",
        "an empty listing taken for good news",
        """
        streammeta.controller.lifecycle.marker_watch:
        - elif found.marker is not None or claim.issued_below:
        + elif found.marker is not None:
        """,
        Tested(f"{_WATCH}::test_a_look_that_does_not_find_the_own_marker_renews_nothing"),
    ),
    Mutant(
        "heartbeat-without-a-lease",
        "A broker's hold on its node is confirmed by a cluster that may be superseded.",
        "leases of clients that outlive the lease of their server",
        """
        streammeta.controller.lifecycle.failover:
          # The heartbeat counts, but without a lease the node must not rely on the answer.
        - self._controller.lease.require()
        """,
        Tested(f"{_WATCH}::test_a_heartbeat_is_heard_and_not_confirmed_without_a_lease"),
    ),
)
