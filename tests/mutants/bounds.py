"""Mutants of bounds: sizes of messages, classes of calls, foreign files, connections of a host."""

from tests.mutants.mutant import Mutant, Tested

_ANSWERS = "tests/server/test_answer_bounds.py::"

BOUNDS = (
    Mutant(
        "put-values-come-back-unbounded",
        "The values that a PutKVs stores do not count towards the size of its answer.",
        "a client with default limits sees RESOURCE_EXHAUSTED, and the values are stored",
        """
        streammeta.controller.metadata.registries.kv:
        - _require_answerable("items", results)
        + _require_answerable("items", [result for result in results if result.error])
        """,
        Tested(_ANSWERS + "test_values_that_no_answer_could_bring_back_are_not_put"),
    ),
    Mutant(
        "log-entries-of-any-size",
        "A request may make a log entry that no watch can send in a message.",
        "a watch of a client with default limits never passes it",
        """
        streammeta.controller.runtime.writer.controller:
        - require_entry(len(payload))
        """,
        Tested(_ANSWERS + "test_a_log_entry_that_no_watch_could_send_is_not_made"),
    ),
    Mutant(
        "commits-of-a-message-have-an-answer-each",
        "Each commit of a pipeline's message may fill the answer that they share.",
        "two commits that meet three large values each",
        """
        streammeta.controller.runtime.writer.controller:
        - require_rest(answered_bytes, "commits")
        """,
        Tested(_ANSWERS + "test_commits_of_a_message_share_the_size_of_its_answer"),
    ),
    Mutant(
        "a-watch-sends-entries-of-any-size",
        "A watch sends an entry that is larger than a message.",
        "an entry that a controller of an older version wrote",
        """
        streammeta.controller.rpc.watch.messages:
        - if size + len(records) > ENTRY_BYTES_MAX:
        + if parts and size + len(records) > ENTRY_BYTES_MAX:
        """,
        Tested(_ANSWERS + "test_a_watch_passes_a_change_that_no_message_holds"),
    ),
    Mutant(
        "a-status-quotes-all-of-a-request",
        "A refusal quotes as much of the request as it likes.",
        "a page token of 400 kB: the client sees RESOURCE_EXHAUSTED for the trailers",
        """
        streammeta.controller.rpc.calls.error_mapping:
        - message = _shorten(message, MESSAGE_BYTES_MAX)
        """,
        Tested(_ANSWERS + "test_a_refusal_that_quotes_a_long_request_is_read_by_stock_clients"),
    ),
    Mutant(
        "a-lookup-of-one-id-is-a-scan",
        "The description of one stream counts as a walk through the map.",
        "of 800 brokers that look one up at once 504 were refused",
        """
        streammeta.controller.runtime.load.admission:
        - if count:
        + if not count:
        """,
        Tested(
            "tests/server/test_lookups_at_once.py::test_hundreds_of_lookups_at_once_are_all_answered"
        ),
    ),
    Mutant(
        "many-descriptions-are-a-lookup",
        "However many objects are described, they count as one look-up.",
        "thousands of calls that describe thousands of objects each, side by side",
        """
        streammeta.controller.runtime.load.admission:
        - return count * (LISTS_LOOKUPS if has_lists else work.lookups)
        + return work.lookups
        """,
        Tested(
            "tests/runtime/test_admission.py::"
            "test_descriptions_are_classed_by_how_many_are_asked_for"
        ),
    ),
    Mutant(
        "a-deep-policy-ends-the-controller",
        "A text that is nested deeply makes the parser's error pass every handler.",
        "one policy file that all controllers read",
        """
        streammeta.storage.parsing:
        - except RecursionError:
        + except NotImplementedError:
        """,
        Tested(
            "tests/trust/test_policy.py::"
            "test_a_policy_that_no_parser_stands_leaves_the_old_one_and_names_the_file"
        ),
    ),
    Mutant(
        "depth-is-not-bounded",
        "A text may be as deep as its parser reads.",
        "an error message that quotes a value fails as it walks through it",
        """
        streammeta.storage.parsing:
        - if _is_deep(found):
        + if False:
        """,
        Tested("tests/storage/test_storage_parsing.py::test_what_is_as_deep_as_may_be_is_read"),
    ),
    Mutant(
        "tls-sessions-go-on",
        "A server gives tickets, by which a session goes on without the certificate.",
        "a controller whose authority was removed comes back on the plane of peers",
        """
        streammeta.tls.files:
        - context.num_tickets = 0
        + context.num_tickets = 2
        """,
        Tested("tests/trust/test_tls_sessions.py::test_a_session_is_never_resumed"),
    ),
    Mutant(
        "the-log-is-everybodys-to-read",
        "Files of the log and of checkpoints are created with mode 0644.",
        "another user of the machine reads keys and values",
        """
        streammeta.storage.private_files:
        - FILE_MODE = 0o600
        + FILE_MODE = 0o644
        """,
        Tested(
            "tests/storage/test_storage_private_files.py::test_files_directories_and_locks_are_their_owners_alone"
        ),
    ),
    Mutant(
        "one-host-takes-all-places-of-peers",
        "A host that is no voter's may have as many connections as all together.",
        "plain text: a stranger's hellos hold all 96 places",
        """
        streammeta.controller.peers.server:
        - (hosts[host], VOTER_HOST_MAX if is_voters else HOST_MAX, "of this host"),
        """,
        Tested("tests/quorum/test_peer_places.py::test_one_host_takes_no_more_than_its_share"),
    ),
    Mutant(
        "strangers-take-the-places-of-voters",
        "Hosts that are no voter's may have all places together.",
        "twenty hosts with a few connections each",
        """
        streammeta.controller.peers.server:
        - (0 if is_voters else others, OTHERS_MAX, "of hosts without a voter"),
        """,
        Tested("tests/quorum/test_peer_places.py::test_hosts_of_strangers_leave_places_for_voters"),
    ),
    Mutant(
        "a-rotation-looks-like-tampering",
        "A file that is empty since the one before was renamed is a break of the chain.",
        "audit verify right after a rotation",
        """
        streammeta.controller.trust.audit.check:
        - if any(name_of_log(other.name) == file.name for _, other in of_node):
        + if False:
        """,
        Tested("tests/trust/test_audit_verify.py::test_a_log_right_after_a_rotation_holds"),
    ),
    Mutant(
        "anchors-follow-a-cut-log-back",
        "The anchor of an audit log is the end that it has now, even if it had more lines.",
        "whoever cuts the log waits ten seconds",
        """
        streammeta.controller.trust.audit.anchors:
        - return chain.seq > self.seq or cluster_id != self.cluster_id
        + return chain.seq != self.seq or cluster_id != self.cluster_id
        """,
        Tested(
            "tests/trust/test_audit_anchors.py::"
            "test_a_chain_that_was_cut_does_not_take_its_anchor_back"
        ),
    ),
    Mutant(
        "anchors-by-any-answer",
        "The end of a log is anchored for the controller whose address was asked, whoever answers.",
        "review: addresses in the log can be out of date, and an anchor is never taken back",
        """
        streammeta.controller.process.audit_anchoring:
        - and (view.cluster_id, view.node_id) == (cluster_id, node_id)
        """,
        Tested(
            "tests/trust/test_audit_anchors.py::"
            "test_a_controller_is_anchored_by_its_own_answer_alone"
        ),
    ),
    Mutant(
        "lines-left-behind-a-rename-unsynced",
        "Lines in a file that was renamed count as durable once the next file is synced.",
        "review: fsync is of one file",
        """
        streammeta.controller.trust.audit.file:
        - self.sync()
          file = self._opened()
        """,
        Tested(
            "tests/trust/test_audit_file.py::"
            "test_lines_before_a_sync_are_durable_however_the_file_was_left[reopening]"
        ),
    ),
    Mutant(
        "callers-write-anchors",
        "Keys of the anchors are keys as any others.",
        "whoever cuts the log puts its new end",
        """
        streammeta.controller.trust.namespaces:
        - _refuse_anchors(request)
        """,
        Tested("tests/trust/test_audit_anchors.py::test_no_caller_changes_anchors"),
    ),
)
