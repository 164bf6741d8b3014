"""Mutants of backups and restores: order, gaps, what is removed, what is issued again."""

from tests.mutants.mutant import Mutant, Simulated, Tested

_SIMULATED = Simulated("backup", range(40))
_UPLOAD = "tests/backup/test_backup_upload.py"
_CHAINS = "tests/backup/test_backup_chains.py"
_DELETION = "tests/backup/test_backup_deletion.py"
_RESTORE = "tests/backup/test_restore.py"

BACKUPS = (
    Mutant(
        "manifest-before-segment",
        "The manifest of a backup's file is put first, so a crash leaves one without its file.",
        "the classic of two files without an order; Litestream and Redpanda both order theirs",
        """
        streammeta.controller.backup.archive:
        + self._store.put(self.folder.manifest_key(name), json_files.encode(manifest))
          self._store.put(self.folder.key(name), data, if_absent=True)
        """,
        Tested(f"{_UPLOAD}::test_a_segment_is_put_before_its_manifest_and_a_lone_one_is_no_harm"),
    ),
    Mutant(
        "backup-of-uncommitted-entries",
        "The leader copies all of its log, with entries that another leader may overwrite.",
        "a tail that is taken for the log; KAFKA-7415 is of this family",
        """
        streammeta.controller.backup.uploader:
        - fit = [batch for batch in read if batch.end_offset <= end_offset]
        + fit = [*read]
        """,
        Tested(f"{_UPLOAD}::test_an_entry_that_is_not_committed_is_never_put"),
    ),
    Mutant(
        "gap-taken-for-a-chain",
        "A chain of segments goes on behind a missing one.",
        "Litestream issue 930: restores that hung or skipped where files were missing",
        """
        streammeta.controller.backup.chains:
        - if segment.start_offset > end:
        -     break
        """,
        Tested(f"{_CHAINS}::test_a_missing_segment_ends_the_chain_and_is_named"),
    ),
    Mutant(
        "segment-before-commit",
        "The leader copies up to the end of its log, and not of what is committed.",
        "the two ends of a log taken for one another; KAFKA-7415 is of this family",
        """
        streammeta.controller.backup.uploader:
        - now_ms, wanted = self._clock.monotonic_ms(), self._controller.committed_end
        + now_ms, wanted = self._clock.monotonic_ms(), self._controller._bound_log().next_offset
        """,
        _SIMULATED,
    ),
    Mutant(
        "gap-taken-for-reach",
        "Points behind a missing segment are offered for a restore.",
        "Litestream issue 930, in the search for a chain",
        """
        streammeta.controller.backup.chains:
        - if self._ends and segment.start_offset <= self._ends[-1]:
        + if self._ends:
        """,
        Tested(f"{_CHAINS}::test_the_newest_chain_is_that_which_reaches_furthest"),
    ),
    Mutant(
        "contradictions-not-looked-for",
        "Segments that overlap and disagree are all taken for good.",
        "two writers to one path made backups unrestorable: Litestream issue 224",
        """
        streammeta.controller.backup.verification:
        - if wrong:
        + if False:
        """,
        _SIMULATED,
    ),
    Mutant(
        "trimmed-log-waited-for",
        "A backup whose next entries were trimmed from the log waits for them for ever.",
        "Litestream issue 781: a restored system stored nothing until it passed its old end",
        """
        streammeta.controller.backup.uploader:
          _log.warning("backup_interrupted", end_offset=step.start.end_offset)
        - term.position = None
        """,
        Simulated("backup", range(40), is_rare=True),
    ),
    Mutant(
        "overlap-replayed-twice",
        "A restore applies the entries again that two overlapping segments hold.",
        "idempotence taken for granted",
        """
        streammeta.controller.backup.replaying:
        - if batch.base_offset >= replayed.position.end_offset
        + if batch.base_offset >= 0
        """,
        _SIMULATED,
    ),
    Mutant(
        "retention-cuts-the-chain",
        "A segment that reaches beyond the oldest checkpoint that is kept is removed with the old.",
        "retention by where a file begins",
        """
        streammeta.controller.backup.chains:
        - *(name for name in inventory.segments if name.end_offset <= keep_from),
        + *(name for name in inventory.segments if name.start_offset <= keep_from),
        """,
        Tested(
            f"{_CHAINS}::test_retention_keeps_every_point_from_its_time_on_and_the_newest_chain"
        ),
    ),
    Mutant(
        "file-removed-before-its-manifest",
        "Old files are removed from the backup before their manifests.",
        "the order of a put, repeated where it must be turned round",
        """
        streammeta.controller.backup.archive:
          \"\"\"Delete files, manifests first. Returns the number of deleted files.\"\"\"
        + self._store.delete_many(self.folder.key(name) for name in names)
        """,
        _SIMULATED,
    ),
    Mutant(
        "deletion-ahead-of-the-backup",
        "Bytes of objects go before the backup knows that they are destroyed.",
        "Redpanda 29468: garbage was collected against a state that was not stored yet",
        """
        streammeta.controller.lifecycle.backup_gate:
        - taken = choose([key for key, wait in self._waits.items() if wait.end_offset <= end])
        + taken = choose([key for key, wait in self._waits.items() if end or wait.end_offset])
        """,
        Tested(f"{_DELETION}::test_objects_wait_each_for_an_end_of_its_own"),
    ),
    Mutant(
        "backup-taken-for-known-at-once",
        "A new leader takes all that is committed for backed up, before it has looked.",
        "a term that begins with the state of the one before",
        """
        streammeta.controller.backup.uploader:
        - return 0 if position is None else position.end_offset
        + return self._controller.committed_end if position is None else position.end_offset
        """,
        Tested(f"{_DELETION}::test_a_new_leader_waits_until_it_knows_the_end_of_the_backup"),
    ),
    Mutant(
        "own-file-taken-for-anothers",
        "A file that was put by a call whose answer was lost counts as another history's.",
        "a conditional put that is repeated finds what it has put itself",
        """
        streammeta.controller.backup.archive:
        - if self._store.get_range(self.folder.key(name)) != data:
        + if True:
        """,
        Tested(f"{_UPLOAD}::test_a_put_whose_answer_was_lost_is_repeated[log/]"),
    ),
    Mutant(
        "foreign-checkpoint-gone-on-from",
        "A backup that ends with a checkpoint of another history is continued.",
        "two writers to one path made backups unrestorable: Litestream issue 224",
        """
        streammeta.controller.backup.uploader:
        - return low == high
        + return low.end_offset == high.end_offset
        """,
        Tested(f"{_UPLOAD}::test_a_newest_checkpoint_of_another_history_is_left_alone[behind]"),
    ),
    Mutant(
        "retention-removes-the-base",
        "The checkpoint that the oldest kept chain begins with is removed with those before it.",
        "retention by age of each file alone, as bucket rules do it",
        """
        streammeta.controller.backup.chains:
        - *(name for name in inventory.checkpoints if name.end_offset < keep_from),
        + *(name for name in inventory.checkpoints if name.end_offset <= keep_from),
        """,
        Tested(
            f"{_CHAINS}::test_retention_keeps_every_point_from_its_time_on_and_the_newest_chain"
        ),
    ),
    Mutant(
        "overlap-not-compared",
        "A segment that continues another history than the files before it is replayed.",
        "two writers to one path made backups unrestorable: Litestream issue 224",
        """
        streammeta.controller.backup.replaying:
        - if is_next and manifest.log_hash_before != before.log_hash.hex():
        + if False:
        """,
        Tested(f"{_CHAINS}::test_leaders_that_disagree_are_found"),
    ),
    Mutant(
        "restored-ids-not-jumped",
        "A restored cluster goes on with the object ids of the backup, issued again since.",
        "pd-recover of TiDB asks for a number above all ids ever issued; operators guess it",
        """
        streammeta.controller.backup.restoring:
        - return -(-(highest + OBJECT_ID_JUMP) // OBJECT_ID_JUMP) * OBJECT_ID_JUMP
        + return next_object_id
        """,
        Tested(f"{_RESTORE}::test_no_id_or_offset_of_the_whole_history_is_issued_again"),
    ),
    Mutant(
        "prepared-ids-decided",
        "Objects prepared at the restored point count as expired, though committed since.",
        "found when the rule of orphans was read against a restored map",
        """
        streammeta.controller.backup.restoring:
        - first = int(prepared.min()) if len(prepared) else next_object_id
        + first = next_object_id
        """,
        Tested(
            f"{_RESTORE}::test_an_object_of_the_whole_history_is_known_removed_before_or_undecided"
        ),
    ),
    Mutant(
        "processes-of-before-pass",
        "Brokers of before a restore keep their epochs, so they commit what the map does not know.",
        "epochs restored with the rest of the state",
        """
        streammeta.controller.backup.restoring:
        - epochs = np.maximum(np.asarray(section["node_epoch"]) + 1, now_ms)
        + epochs = np.asarray(section["node_epoch"])
        """,
        Tested(f"{_RESTORE}::test_every_process_of_before_is_fenced"),
    ),
    Mutant(
        "generation-overwritten",
        "The marker of a generation replaces that of another restore, so both own the bucket.",
        "SlateDB's manifests fence by the same conditional put",
        """
        streammeta.storage.cluster_files.bucket_marker:
        - store.put(key, json_files.encode(generation), if_absent=True)
        + store.put(key, json_files.encode(generation))
        """,
        Tested(
            "tests/storage/test_bucket_marker.py"
            "::test_the_newest_generation_owns_the_namespace[memory]"
        ),
    ),
    Mutant(
        "superseded-leader-writes-on",
        "A leader that finds another cluster restored over it goes on changing its map.",
        "etcd fences by ids alone: clients at the old addresses go on",
        """
        streammeta.controller.lifecycle.marker_watch:
        - self._lease.refuse(began_ms, error)
        """,
        Tested(
            "tests/lifecycle/test_lifecycle_bucket_claim.py"
            "::test_a_cluster_that_was_restored_over_this_one_fences_it"
        ),
    ),
    Mutant(
        "one-restore-gives-up-for-all",
        "What one restore left behind is given up, and with it what any other has.",
        "a flag where a number was meant",
        """
        streammeta.storage.cluster_files.bucket_marker:
        - generation for generation in self.generations if generation.number not in self.given_up
        + generation for generation in self.generations if not self.given_up
        """,
        Tested(
            "tests/storage/test_bucket_marker.py"
            "::test_undecided_ids_are_given_up_generation_by_generation[memory]"
        ),
    ),
    Mutant(
        "undecided-taken-for-orphans",
        "Reconciliation deletes objects that were committed after the restored point.",
        "'issued and not in the map' stops being a proof after a restore",
        """
        streammeta.reconcile.vocabulary.verdicts:
        - *undecided,
        """,
        Tested(
            "tests/reconcile/test_reconcile_classify.py"
            "::test_what_a_restore_left_undecided_is_no_candidate_unless_the_map_knows_it"
        ),
    ),
)
