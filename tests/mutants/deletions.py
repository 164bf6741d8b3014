"""Mutants of deletion, by the leader and by reconciliation: too much, too early, too little."""

from tests.mutants.mutant import Mutant, Tested

_LEADER = "tests/lifecycle/test_lifecycle_deletion.py"
_UNCOMMITTED = "tests/lifecycle/test_lifecycle_ahead.py"
_INHERITED = "tests/lifecycle/test_lifecycle_inherited_ids.py"
_ENTRIES = "tests/storage/test_storage_adoption_ahead.py"
_SWEEPS = "tests/lifecycle/test_lifecycle_sweeps.py"
_FAILOVER = "tests/lifecycle/test_lifecycle_failover.py"
_RESTORE = "tests/backup/test_restore.py"
_CLAIMS = "tests/reconcile/test_reconcile_claims.py"
_RECONCILE = "tests/reconcile/test_reconcile_deletion.py"
_AHEAD_OF_MAP = "tests/reconcile/test_reconcile_ahead.py"

DELETIONS = (
    Mutant(
        "ahead-of-the-map-deleted",
        "A map whose disk was rolled back deletes the objects of acknowledged records.",
        "expired ids that were committed after the copy of the disk",
        """
        streammeta.controller.lifecycle.uncommitted:
        - return Ahead(ahead[0], ends[ahead[0].stream_id]) if ahead else None
        + return None
        """,
        Tested(
            f"{_UNCOMMITTED}::test_an_object_ahead_of_the_map_stays_until_its_stream_has_passed_it"
        ),
    ),
    Mutant(
        "bytes-of-no-object-deleted-after-a-rollback",
        "A map whose disk was rolled back deletes named objects that it has forgotten.",
        "named objects committed after the copy of the disk",
        """
        streammeta.controller.lifecycle.deletion:
        - if self._inherited.is_over(self._clock.monotonic_ms()):
        -     return ()
        + return ()
        """,
        Tested(
            f"{_INHERITED}::test_bytes_that_are_no_object_stay_for_a_day_of_a_process_that_has_not_seen_their_id"
        ),
    ),
    Mutant(
        "inherited-bytes-kept-for-ever",
        "Bytes that prove nothing are never deleted.",
        "a day that does not end",
        """
        streammeta.controller.lifecycle.inherited_ids:
        - return self._until_ms is None or now_ms >= self._until_ms
        + return self._until_ms is None
        """,
        Tested(
            f"{_INHERITED}::test_bytes_that_are_no_object_stay_for_a_day_of_a_process_that_has_not_seen_their_id"
        ),
    ),
    Mutant(
        "own-ids-count-as-inherited",
        "A leader doubts the commits of ids that it has issued itself.",
        "leadership that changes back and forth",
        """
        streammeta.controller.lifecycle.inherited_ids:
        - if self._until_ms is None:
        + if True:
        """,
        Tested(f"{_INHERITED}::test_what_a_process_prepared_itself_is_deleted_without_delay"),
    ),
    Mutant(
        "passed-by-its-start",
        "An entry that the map has reached a part of is deleted.",
        "a comparison of the wrong end of a range",
        """
        streammeta.storage.adoption.ahead:
        - if entry.stream_id in ends and entry.end_offset > ends[entry.stream_id]
        + if entry.stream_id in ends and entry.start_offset >= ends[entry.stream_id]
        """,
        Tested(f"{_ENTRIES}::test_an_entry_is_ahead_until_its_stream_has_reached_its_end"),
    ),
    Mutant(
        "failed-look-finds-nothing",
        "An object that can't be looked at is deleted like one that is not there.",
        "errors of a store that are taken for a missing object",
        """
        streammeta.controller.lifecycle.uncommitted:
          except StorageError as error:
        -     return error
        +     return 0
        """,
        Tested(f"{_UNCOMMITTED}::test_a_failed_look_is_not_a_good_look"),
    ),
    Mutant(
        "part-of-an-object-is-none",
        "A read that is cut short shows no object, and the object is deleted.",
        "torn reads",
        """
        streammeta.storage.adoption.last_entries:
        - end = check_length(tail, store.get_range(key, tail.start, tail.end), key)
        + end = memoryview(store.get_range(key, tail.start, tail.end))
        """,
        Tested(f"{_UNCOMMITTED}::test_a_part_of_the_bytes_is_not_a_good_look"),
    ),
    Mutant(
        "last-stream-alone-is-looked-at",
        "An object is deleted once the last of its streams has passed it.",
        "an object that is held to be of one stream",
        """
        streammeta.storage.adoption.last_entries:
        - is_last[:-1] = streams[1:] != streams[:-1]
        + is_last[:-1] = False
        """,
        Tested(f"{_UNCOMMITTED}::test_any_stream_that_is_not_passed_keeps_an_object"),
    ),
    Mutant(
        "streams-to-come-are-deleted-ones",
        "Objects of streams that were created after the copy of the disk are deleted.",
        "a missing stream that is taken for a deleted one",
        """
        streammeta.controller.metadata.cluster_metadata:
        - ends = dict.fromkeys(stream_ids[~is_issued].tolist(), 0)
        + ends: dict[int, int] = {}
        """,
        Tested(f"{_UNCOMMITTED}::test_a_stream_created_after_the_copy_keeps_its_objects"),
    ),
    Mutant(
        "composites-are-no-objects",
        "A composite object ahead of the map is deleted.",
        "a second format that a check does not know",
        """
        streammeta.storage.adoption.last_entries:
        - if magic == COMPOSITE_MAGIC:
        + if False:
        """,
        Tested(f"{_UNCOMMITTED}::test_composites_and_long_indexes_are_looked_at_as_well"),
    ),
    Mutant(
        "looks-hold-up-deletion",
        "Committed objects wait for looks at thousands of unused ids.",
        "one queue for cheap and dear work",
        """
        streammeta.controller.lifecycle.deletion:
        - looks = due[0] in uncommitted and self._looks < LOOKS_IN_FLIGHT_MAX
        + looks = due[0] in uncommitted
        """,
        Tested(
            f"{_UNCOMMITTED}::test_committed_objects_are_deleted_unseen_while_looks_at_others_hang"
        ),
    ),
    Mutant(
        "bucket-lost-during-a-look",
        "A leader deletes after a look during which the bucket stopped being the map's.",
        "a check made before a wait",
        """
        streammeta.controller.lifecycle.deletion:
        - if self._reign == reign and self._may_delete():
        + if self._reign == reign:
        """,
        Tested(f"{_UNCOMMITTED}::test_what_is_lost_during_a_look_ends_the_deletion"),
    ),
    Mutant(
        "leadership-lost-during-a-look",
        "A leader deletes by what an earlier term of its own has seen.",
        "a check made before a wait",
        """
        streammeta.controller.lifecycle.deletion:
        - if self._reign != reign:
        + if False:
        streammeta.controller.lifecycle.deletion:
        - if self._reign == reign and self._may_delete():
        + if self._may_delete():
        """,
        Tested(f"{_UNCOMMITTED}::test_what_is_lost_during_a_look_ends_the_deletion"),
    ),
    Mutant(
        "ahead-is-never-looked-at-again",
        "Uploads that nobody committed stay in the bucket though their streams have passed them.",
        "a queue that nobody empties",
        """
        streammeta.controller.lifecycle.deletion:
        - return self._next_ahead(now_ms, limit) or self._next_fresh(limit), False
        + return self._next_fresh(limit), False
        """,
        Tested(
            f"{_UNCOMMITTED}::test_an_object_ahead_of_the_map_stays_until_its_stream_has_passed_it"
        ),
    ),
    Mutant(
        "refused-keys-before-all-others",
        "A key that fails every request is tried again and again, and no other key is.",
        "found by a test: it was the only key for a while, so the bucket seemed to be down",
        """
        streammeta.controller.lifecycle.deletion:
        - if self._store_failures and self._rng.random() < _FRESH_FIRST:
        + if False:
        """,
        Tested(f"{_LEADER}::test_keys_that_fail_every_request_hold_up_none_that_come_later"),
    ),
    Mutant(
        "oldest-key-first-for-ever",
        "The oldest key fails every request, and the keys behind it are never tried.",
        "queues that are worked on in order",
        """
        streammeta.controller.lifecycle.deletion:
        - if self._store_failures:
        -     self._rng.shuffle(found)
          return found
        """,
        Tested(f"{_LEADER}::test_keys_that_fail_every_request_hold_up_none_that_come_later"),
    ),
    Mutant(
        "first-failure-refuses-nothing",
        "A key that fails the request it is in is never found out.",
        "a failure of a request that is taken for one of the bucket",
        """
        streammeta.controller.lifecycle.deletion:
        - elif self._store_failures == 0:
        + elif False:
        """,
        Tested(
            f"{_LEADER}::test_a_key_that_fails_requests_is_stuck_visibly_though_others_are_deleted"
        ),
    ),
    Mutant(
        "retries-take-all-requests",
        "Slow requests for keys that were refused leave none for the others.",
        "one pool for first attempts and retries",
        """
        streammeta.controller.lifecycle.deletion:
        - if self._retry_requests >= RETRIES_IN_FLIGHT_MAX:
        + if self._retry_requests >= IN_FLIGHT_MAX:
        """,
        Tested(f"{_LEADER}::test_refused_keys_whose_requests_are_slow_hold_up_no_other"),
    ),
    Mutant(
        "throttled-is-refused",
        "Keys that a busy store puts off count as refused, and become stuck.",
        "SlowDown in the errors of single keys",
        """
        streammeta.controller.lifecycle.deletion:
        - refused = {key: why for key, why in result.failed.items() if key not in result.throttled}
        + refused = dict(result.failed)
        """,
        Tested(f"{_LEADER}::test_a_throttled_key_is_no_refused_one_and_a_refused_one_beside_it_is"),
    ),
    Mutant(
        "refused-counts-as-throttled",
        "A key that is refused beside one that is throttled never becomes stuck.",
        "one verdict for all failures of an answer",
        """
        streammeta.controller.lifecycle.deletion:
        - refused = {key: why for key, why in result.failed.items() if key not in result.throttled}
        + refused = {} if result.throttled else dict(result.failed)
        """,
        Tested(f"{_LEADER}::test_a_throttled_key_is_no_refused_one_and_a_refused_one_beside_it_is"),
    ),
    Mutant(
        "deleted-in-a-bucket-of-doubt",
        "The leader deletes in a bucket that may be another cluster's.",
        "a check at the start alone",
        """
        streammeta.controller.lifecycle.deletion:
        - if not self._may_delete():
        + if False:
        """,
        Tested(f"{_LEADER}::test_nothing_is_deleted_while_the_bucket_may_be_another_s"),
    ),
    Mutant(
        "deleted-before-the-mark-is-committed",
        "Bytes go by a mark that another leader may never see.",
        "side effects of entries that are only appended",
        """
        streammeta.controller.lifecycle.deletion:
        - await self._controller.settled()
          # During the inspection this node may have lost the right to delete.
        """,
        Tested(f"{_LEADER}::test_no_bytes_go_before_their_mark_is_committed"),
    ),
    Mutant(
        "one-bad-key-spoils-its-company",
        "A key that causes whole requests to be refused is always tried along with others.",
        "retries in batches that never get smaller",
        """
        streammeta.controller.lifecycle.deletion_pace:
        - if isolates and not taken:
        -     limit = min(limit, max(1, limit >> count))
        """,
        Tested(f"{_LEADER}::test_the_more_often_keys_were_refused_the_fewer_are_tried_together"),
    ),
    Mutant(
        "plan-without-the-claims",
        "A plan by a map of an earlier state passes, and newer objects are orphans.",
        "a guard that is given a constant",
        """
        streammeta.reconcile.plan:
          issued_below=exported.issued_below,
        - claimed_below=claimed_below,
        + claimed_below=0,
        """,
        Tested(f"{_CLAIMS}::test_a_plan_by_a_map_below_the_claims_is_not_applied"),
    ),
    Mutant(
        "applied-by-a-map-below-the-claims",
        "A plan is applied though the map was restored since to an earlier state.",
        "a comparison with the plan's own numbers alone",
        """
        streammeta.reconcile.cluster.identity:
        - if standing.issued_below < claimed_below or standing.next_object_id < next_object_id:
        + if standing.next_object_id < next_object_id:
        """,
        Tested(f"{_CLAIMS}::test_a_map_restored_after_the_plan_was_made_frees_nothing"),
    ),
    Mutant(
        "task-that-forgets-the-claims",
        "A task deletes by a map that the bucket's claims are above.",
        "a bound that is read and not passed on",
        """
        streammeta.reconcile.deletion.tasks:
        - claimed_below=self._claimed_below or 0,
        + claimed_below=0,
        """,
        Tested(f"{_CLAIMS}::test_a_task_compares_each_answer_with_the_claims"),
    ),
    Mutant(
        "candidates-above-a-restored-map",
        "A task deletes objects whose ids the restored map has yet to issue.",
        "a map that went back between the plan and its application",
        """
        streammeta.reconcile.cluster.identity:
        - if standing.issued_below < claimed_below or standing.next_object_id < next_object_id:
        + if standing.issued_below < claimed_below:
        """,
        Tested(f"{_CLAIMS}::test_a_map_restored_within_a_task_frees_nothing_more"),
    ),
    Mutant(
        "standing-checked-at-the-first-question-alone",
        "A map that is restored within a task frees what it does not know any more.",
        "a check that is made once a task",
        """
        streammeta.reconcile.deletion.tasks:
        - check_standing(
        + if not deleting and not self._undo_files: check_standing(
        """,
        Tested(f"{_CLAIMS}::test_a_map_restored_within_a_task_frees_nothing_more"),
    ),
    Mutant(
        "kept-keys-end-a-task",
        "A few keys that the store keeps hold back the deletion of all others.",
        "failures that are counted without regard to successes",
        """
        streammeta.reconcile.deletion.tasks:
        - if any(result.outcome is not Outcome.FAILED for result in judged):
        + if False:
              self._failed_in_a_row = 0
        """,
        Tested(f"{_RECONCILE}::test_any_number_of_kept_keys_holds_up_no_other"),
    ),
    Mutant(
        "hopeless-task-goes-on",
        "A task asks a store that keeps everything for the deletion of every candidate.",
        "failures that are told and not counted",
        """
        streammeta.reconcile.deletion.tasks:
        - self._is_over = self._is_over or self._failed_in_a_row >= _HOPELESS
        + self._is_over = self._is_over
        """,
        Tested(f"{_RECONCILE}::test_a_task_ends_when_nothing_can_be_deleted_for_long"),
    ),
    Mutant(
        "one-upload-holds-up-all",
        "An unfinished upload that can't be aborted keeps all others from being aborted.",
        "found by a test: the first error ended the sweep, and the next began with it again",
        """
        streammeta.controller.lifecycle.sweeps:
        - refusals.append(error)
        + raise error
        """,
        Tested(f"{_SWEEPS}::test_an_upload_that_is_refused_for_ever_holds_up_no_other"),
    ),
    Mutant(
        "uploads-dropped-in-a-bucket-of-doubt",
        "Uploads are aborted in a bucket that may be another cluster's.",
        "a right to delete that only one of two tasks asks for",
        """
        streammeta.controller.lifecycle.sweeps:
        - while self._controller.is_active and self._may_delete():
        + while self._controller.is_active:
        """,
        Tested(f"{_SWEEPS}::test_no_upload_is_dropped_while_the_bucket_may_be_another_s"),
    ),
    Mutant(
        "node-0-recovers-nothing",
        "Recoveries that are assigned to node 0 are never named to it.",
        "0 that stands for none",
        """
        streammeta.controller.lifecycle.failover:
        - if node.recovered_by >= 0:
        + if node.recovered_by > 0:
        """,
        Tested(f"{_FAILOVER}::test_node_0_gets_work_like_any_other"),
    ),
    Mutant(
        "former-leader-names-work",
        "A controller that does not lead any more counts recoveries as assigned.",
        "state of a term that outlives it",
        """
        streammeta.controller.lifecycle.failover:
        - self._heartbeats.set_recoveries(())
          self._compactions = {}
        """,
        Tested(f"{_FAILOVER}::test_a_former_leader_names_no_work"),
    ),
    Mutant(
        "hold-by-a-clock-that-is-behind",
        "A restored cluster deletes at once what the records after the restored point need.",
        "a machine whose clock is behind when the plan is made",
        """
        streammeta.controller.backup.restoring:
        - "deletions_held_until_ms": column([max(plan.created_ms, plan.committed_by_ms) + HOLD_MS]),
        + "deletions_held_until_ms": column([plan.created_ms + HOLD_MS]),
        """,
        Tested(f"{_RESTORE}::test_a_clock_that_is_behind_the_backup_does_not_shorten_the_hold"),
    ),
    Mutant(
        "fast-process-survives-a-restore",
        "A process whose clock was ahead keeps its epoch over a restore, and writes on.",
        "epochs that are taken for times of the past",
        """
        streammeta.controller.backup.restoring:
        - epochs = np.maximum(np.asarray(section["node_epoch"]) + 1, now_ms)
        + epochs = np.maximum(np.asarray(section["node_epoch"]), now_ms)
        """,
        Tested(f"{_RESTORE}::test_processes_whose_clocks_were_ahead_are_fenced_too"),
    ),
    Mutant(
        "deleted-without-a-record-of-outcomes",
        "A run goes on deleting though its audit log takes no more lines.",
        "a disk that is full",
        """
        streammeta.reconcile.deletion.tasks:
          except OSError:  # the beginning is on record, so stop before another one
        -     self._is_over = True
        +     pass
        """,
        Tested(f"{_RECONCILE}::test_an_outcome_that_can_not_be_put_on_record_ends_the_task"),
    ),
    Mutant(
        "object-ahead-of-the-map-deleted",
        "What the map has not reached yet is deleted like any orphan.",
        "a controller's disk that was rolled back: objects of commits made since were deleted",
        """
        streammeta.reconcile.deletion.tasks:
        - contents = judge_contents(self._store, self._leader, present, self._order.next_stream_id)
        + contents = iter([Judged(one, Outcome.WOULD_DELETE) for one in present])
        """,
        Tested(f"{_AHEAD_OF_MAP}::test_an_upload_beyond_the_end_of_its_stream_is_kept"),
    ),
    Mutant(
        "stream-not-issued-yet-counts-as-deleted",
        "Objects of a stream that a rolled back map has forgotten whole are deleted.",
        "found while the rule was made: what is unknown was taken for deleted",
        """
        streammeta.reconcile.deletion.ahead_of_metadata:
        - ends = unborn | dict(leader.stream_ends(named))
        + ends = dict(leader.stream_ends(named))
        """,
        Tested(
            f"{_AHEAD_OF_MAP}::test_a_stream_that_the_map_has_not_issued_is_ahead_and_a_deleted_one_is_not"
        ),
    ),
    Mutant(
        "unreadable-candidate-deleted",
        "A candidate that can't be read counts as one without records.",
        "a failed look that is taken for a good one",
        """
        streammeta.reconcile.deletion.ahead_of_metadata:
        - return failed(candidate, "not deleted, because its index can't be read", error)
        + return Judged(candidate, Outcome.WOULD_DELETE)
        """,
        Tested(f"{_AHEAD_OF_MAP}::test_what_can_not_be_read_is_kept_and_tried_by_the_next_run"),
    ),
    Mutant(
        "foreign-at-first-sight",
        "Bytes that were mangled on the way once make an object foreign.",
        "a store that sent other bytes than it has",
        """
        streammeta.reconcile.deletion.ahead_of_metadata:
        - last = last or read_last_entries(store, candidate.key, candidate.size)
        """,
        Tested(f"{_AHEAD_OF_MAP}::test_bytes_are_not_foreign_at_first_sight"),
    ),
    Mutant(
        "streams-of-later-pages-count-as-deleted",
        "The first page of an answer is taken for all of it, and other streams for deleted.",
        "answers in pages that are read as one",
        """
        streammeta.reconcile.cluster.controller_client:
        - if not page.next_page_token:
        + if True:
        """,
        Tested(
            "tests/reconcile/test_reconcile_leader.py"
            "::test_ends_of_streams_are_read_to_the_last_page"
        ),
    ),
    Mutant(
        "rolled-back-map-not-told",
        "A run that keeps what is ahead of the map says nothing of it.",
        "a job that ends with 0 and a figure that nobody reads",
        """
        streammeta.reconcile.apply:
        - return f"{ahead.keys} {AHEAD_ADVICE}" if ahead else ""
        + return ""
        """,
        Tested(
            f"{_AHEAD_OF_MAP}::test_a_run_keeps_what_a_rolled_back_map_has_forgotten_and_says_so"
        ),
    ),
    Mutant(
        "ahead-of-the-map-not-on-record",
        "The audit trail has no line of what was kept.",
        "records of deletions alone",
        """
        streammeta.reconcile.deletion.audit_trail:
        - unbegun = (self._order.done, Outcome.AHEAD_OF_METADATA)
        + unbegun = (self._order.done,)
        """,
        Tested(f"{_AHEAD_OF_MAP}::test_what_is_ahead_is_in_the_audit_trail"),
    ),
)
