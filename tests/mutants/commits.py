"""Mutants of commits: effects half done or done twice, recoveries by nodes that have none."""

from tests.mutants.mutant import Mutant, Simulated, Tested

_TESTS = "tests/metadata/test_commit_effects.py::"

_NAMED = "tests/metadata/test_named_objects.py::"
_RECOVERERS = "tests/metadata/test_recoverers.py::"
_REPEATS = "tests/metadata/test_metadata_repeats.py::"

COMMITS = (
    Mutant(
        "trim-beyond-what-was-appended",
        "A trim ends where it is asked to, beyond everything that its owner has appended.",
        "a writer that continues below the start: its records are acknowledged and never seen",
        """
        streammeta.controller.metadata.registries.stream_decisions:
        - start = min(start, max(end, item.appended_end_offset))
        + pass
        """,
        Tested("tests/metadata/test_trims.py::test_a_trim_ends_where_nothing_was_appended"),
    ),
    Mutant(
        "trim-ends-a-stream",
        "A trim uses up all offsets of its stream.",
        "a trim to the largest number, to delete everything",
        """
        streammeta.controller.metadata.registries.stream_decisions:
        - if start < head.start_offset or start > end + TRIM_AHEAD_MAX:
        + if start < head.start_offset:
        """,
        Tested("tests/metadata/test_trims.py::test_no_trim_uses_up_the_offsets_of_a_stream"),
    ),
    Mutant(
        "trim-with-a-commit-ends-before-it",
        "A trim that comes with a commit does not reach the records of that commit.",
        "the end of a stream before and after the records of the same entry",
        """
        streammeta.controller.metadata.decisions.commit_effects:
        - request.node.node_id, request.trims, _raised_ends(records)
        + request.node.node_id, request.trims, {}
        """,
        Tested(
            "tests/metadata/test_trims.py::"
            "test_a_trim_that_comes_with_a_commit_may_reach_to_the_end_that_it_makes"
        ),
    ),
    Mutant(
        "trim-leaves-what-is-on-its-way",
        "A trim does not wait for the appends that it covers, and ends before them.",
        "records that were deleted come back with the next upload",
        """
        streammeta.client.api.stream_client:
        - if any(start > ends[stream_id][0] for stream_id, start in wanted.items()):
        + if False:
        """,
        Tested(
            "tests/broker_client/test_stream_client.py::"
            "test_appends_after_a_trim_are_visible_whatever_was_committed"
        ),
    ),
    Mutant(
        "session-trims-beyond-the-end",
        "A session trims beyond the committed end though nothing was appended there.",
        "a tool that trims a stream while its writer is not asked",
        """
        streammeta.client.nodes.session:
        - appended_end_offset=ends.get(stream_id, 0),
        """,
        Tested(
            "tests/broker_client/test_stream_client.py::"
            "test_a_session_without_a_writer_trims_what_is_committed"
        ),
    ),
    Mutant(
        "left-out-row-poisons-its-object",
        "A stream object that a commit left out is answered so in every later commit.",
        "the same object sent again in order, and its answer lost",
        """
        streammeta.controller.metadata.decisions.commit_rules:
        - verdicts[came] = 0
        """,
        Tested(
            _REPEATS + "test_a_row_that_was_left_out_does_not_answer_for_a_later_commit",
        ),
    ),
    Mutant(
        "left-out-row-poisons-its-set-object",
        "A range is answered refused because another commit named its object before.",
        "an id that was used before it was issued",
        """
        streammeta.controller.metadata.decisions.commit_rules:
        - verdicts[np.isin(stream_id, held)] = 0
        """,
        Tested(
            _REPEATS
            + "test_a_row_under_an_id_that_was_never_issued_does_not_answer_for_its_set_object"
        ),
    ),
    Mutant(
        "left-out-row-is-of-no-commit",
        "A left-out row is remembered without its commit.",
        "two commits that leave out the same row for different reasons",
        """
        streammeta.controller.metadata.decisions.left_out_rows:
        - self._errors.put(RowKey(record.content_digest, object_id, stream_id), error, undo)
        + self._errors.put(RowKey(NO_DIGEST, object_id, stream_id), error, undo)
        """,
        Tested(_REPEATS + "test_two_commits_that_leave_out_the_same_row_get_their_own_verdicts"),
    ),
    Mutant(
        "left-out-row-is-of-its-object",
        "A left-out row is remembered by its object alone, and answers for every later commit.",
        "the same object sent again in order, and its answer lost",
        """
        streammeta.controller.metadata.decisions.left_out_rows:
        - self._errors.put(RowKey(record.content_digest, object_id, stream_id), error, undo)
        + self._errors.put(RowKey(NO_DIGEST, object_id, stream_id), error, undo)
        streammeta.controller.metadata.decisions.commit_rules:
        - verdicts[came] = 0
        """,
        Simulated(seeds=range(66, 67)),
    ),
    Mutant(
        "forgotten-row-was-accepted",
        "A repeat answers that a row was accepted, since its verdict is no longer remembered.",
        "a broker that drops records which were never committed",
        """
        streammeta.controller.metadata.decisions.commit_rules:
        - verdicts = np.where((verdicts == 0) & ~may_have_come, unknown, verdicts)
        """,
        Tested(_REPEATS + "test_a_row_whose_verdict_is_forgotten_is_not_answered_accepted"),
    ),
    Mutant(
        "any-node-recovers",
        "A recovery that names its recoverer is let through, whoever it was assigned to.",
        "two recoverers at once, one of them with an older view of the log",
        """
        streammeta.controller.metadata.registries.nodes:
        - assigned = node.recovered_by == recoverer.node_id
        + assigned = True
        """,
        Tested(_RECOVERERS + "test_a_recovery_that_was_assigned_anew_is_refused_to_the_first"),
    ),
    Mutant(
        "refused-value-leaves-the-commit",
        "A value that can't be put is left out, and the commit that it came with is made.",
        "a segment whose metadata is that of another writer",
        """
        streammeta.controller.metadata.decisions.commit_effects:
        - if error is not ErrorCode.NONE:
        -     return (), replace(_rejection(request, error), kv_results=results, trim_errors=errors)
        """,
        Tested(_TESTS + "test_an_effect_that_is_refused_refuses_the_commit_under_any_policy"),
    ),
    Mutant(
        "repeat-puts-again",
        "The repeat of a commit puts its values once more, over what was put since.",
        "a lost answer, a retry, and an update of another that is gone",
        """
        streammeta.controller.metadata.decisions.commit_effects:
        - if not records:
        + if False:
        """,
        Tested(
            _TESTS + "test_a_repeat_puts_nothing_again_and_tells_the_version_that_is_still_there"
        ),
    ),
    Mutant(
        "named-objects-outlive-their-key",
        "A key is deleted, and the objects that it owns keep their names and bytes for ever.",
        "what an offloaded ledger leaves behind when its ledger is gone",
        """
        streammeta.controller.metadata.cluster_metadata:
        - return (record, *self._named.destroy_with_keys(deleted, now_ms)), answer
        + return (record,), answer
        """,
        Tested(_NAMED + "test_named_objects_go_with_their_owner_and_no_others"),
    ),
    Mutant(
        "named-object-is-of-a-stream",
        "A compaction takes a named object for a stream object, and destroys it.",
        "the table of ranges is asked for the first range of an object that has none",
        """
        streammeta.controller.metadata.registries.object_queries:
        - fit[fit] = (kinds != _STREAM_SET) & (kinds != _NAMED)
        + fit[fit] = kinds != _STREAM_SET
        """,
        Tested(_NAMED + "test_compactions_take_no_named_object_for_a_source"),
    ),
    Mutant(
        "effects-are-no-content",
        "A commit under a known object id is taken for its repeat, though it puts other values.",
        "a success that is answered for values that nobody has put",
        """
        streammeta.controller.metadata.api.request_identity:
        - return _to_signed(total + _sum_of_effects(request))
        + return _to_signed(total)
        """,
        Tested(_TESTS + "test_a_repeat_with_other_effects_is_another_commit"),
    ),
    Mutant(
        "joined-commit-loses-its-values",
        "A commit with values is joined with others, in a form that has no place for them.",
        "found by reading: the joiner knows fields by name",
        """
        streammeta.controller.metadata.api.upload_batches:
        - and not request.kv_puts
        """,
        Tested(_TESTS + "test_commits_with_effects_are_not_joined_with_others"),
    ),
)
