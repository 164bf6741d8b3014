"""Mutants of reconciliation: what is listed, joined, judged, looked up, and shown."""

from tests.mutants.mutant import Mutant, Tested

_RECONCILE = "tests/reconcile/test_reconcile"
_COPIES = "tests/storage/test_storage_s3_copies.py"

RECONCILING = (
    Mutant(
        "absent-key-counts-as-tagged",
        "A run says that it tagged an object which was not there.",
        "one rule for deletions and tags",
        """
        streammeta.reconcile.deletion.tasks:
        - if self._others.has_begun(candidate.key) and not self._order.tag:
        + if self._others.has_begun(candidate.key):
        """,
        Tested(
            f"{_RECONCILE}_audit.py::test_an_absent_key_that_another_attempt_was_to_tag_is_gone"
        ),
    ),
    Mutant(
        "shard-of-a-wanted-key-left-out",
        "A query for a key finds nothing: the shard that ends with the key is not listed.",
        "a bound of a range taken for exclusive",
        """
        streammeta.reconcile.listing.source_filters:
        - ends_before = last is not None and last < wanted
        + ends_before = last is not None and last <= wanted
        """,
        Tested("tests/reconcile/test_reconcile_source_filters.py::test_shards_are_left_out"),
    ),
    Mutant(
        "tables-of-a-query-at-different-offsets",
        "Two tables of one query are read at different states of the map.",
        "a copy for each table",
        """
        streammeta.reconcile.metadata.source:
        - if young := _young_copy(folder, asked, reuse_s):
        + if young := None:
        """,
        Tested(
            "tests/reconcile/test_reconcile_sources.py::test_the_tables_of_a_query_share_one_copy_unless_it_is_old"
        ),
    ),
    Mutant(
        "copy-of-other-controllers-reused",
        "A query of one cluster reads the map of another that shares the folder.",
        "a folder of copies for all clusters",
        """
        streammeta.reconcile.metadata.source:
        - newest = max(folder.glob(f"*-{asked}.checkpoint"), default=None)
        + newest = max(folder.glob("*.checkpoint"), default=None)
        """,
        Tested(
            "tests/reconcile/test_reconcile_sources.py::test_the_tables_of_a_query_share_one_copy_unless_it_is_old"
        ),
    ),
    Mutant(
        "strangers-among-chosen-candidates-pass",
        "A notebook passes keys that the plan never judged, and is not told that they are ignored.",
        "frames of another plan",
        """
        streammeta.reconcile.notebook:
        - if found := strangers.take(1):
        + if found := []:
        """,
        Tested(
            "tests/reconcile/test_reconcile_notebook.py::test_a_key_that_is_no_candidate_is_refused"
        ),
    ),
    Mutant(
        "tags-written-again",
        "Tagging renews the time of an object, and the bucket's rule never finds it old enough.",
        "Ceph's RADOS Gateway with `watch --tag`",
        """
        streammeta.storage.object_store.s3.s3:
        - if wanted == found:
        + if False:
        """,
        Tested(f"{_COPIES}::test_tags_that_are_there_are_not_written_again"),
    ),
    Mutant(
        "tags-put-to-a-server-without-tags",
        "A server that overlooks `?tagging` replaces an object with its tags.",
        "S3 servers that ignore queries which they don't know",
        """
        streammeta.storage.object_store.s3.s3_copies:
        - if "TagSet" not in answer:
        + if "TagSet" not in answer and answer.setdefault("TagSet", []):
        """,
        Tested(f"{_COPIES}::test_a_server_without_tags_is_never_sent_any"),
    ),
    Mutant(
        "lost-executor-unnamed",
        "A job that lost an executor fails with Spark's first line alone.",
        "executors killed for their memory",
        """
        streammeta.reconcile.engines.spark_session:
        - if lost := _LOST.search(text):
        + if lost := None:
        """,
        Tested(f"{_RECONCILE}_spark_errors.py::test_the_reason_is_named"),
    ),
    Mutant(
        "spark-connect-misunderstood",
        "SPARK_REMOTE makes Spark's start fail with advice about Java.",
        "notebooks that set SPARK_REMOTE",
        """
        streammeta.reconcile.engines.spark_session:
        - if os.environ.get(name):
        + if False:
        """,
        Tested(f"{_RECONCILE}_spark_errors.py::test_spark_connect_is_refused_with_its_reason"),
    ),
    Mutant(
        "audit-file-shared-by-attempts",
        "Two attempts of a task write one audit file: lines are lost and its chain breaks.",
        "speculative attempts of Spark",
        """
        streammeta.reconcile.deletion.audit_trail:
        - path = Path(self._order.audit_folder) / f"task-{self._attempt.name}.jsonl"
        + path = Path(self._order.audit_folder) / f"task-{self._attempt.task:05d}.jsonl"
        """,
        Tested(
            f"{_RECONCILE}_audit.py::test_attempts_that_run_at_once_have_a_chain_each_and_a_line_for_each_deletion"
        ),
    ),
    Mutant(
        "attempts-counted-by-stage",
        "Attempts of a repeated stage overwrite the undo records of those before.",
        "an executor that is lost",
        """
        streammeta.reconcile.engines.spark_engine:
        - return Attempt(context.partitionId(), context.taskAttemptId())
        + return Attempt(context.partitionId(), context.attemptNumber())
        """,
        Tested(
            f"{_RECONCILE}_attempts.py::test_an_attempt_is_known_by_the_id_that_no_repeated_stage_gives_again"
        ),
    ),
    Mutant(
        "deleted-by-another-attempt-counts-as-gone",
        "A run that repeats a task says that it deleted fewer keys than it did.",
        "840 of 1,500 deletions counted",
        """
        streammeta.reconcile.deletion.tasks:
        - if self._others.has_begun(candidate.key) and not self._order.tag:
        + if False:
        """,
        Tested(
            f"{_RECONCILE}_audit.py::test_a_repeated_attempt_counts_what_the_one_before_it_deleted"
        ),
    ),
    Mutant(
        "no-line-for-a-deletion-of-another-attempt",
        "A deletion whose attempt ended has a line before it, and none after.",
        "attempts that Spark kills",
        """
        streammeta.reconcile.deletion.audit_trail:
        - unbegun = (self._order.done, Outcome.AHEAD_OF_METADATA)
        + unbegun = (Outcome.AHEAD_OF_METADATA,)
        """,
        Tested(
            f"{_RECONCILE}_audit.py::test_an_attempt_that_ends_between_its_lines_is_finished_by_the_next"
        ),
    ),
    Mutant(
        "records-of-another-task-believed",
        "A key that another task had in its records counts as deleted by this one.",
        "task 11 read as task 1",
        """
        streammeta.reconcile.vocabulary.attempts:
        - return f"{self.task:05d}-"
        + return f"{self.task:05d}"[-1:]
        """,
        Tested(
            f"{_RECONCILE}_attempts.py::test_records_of_the_same_task_alone_are_read_and_each_once"
        ),
    ),
    Mutant(
        "row-group-without-rows-spliced",
        "The table of verdicts has a row group without rows, and polars refuses the file.",
        "a chunk without a page of values, which Arrow reads all the same",
        """
        streammeta.reconcile.parquet.splice:
        - if not rows:
        -     return  # its chunks have no page of values, and some readers refuse the file for that
        """,
        Tested("tests/reconcile/test_parquet_splice.py::test_a_row_group_without_rows_is_left_out"),
    ),
    Mutant(
        "young-orphan-deleted",
        "The grace period saves nothing: what a broker is about to commit is deleted.",
        "Amoro issue 2925: the time of access, 0 on some stores, stood in for that of the change",
        """
        streammeta.reconcile.vocabulary.verdicts:
        - (rows.modified_ms >= rules.young_from_ms, Verdict.TOO_YOUNG),
        """,
        Tested(f"{_RECONCILE}_classify.py::test_agrees_with_a_model_over_sets"),
    ),
    Mutant(
        "loss-believed-at-first-sight",
        "An object that the listing lacked is told as lost without another look.",
        "listings that end early: consistency checks that cry wolf are switched off",
        """
        streammeta.reconcile.findings.losses:
        - lost = [suspect for suspect, still in zip(suspects, is_lost, strict=True) if still]
        + lost = suspects
        """,
        Tested(f"{_RECONCILE}_losses.py::test_what_only_the_listing_lacked_is_not_lost"),
    ),
    Mutant(
        "destroyed-object-told-as-lost",
        "An object that was destroyed while the bucket was listed is told as lost.",
        "scrubbers that compare two moments and take the difference for damage",
        """
        streammeta.reconcile.findings.losses:
        - joined = found.join(wanted, "object_id", join_type="inner")
        + joined = found.join(objects, "object_id", join_type="inner")
        """,
        Tested(f"{_RECONCILE}_losses.py::test_what_only_the_listing_lacked_is_not_lost"),
    ),
    Mutant(
        "damaged-bytes-pass-for-live",
        "A checksum that differs changes no verdict.",
        "scrubs that count what they read and do not act on it",
        """
        streammeta.reconcile.vocabulary.verdicts:
        - (wanted & (rows.reading == Reading.CHECKSUM_DIFFERS), Verdict.CHECKSUM_MISMATCH),
        """,
        Tested(f"{_RECONCILE}_classify.py::test_agrees_with_a_model_over_sets"),
    ),
    Mutant(
        "deleted-before-it-is-on-record",
        "A deletion begins without a line of its own in the audit log of the run.",
        "audit logs that are written after the fact: what a killed process did is in none",
        """
        streammeta.reconcile.deletion.tasks:
        - self._trail.begin(free)
        """,
        Tested(
            f"{_RECONCILE}_audit.py"
            "::test_a_line_is_there_before_the_deletion_and_tells_of_doubt_after_it"
        ),
    ),
    Mutant(
        "other-cluster-s-key-joined",
        "A key of another cluster takes the place of the object of the same id in the join.",
        "Iceberg pull request 12254: a sibling's files under a prefix that fits both",
        """
        streammeta.reconcile.engines.metadata_join:
        - own = np.flatnonzero((owners == Owner.OWN) & (ids >= 0))
        + own = np.flatnonzero(ids >= 0)
        """,
        Tested(f"{_RECONCILE}_engines.py::test_the_join_agrees_with_a_dictionary"),
    ),
    Mutant(
        "listing-ends-with-its-first-page",
        "A page without the token of the next is taken for the last one.",
        "servers that answer a listing in part; what is missing then looks lost",
        """
        streammeta.storage.object_store.s3.listing_page:
        - raise invalid_page(f"it is not the last page, but {first} is missing")
        + return None
        """,
        Tested("tests/storage/test_storage_object_page.py::test_what_is_no_page_is_refused"),
    ),
    Mutant(
        "usual-entries-taken-though-others-are-between",
        "Entries in the usual form are taken, and what is between them is passed over.",
        "fast readers of listings: a key in another form is dropped, and looks lost",
        """
        streammeta.storage.object_store.s3.object_page:
        - if sum(map(len, map(itemgetter(0), found))) != len(entries):
        + if not found:
        """,
        Tested(
            "tests/storage/test_storage_object_page.py"
            "::test_entries_in_another_form_or_place_are_read_as_xml"
        ),
    ),
    Mutant(
        "replaced-object-deleted",
        "An object that somebody put in the place of an orphan is deleted with it.",
        "plans that are applied to another state than they were made of",
        """
        streammeta.reconcile.deletion.tasks:
        - if same_time and (info.size, info.etag) == (candidate.size, candidate.etag):
        + if same_time:
        """,
        Tested(f"{_RECONCILE}_deletion.py::test_an_object_replaced_since_the_plan_is_kept"),
    ),
    Mutant(
        "two-runs-hold-the-lease",
        "A run that created a term is sure of the lease, though a higher term is there.",
        "locks by creation of a name that its holder deletes: a late creation succeeds again",
        """
        streammeta.reconcile.cluster.lease:
              )
        - check_held(self._store, self._namespace, self._run)
          self._number = number
        """,
        Tested(
            f"{_RECONCILE}_lease.py"
            "::test_whatever_comes_between_the_requests_of_a_take_one_run_has_the_lease"
        ),
    ),
    Mutant(
        "lost-lease-not-noticed",
        "A run that another has followed goes on deleting.",
        "leases that are only looked at when they are taken: a machine that stood still goes on",
        """
        streammeta.reconcile.deletion.tasks:
        - check_held(self._store, self._order.identity.namespace, self._order.run)
        """,
        Tested(f"{_RECONCILE}_deletion.py::test_losing_the_lease_stops_the_task"),
    ),
    Mutant(
        "deleted-without-its-copy",
        "An object that could not be copied to quarantine is deleted all the same.",
        "moves that are made of a copy and a deletion, as renames on S3 are",
        """
        streammeta.reconcile.deletion.tasks:
        - free = [result.candidate for result in saved if result.outcome is self._done]
        + free = [result.candidate for result in saved]
        """,
        Tested(f"{_RECONCILE}_quarantine.py::test_what_can_t_be_copied_is_not_deleted"),
    ),
    Mutant(
        "undo-takes-another-object-for-its-own",
        "Of an object that lies under its key meanwhile, only the size is compared with the copy.",
        "copies that are skipped because the size is the same, as by rsync --size-only",
        """
        streammeta.reconcile.undo:
        - if there.size == copy.size and _are_equal(store, key, copy):
        + if there.size == copy.size:
        """,
        Tested(
            f"{_RECONCILE}_quarantine.py"
            "::test_an_undo_that_was_cut_off_is_finished_and_nothing_is_replaced"
        ),
    ),
    Mutant(
        "absent-key-behind-the-page",
        "A lookup that gives up calls the keys that it has not reached absent.",
        "lists that are cut off and taken for whole",
        """
        streammeta.reconcile.listing.lookup:
          if settled == len(keys) or passed >= page + _OTHERS_A_KEY * settled:
        -     return found, settled
        +     return found, len(keys)
        """,
        Tested(f"{_RECONCILE}_lookup.py::test_keys_far_apart_are_left_alone_after_a_page"),
    ),
    Mutant(
        "key-written-into-the-page",
        "A key of the bucket becomes a part of the report's page.",
        "stored cross-site scripting by file names",
        """
        streammeta.reconcile.reports.page:
        - return html.escape("".join(spelled))
        + return "".join(spelled)
        """,
        Tested(f"{_RECONCILE}_report.py::test_a_hostile_key_is_text_and_nothing_else"),
    ),
)
