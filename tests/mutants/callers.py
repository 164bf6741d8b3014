"""Mutants of the server of clients and of who may do what: sessions, calls, doors, bindings."""

from tests.mutants.mutant import Mutant, Tested

_SESSION = "tests/grpc_server/test_http2_session.py"
_BOUNDS = "tests/grpc_server/test_grpc_call_bounds.py"
_DOOR = "tests/trust/test_door.py"
_TOKEN_DOOR = "tests/trust/test_token_door.py"
_BINDING = "tests/trust/test_node_binding.py"
_AUDIT_FILES = "tests/trust/test_audit_verify.py"
_NAMESPACES = "tests/trust/test_namespaces.py"

_SERVER = (
    Mutant(
        "window-of-the-connection-kept",
        "A connection stands still for ever once 8 MiB have come by it.",
        "a window that is counted and never granted anew",
        """
        streammeta.controller.grpc_server.http2_connection:
        - self.out.append(frame(Kind.WINDOW_UPDATE, 0, 0, U32.pack(self._taken)))
          self._granted += self._taken
        """,
        Tested(
            f"{_SESSION}"
            "::test_the_window_of_the_connection_comes_back_whatever_becomes_of_its_data[True]"
        ),
    ),
    Mutant(
        "window-lost-with-closed-streams",
        "A connection whose calls are given up amid their data stands still after some of them.",
        "leaks of flow control in several HTTP/2 libraries",
        """
        streammeta.controller.grpc_server.http2_connection:
        - self._taken += size
        + self._taken += size if stream_id in self.streams else 0
        """,
        Tested(
            f"{_SESSION}"
            "::test_the_window_of_the_connection_comes_back_whatever_becomes_of_its_data[False]"
        ),
    ),
    Mutant(
        "granted-bytes-not-counted",
        "A client sends as much to one call as it likes, and the controller keeps it in memory.",
        "a window that is compared and not taken from",
        """
        streammeta.controller.grpc_server.http2_connection:
        - stream.granted -= size
          if flags & Flag.PADDED:
        """,
        Tested(f"{_SESSION}::test_a_stream_has_no_more_than_was_granted_however_it_is_torn"),
    ),
    Mutant(
        "padding-eats-the-window",
        "A call of a client that pads its frames stands still.",
        "padding that is counted and not granted anew",
        """
        streammeta.controller.grpc_server.http2_connection:
        - if len(payload) < size:
        -     self.grant(stream, size - len(payload))
        """,
        Tested(f"{_SESSION}::test_padding_is_granted_anew"),
    ),
    Mutant(
        "refused-streams-cost-nothing",
        "A client keeps a controller busy with streams beyond its limit.",
        "CVE-2023-44487, rapid reset, by refusals",
        """
        streammeta.controller.grpc_server.http2_connection:
        - self._resets.take(now, "streams beyond the limit")
        """,
        Tested(f"{_SESSION}::test_streams_that_are_reset_at_once_are_waste[refused]"),
    ),
    Mutant(
        "malformed-streams-cost-nothing",
        "A client keeps a controller busy with headers that are no request.",
        "CVE-2025-8671, resets that the server is made to send",
        """
        streammeta.controller.grpc_server.http2_connection:
        - self._resets.take(now, "malformed requests")
        """,
        Tested(f"{_SESSION}::test_streams_that_are_reset_at_once_are_waste[malformed]"),
    ),
    Mutant(
        "continuations-are-no-work",
        "One client's long headers hold the event loop up for all others.",
        "CVE-2024-27316 and others, floods of CONTINUATION",
        """
        streammeta.controller.grpc_server.http2_connection:
              skipper.feed(data)
          finally:
        -     self.spent += self._headers.steps - before
        +     pass
        """,
        Tested(f"{_SESSION}::test_headers_that_are_passed_over_take_the_work_of_many_frames"),
    ),
    Mutant(
        "several-requests-in-one-call",
        "A call of one request takes the first of several, and the client never hears of it.",
        "a request that is not the only one",
        """
        streammeta.controller.grpc_server.call:
        - if self._request is not None or len(messages) > 1:
        + if self._request is not None:
        """,
        Tested(f"{_BOUNDS}::test_a_request_that_is_none_is_refused_and_not_begun[several]"),
    ),
    Mutant(
        "second-request-replaces-the-first",
        "A call of one request makes the second of two.",
        "messages in different frames",
        """
        streammeta.controller.grpc_server.call:
        - if self._request is not None or len(messages) > 1:
        + if len(messages) > 1:
        """,
        Tested(f"{_BOUNDS}::test_a_second_request_in_another_frame_is_refused_too"),
    ),
    Mutant(
        "torn-request-counts-as-none",
        "A stream of requests that ends amid one is taken for complete.",
        "a connection that a proxy cuts",
        """
        streammeta.controller.grpc_server.call:
        - if is_ended and self._reader.held:
        + if is_ended and self._reader.needs > self._limits.request_bytes:
        """,
        Tested(
            f"{_BOUNDS}::test_a_stream_of_requests_that_ends_amid_one_is_not_taken_for_complete"
        ),
    ),
    Mutant(
        "taken-messages-call-counted",
        "A long stream of requests is refused once its messages together are too many.",
        "bytes in a queue that are counted in and not out",
        """
        streammeta.controller.grpc_server.call:
        - self._queued_bytes -= size
        """,
        Tested(f"{_BOUNDS}::test_a_stream_of_requests_goes_on_beyond_what_may_be_held"),
    ),
    Mutant(
        "memory-of-given-up-calls-stays-counted",
        "A controller refuses all requests after enough calls were given up half way.",
        "a release on one of two ends",
        """
        streammeta.controller.grpc_server.call:
        - self._release()
          self._queue.clear()
        """,
        Tested(f"{_BOUNDS}::test_memory_of_requests_comes_back_when_they_are_taken_or_given_up"),
    ),
    Mutant(
        "cancelled-handler-answers-nothing",
        "A client waits for ever for a call whose handler was cancelled from within.",
        "CancelledError that passes every except",
        """
        streammeta.controller.grpc_server.call:
        - self.refuse(grpc.StatusCode.CANCELLED, "the call was cancelled")
        + pass
        """,
        Tested(f"{_BOUNDS}::test_a_handler_that_is_cancelled_from_within_answers_its_client"),
    ),
    Mutant(
        "large-answer-sent",
        "An answer above the bound is sent, which clients of the contract can't read.",
        "a bound of requests alone",
        """
        streammeta.controller.grpc_server.call:
        - if len(data) > self._limits.answer_bytes:
        -     self._refuse_answer(len(data))
        -     return
        """,
        Tested(
            f"{_BOUNDS}::test_a_request_and_an_answer_may_be_as_long_as_the_limit_and_no_longer"
        ),
    ),
    Mutant(
        "client-that-left-not-told",
        "A handler that looks whether its client has given up works on for nobody.",
        "a flag that is never set",
        """
        streammeta.controller.grpc_server.call:
        - self._is_given_up = by_client and not self._has_status
        """,
        Tested(f"{_BOUNDS}::test_a_handler_hears_whether_its_client_gave_up_and_how_long_it_waits"),
    ),
)

_TRUST = (
    Mutant(
        "recovery-judged-as-compaction",
        "The broker that compacts for a node uploads in its name, and its recoverer may not.",
        "failover taken for the sign of a compaction",
        """
        streammeta.controller.trust.node_binding:
        - and len(request.compacted_object_ids) > 0
        """,
        Tested(f"{_BINDING}::test_a_broker_makes_only_the_commits_that_are_assigned_to_it"),
    ),
    Mutant(
        "compactor-commits-for-the-living",
        "A broker that compacts for others commits in a node's name as if it were that node.",
        "compacted objects taken for the sign of an assignment",
        """
        streammeta.controller.trust.node_binding:
        - and request.failover
          and len(request.compacted_object_ids) > 0
        """,
        Tested(f"{_BINDING}::test_a_broker_makes_only_the_commits_that_are_assigned_to_it"),
    ),
    Mutant(
        "first-request-of-a-batch-judged",
        "A broker makes any request in another's name behind one that it may make.",
        "a return where the next request is due",
        """
        streammeta.controller.trust.node_binding:
          if node.node_id != held_to.node_id:
        -     self._require_assigned(held_to, request, node, node_of(node.node_id))
        +     return self._require_assigned(held_to, request, node, node_of(node.node_id))
        """,
        Tested(f"{_BINDING}::test_all_requests_of_a_batch_are_judged"),
    ),
    Mutant(
        "any-broker-for-any-node",
        "A broker asks in the name of another node where the map is not looked at.",
        "a check that compares a node with itself",
        """
        streammeta.controller.trust.node_binding:
        - if held_to.node_id != node_id:
        + if held_to.node_id is None:
        """,
        Tested(f"{_BINDING}::test_a_call_of_a_broker_is_for_its_own_node"),
    ),
    Mutant(
        "known-caller-kept-over-a-policy",
        "A denied caller goes on as long as it keeps calling.",
        "a cache of verdicts that outlives the policy",
        """
        streammeta.controller.trust.authenticator:
        - self._known.clear()
          for task, call in self._long_calls.items():
        """,
        Tested(f"{_DOOR}::test_a_caller_that_was_let_in_is_judged_again_by_another_policy"),
    ),
    Mutant(
        "verdict-for-all-methods",
        "A caller that may do one thing may do everything after that.",
        "a cache of verdicts by certificate alone",
        """
        streammeta.controller.trust.authenticator:
        - known_by = (method, pem if proof is None else proof.digest)
        + known_by = ("", pem if proof is None else proof.digest)
        """,
        Tested(f"{_DOOR}::test_what_is_known_of_a_caller_is_of_its_method_and_its_certificate"),
    ),
    Mutant(
        "callers-remembered-without-a-bound",
        "Clients that make certificates or tokens fill the memory of a controller.",
        "a cache without an end",
        """
        streammeta.controller.trust.authenticator:
        - if len(self._known) >= _KNOWN_MAX:
        -     self._known.clear()
          self._known[known_by] = caller
        """,
        Tested(f"{_DOOR}::test_what_is_known_of_callers_is_bounded"),
    ),
    Mutant(
        "role-for-part-of-a-call-not-needed",
        "A caller does the part of a call that its role does not allow.",
        "a check that only plain text passes",
        """
        streammeta.controller.trust.authenticator:
        - return self.principal is None or not self.roles.isdisjoint(roles)
        + return self.principal is None or bool(self.roles)
        """,
        Tested(f"{_DOOR}::test_part_of_a_call_may_need_another_role"),
    ),
    Mutant(
        "expiry-outlives-its-call",
        "A task is cancelled by the end of a token whose call it has long answered.",
        "timers that are not cancelled",
        """
        streammeta.controller.trust.authenticator:
          del self._long_calls[task]
        - if timer is not None:
        -     timer.cancel()
        """,
        Tested(
            f"{_TOKEN_DOOR}"
            "::test_a_call_that_has_ended_leaves_its_task_alone_when_the_token_expires"
        ),
    ),
    Mutant(
        "first-namespace-judged",
        "A request writes a key of another's namespace behind one of a free namespace.",
        "a return where the next namespace is due",
        """
        streammeta.controller.trust.namespaces:
          if owners is None or any(owner.covers(caller.principal) for owner in owners):
        -     continue
        +     return
        """,
        Tested(f"{_NAMESPACES}::test_a_namespace_is_its_owners_and_admins_alone"),
    ),
    Mutant(
        "keys-in-commits-not-judged",
        "A broker puts keys of another's namespace by a commit of an upload.",
        "rules of the service for keys alone",
        """
        streammeta.controller.trust.namespaces:
        - case requests.CommitStreamSetObject() | requests.CommitStreamObject():
        + case requests.CommitStreamObject():
        """,
        Tested(f"{_NAMESPACES}::test_a_namespace_is_its_owners_and_admins_alone"),
    ),
    Mutant(
        "owned-objects-not-judged",
        "A broker ties named objects to keys of another's namespace.",
        "keys that are not the subject of a request",
        """
        streammeta.controller.trust.namespaces:
        - case requests.CommitNamedObjects():
        -     return {item.owner_key.namespace for item in request.objects if item.owner_key}
        """,
        Tested(f"{_NAMESPACES}::test_a_namespace_is_its_owners_and_admins_alone"),
    ),
    Mutant(
        "reconciler-in-free-namespaces",
        "A reconciler reads and writes keys of brokers wherever no policy names an owner.",
        "a role with one namespace treated as all others",
        """
        streammeta.controller.trust.namespaces:
        - if caller.allowed_by <= NAMESPACE_OF.keys():
        + if not caller.allowed_by:
        """,
        Tested(f"{_NAMESPACES}::test_a_namespace_that_nobody_owns_is_for_all_that_may_use_keys"),
    ),
)

_AUDIT = (
    Mutant(
        "unreadable-end-passed-over",
        "The last line of an audit log is overwritten with anything, and the chain holds.",
        "a torn line taken for the end of a process, though its newline is there",
        """
        streammeta.controller.trust.audit.check:
        - if self._torn is not None and self._is_unfinished:
        + if self._torn is not None:
              found.torn += 1
        """,
        Tested(f"{_AUDIT_FILES}::test_a_finished_last_line_that_can_not_be_read_is_a_break"),
    ),
    Mutant(
        "line-of-another-controller",
        "A line that is linked in with the number of another controller's passes.",
        "a chain that is checked by hashes alone",
        """
        streammeta.controller.trust.audit.check:
        - if members.get("node", -1) != found.node:
        + if members.get("node", -1) < 0:
        """,
        Tested(
            f"{_AUDIT_FILES}::test_a_line_of_another_controller_is_found_though_it_is_linked_in"
        ),
    ),
    Mutant(
        "emptied-file-passed-over",
        "A file of an audit log that was emptied leaves no trace if it was the last.",
        "files without lines, of which nothing is said",
        """
        streammeta.controller.trust.audit.check:
        - if not file.lines:
        -     self._note(file.name, 1, "the file is empty")
        """,
        Tested(f"{_AUDIT_FILES}::test_an_emptied_file_is_named"),
    ),
    Mutant(
        "lost-lines-not-told",
        "Lines that a controller lost by its own word are not told.",
        "a member that nobody reads",
        """
        streammeta.controller.trust.audit.check:
        - found.dropped += members.get("dropped", 0)
        """,
        Tested(f"{_AUDIT_FILES}::test_lines_that_the_controller_lost_are_counted"),
    ),
)

CALLERS = (*_SERVER, *_TRUST, *_AUDIT)
