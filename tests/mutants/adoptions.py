"""Mutants of adoption after a restore: order, epochs, the window of ids, recovery mode."""

from tests.mutants.mutant import Mutant, Tested

_MAP = "tests/metadata/test_metadata_adoption.py"
_ANY = "tests/backup/test_adoption_property.py"
_DISASTER = (
    f"{_ANY}::test_nothing_acknowledged_is_lost_whatever_happened_before_and_after_the_backup"
)
_REFUSED = f"{_MAP}::test_what_does_not_fit_is_refused_with_all_that_comes_with_it"

ADOPTIONS = (
    Mutant(
        "adopted-over-a-gap",
        "An object that begins behind the end of its stream is adopted.",
        "a chain whose links are not compared; the rule of 6.5 that it ends at the first gap",
        """
        streammeta.controller.metadata.adoption:
        - if start != stream.end_offset:
        + if start < stream.end_offset:
        """,
        Tested(_REFUSED),
    ),
    Mutant(
        "adopted-over-what-is-there",
        "An object that begins below the end of its stream is adopted.",
        "two objects for one range, as a compaction and its source are",
        """
        streammeta.controller.metadata.adoption:
        - if start != stream.end_offset:
        + if start > stream.end_offset:
        """,
        Tested(_REFUSED),
    ),
    Mutant(
        "adopted-in-the-order-of-ids",
        "Ranges of a request are judged as they come, not by their offsets.",
        "a compaction has a larger id than uploads that come behind it",
        """
        streammeta.controller.metadata.adoption:
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
        streammeta.controller.metadata.adoption:
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
        streammeta.controller.metadata.adoption:
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
        streammeta.controller.metadata.adoption:
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
        streammeta.controller.metadata.recovery:
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
        streammeta.storage.adoption.planner:
        - return left.epoch - right.epoch
        + return right.epoch - left.epoch
        """,
        Tested(_DISASTER),
    ),
    Mutant(
        "entry-over-a-later-writer",
        "An entry is adopted although a writer of a larger epoch began within it.",
        "a leftover that hides what was acknowledged behind its first record",
        """
        streammeta.storage.adoption.planner:
        - offers = [offer for offer in open_ones if not self._is_fenced_within(offer[1])]
        + offers = open_ones
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
        streammeta.controller.metadata.adoption:
        - if start == first and end <= owed_end and epoch == owed_epoch:
        + if start == first and end <= owed_end:
        """,
        Tested(f"{_MAP}::test_what_a_node_owes_is_adopted_below_the_end_of_its_stream"),
    ),
)
