"""Mutants of adoption after a restore: order, epochs, the window of ids, recovery mode."""

from tests.mutants.mutant import Mutant, Tested

_MAP = "tests/metadata/test_metadata_adoption.py"
_ANY = "tests/backup/test_adoption_property.py"
_DISASTER = (
    f"{_ANY}::test_nothing_acknowledged_is_lost_whatever_happened_before_and_after_the_backup"
)
_PLANNER = "tests/storage/test_storage_adoption_planner.py"
_CLAIMS = (
    "tests/lifecycle/test_lifecycle_bucket_claim.py"
    "::test_claims_are_renewed_when_short_or_old_or_when_a_copy_left"
)
_REFUSED = f"{_MAP}::test_what_does_not_fit_is_refused_with_all_that_comes_with_it"

ADOPTIONS = (
    Mutant(
        "adopted-over-a-gap",
        "An object that begins behind the end of its stream is adopted.",
        "a chain whose links are not compared; the rule of 6.5 that it ends at the first gap",
        """
        streammeta.controller.metadata.decisions.adoption:
        - if not may_pass:
        + if start < 0:
        """,
        Tested(_REFUSED),
    ),
    Mutant(
        "adopted-over-what-is-there",
        "An object that begins below the end of its stream is adopted.",
        "two objects for one range, as a compaction and its source are",
        """
        streammeta.controller.metadata.decisions.adoption:
        - if start < stream.end_offset and not _take_free(stream, epoch, start, end):
        -     return ErrorCode.OFFSET_NOT_MATCHED
        """,
        Tested(_REFUSED),
    ),
    Mutant(
        "adopted-in-the-order-of-ids",
        "Ranges of a request are judged as they come, not by their offsets.",
        "a compaction has a larger id than uploads that come behind it",
        """
        streammeta.controller.metadata.decisions.adoption:
        - for place in np.lexsort((ranges.start_offset, ranges.stream_id)).tolist():
        + for place in range(len(ranges.stream_id)):
        """,
        Tested(f"{_MAP}::test_objects_continue_streams_whatever_the_order_of_their_ids"),
    ),
    Mutant(
        "adopted-from-outside-the-window",
        "Any id that the map does not know may be adopted.",
        "an object that was deleted before the restored point would come back",
        """
        streammeta.controller.metadata.decisions.adoption:
        - elif present[index] or not self._recovery.holds(object_id):
        + elif present[index]:
        """,
        Tested(_REFUSED),
    ),
    Mutant(
        "epochs-not-raised",
        "A stream keeps the epoch of the restored point, below that of its adopted records.",
        "the owner of before the disaster could open it again under an epoch that was used",
        """
        streammeta.controller.metadata.decisions.adoption:
        - if stream.epoch > head.epoch:
        + if stream.epoch > head.epoch + 10_000:
        """,
        Tested(f"{_MAP}::test_a_stream_takes_over_the_largest_epoch_of_its_records"),
    ),
    Mutant(
        "fenced-writer-adopted",
        "Records of an epoch below the stream's are adopted.",
        "a leftover of a writer that was fenced before the backup",
        """
        streammeta.controller.metadata.decisions.adoption:
        - if epoch < stream.epoch:
        -     return ErrorCode.STREAM_FENCED
        """,
        Tested(_REFUSED),
    ),
    Mutant(
        "recovery-mode-forgotten-by-one-call",
        "Brokers prepare objects in recovery mode.",
        "a list of what is refused, to which one call was not added",
        """
        streammeta.controller.metadata.registries.recovery:
        - requests.FinishRestore,
        + requests.FinishRestore,
        + requests.PrepareObjects,
        """,
        Tested(f"{_MAP}::test_every_mutation_waits_for_the_end_of_recovery_or_is_known_not_to"),
    ),
    Mutant(
        "restored-without-recovery-mode",
        "A restored cluster takes appends at the restored ends at once: offsets are issued twice.",
        "as this cluster did at first",
        """
        streammeta.controller.backup.restoring:
        - "recovery": lambda _: recovery_section(plan.undecided_from, plan.next_object_id),
        """,
        Tested(
            "tests/backup/test_restore.py"
            "::test_a_restored_map_waits_for_adoption_with_all_that_brokers_change"
        ),
    ),
    Mutant(
        "smaller-epoch-wins",
        "Of two objects for one range the planner takes that of the smaller epoch.",
        "found when the rule of fenced writers was tried at random",
        """
        streammeta.storage.adoption.stream_path:
        - place = bisect_right(self._epochs, epoch)
        - return self._floors[place] if place < len(self._floors) else 1 << 63
        + place = bisect_left(self._epochs, epoch)
        + return self._floors[place - 1] if place else 1 << 63
        """,
        Tested(_DISASTER),
    ),
    Mutant(
        "entry-over-a-later-writer",
        "An entry is adopted although a writer of a larger epoch began within it.",
        "a leftover that hides what was acknowledged behind its first record",
        """
        streammeta.storage.adoption.stream_path:
        - return record.end <= self._floors.of(record.epoch)
        + return record.start < self._floors.of(record.epoch)
        """,
        Tested(
            "tests/storage/test_storage_adoption_planner.py"
            "::test_an_entry_is_not_taken_if_a_later_writer_began_within_it"
        ),
    ),
    Mutant(
        "owed-taken-of-any-epoch",
        "What a node owes is taken from a writer of another epoch too.",
        "found at random: a leftover took the place of an upload that came later",
        """
        streammeta.controller.metadata.decisions.adoption:
        - if start == first and end <= owed_end and epoch == owed_epoch:
        + if start == first and end <= owed_end:
        """,
        Tested(f"{_MAP}::test_what_a_node_owes_is_adopted_below_the_end_of_its_stream"),
    ),
    Mutant(
        "adopted-from-the-restored-end-alone",
        "Entries that begin below the end of the restored map are not adopted.",
        "found in a restore to an earlier point: all that was compacted since was called a gap",
        """
        streammeta.storage.adoption.stream_path:
        - if (id(run), entry[0].start) not in banned and not _meets(barred, start, end):
        + if start >= self._head.end_offset and (id(run), entry[0].start) not in banned:
        """,
        Tested(f"{_PLANNER}::test_a_compaction_replaces_objects_that_the_bucket_no_longer_has"),
    ),
    Mutant(
        "replaced-though-another-stream-reads-it",
        "An object that one stream needs no more leaves the map for all of its streams.",
        "a set object of several streams, one of which has nothing in its place",
        """
        streammeta.storage.adoption.planner:
        - pinned = set(needed)
        + pinned = set[int]()
        """,
        Tested(f"{_PLANNER}::test_an_object_of_a_stream_without_any_candidate_stays"),
    ),
    Mutant(
        "replaced-stays-in-the-map",
        "Replaced objects stay in the map, with the ranges of those that replace them.",
        "a swap of which one half was left out",
        """
        streammeta.controller.metadata.decisions.adoption:
        - if len(gone):
        + if len(gone) > 1_000:
        """,
        Tested(f"{_MAP}::test_a_compaction_takes_the_place_of_objects_and_continues_their_streams"),
    ),
    Mutant(
        "replaced-with-nothing",
        "A request takes objects out of the map that its ranges have nothing of.",
        "a mistaken id would destroy what readers can read",
        """
        streammeta.controller.metadata.decisions.adoption:
        - replaced.require_touched(ahead)
        """,
        Tested(f"{_MAP}::test_an_object_is_not_replaced_with_nothing"),
    ),
    Mutant(
        "hole-instead-of-lost-offsets",
        "Offsets of replaced objects that nothing has are in the map as if they were readable.",
        "readers would wait for them for ever",
        """
        streammeta.controller.metadata.decisions.adoption:
        - yield from self._losses(ahead)
        """,
        Tested(
            f"{_MAP}::test_offsets_of_replaced_objects_that_no_range_has_are_lost_and_passed_over"
        ),
    ),
    Mutant(
        "fenced-writer-below-the-end",
        "A record below the restored end counts although its writer was fenced before it.",
        "a leftover that spans the place of a deleted object",
        """
        streammeta.storage.adoption.stream_path:
        - begun = [(start, epoch) for start, _, epoch in head.owners]
        + begun = list[tuple[int, int]]()
        """,
        Tested(f"{_PLANNER}::test_a_fenced_writer_does_not_replace_what_the_bucket_has_lost"),
    ),
    Mutant(
        "first-way-taken",
        "Of several paths the one that begins with what comes first is taken.",
        "as the chain was followed at first: it ended where an upload had been compacted away",
        """
        streammeta.storage.adoption.stream_path:
        - ends.append(((cost[0] + reach - at, *cost[1:]), at, source))
        + ends.append(((cost[0], *cost[1:]), at, source))
        """,
        Tested(f"{_PLANNER}::test_a_dead_end_gives_way_to_a_compaction_that_goes_further"),
    ),
    Mutant(
        "commits-make-no-claim",
        "Claims in the bucket are renewed at a takeover alone, whatever was committed since.",
        "found with a disk that was rolled back: committed uploads expired, and their objects went",
        """
        streammeta.controller.lifecycle.bucket_claim:
        - is_changed = self._controller.cluster_metadata.applied_end_offset > term.claimed_at_offset
        + is_changed = self._controller.cluster_metadata.next_object_id > self._gate.bound
        """,
        Tested(_CLAIMS),
    ),
    Mutant(
        "claim-covers-what-came-after-it",
        "A claim counts for changes that were made after its bound was committed.",
        "an end of the log that is read when the claim has been put",
        """
        streammeta.controller.lifecycle.bucket_claim:
        - term.claimed_at_offset = term.written_to
        + term.claimed_at_offset = term.written_to + 1_000
        """,
        Tested(_CLAIMS),
    ),
    Mutant(
        "lost-object-called-unlisted",
        "An object of before a restore that the bucket lacks is called unlisted for a while.",
        "the times of its commit and of the listing alone were compared",
        """
        streammeta.reconcile.vocabulary.verdicts:
        - rows.object_id < rules.settled_below
        + rows.object_id < 0
        """,
        Tested(
            "tests/reconcile/test_reconcile_classify.py"
            "::test_an_object_of_before_a_restore_is_missing_however_late_it_was_committed"
        ),
    ),
    Mutant(
        "failed-read-without-a-name",
        "An error of the disk does not say which file it is of.",
        "a start that ended in an EIO, among hundreds of files",
        """
        streammeta.storage.durable_files:
        - error.filename = str(self._path)
        + error.filename = None
        """,
        Tested(
            "tests/journal/test_journal_disk_full.py"
            "::test_an_error_of_the_disk_names_the_file_and_the_way_on"
        ),
    ),
    Mutant(
        "gap-left-a-hole",
        "Offsets that a range has passed over are in the map as if they were readable.",
        "readers would wait for them for ever",
        """
        streammeta.controller.metadata.decisions.adoption:
        - stream_id: [*stream.free, *stream.gaps] for stream_id, stream in sorted(ahead.items())
        + stream_id: [*stream.free] for stream_id, stream in sorted(ahead.items())
        """,
        Tested(f"{_MAP}::test_a_range_after_a_gap_is_adopted_if_it_says_so_and_the_gap_is_lost"),
    ),
)
