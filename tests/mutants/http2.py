"""Mutants of the gRPC server's HTTP/2: rules of RFC 9113, and what a hostile client is charged."""

from tests.mutants.mutant import Mutant, Tested

_SESSION = "tests/grpc_server/test_http2_session.py::"
_REQUESTS = "tests/grpc_server/test_http2_requests.py::"
_BOUNDS = "tests/grpc_server/test_grpc_call_bounds.py::"
_BLOCKS = "tests/grpc_server/test_header_blocks.py::"

HTTP2 = (
    Mutant(
        "data-before-the-acknowledgement",
        "Data that a new window allows comes before the acknowledgement of the settings.",
        "measured: clients on Python's h2 end the connection",
        """
        streammeta.controller.grpc_server.http2_connection:
        - self.out.append(frame(Kind.SETTINGS, Flag.ACK, 0))
          self._change_initial_window(window)
        + while self.is_due:
        +     self._send_next()
        + self.out.append(frame(Kind.SETTINGS, Flag.ACK, 0))
        """,
        Tested(_SESSION + "test_data_that_settings_allow_comes_after_their_acknowledgement"),
    ),
    Mutant(
        "overload-cancels",
        "A call that an overloaded server has not begun looks like one that it gave up amid it.",
        "measured: 2,000 of 4,000 calls at once ended with CANCELLED, which no client retries",
        """
        streammeta.controller.grpc_server.call:
        - self._connection.reset(self._stream, ErrorCode.REFUSED_STREAM)
        + self._connection.reset(self._stream, ErrorCode.CANCEL)
        """,
        Tested(_BOUNDS + "test_a_call_that_is_not_begun_is_refused_so_that_it_may_be_sent_again"),
    ),
    Mutant(
        "accepted-encodings-unsaid",
        "A client that compresses is refused, and does not learn how to ask instead.",
        "gRPC's specification of compression, which asks for the header",
        """
        streammeta.controller.grpc_server.call:
          f"{problem} (grpc-encoding {self._head.encoding[:20]}): send messages uncompressed",
        - ACCEPTED_ENCODINGS,
        """,
        Tested(
            _BOUNDS
            + "test_a_compressed_message_is_refused_with_the_encodings_that_are_accepted[unary]"
        ),
    ),
    Mutant(
        "unimplemented-taken-for-a-defect",
        "A method that nobody implemented is logged and answered as a defect of the controller.",
        "measured: grpc-go's case unimplemented_method",
        """
        streammeta.controller.grpc_server.call:
        - if is_missing and isinstance(error, NotImplementedError):  # so says gRPC's generated code
        + if is_missing and isinstance(error, KeyError):
        """,
        Tested(
            "tests/grpc_server/test_unimplemented_methods.py"
            "::test_a_method_that_nobody_implemented_is_unimplemented[Watch]"
        ),
    ),
    Mutant(
        "lines-in-a-path",
        "A path holds a line feed, and whoever writes it down writes a second line.",
        "request smuggling through proxies that translate HTTP/2 to HTTP/1.1",
        """
        streammeta.controller.grpc_server.headers:
        - return name in _PSEUDO and _has_only(_PSEUDO_BYTES[name], value)
        + return name in _PSEUDO
        """,
        Tested(_BLOCKS + "test_bytes_that_could_begin_another_header_are_in_no_value[:path]"),
    ),
    Mutant(
        "lines-in-metadata",
        "The value of a header holds a line feed, or begins with a blank.",
        "request smuggling through proxies that translate HTTP/2 to HTTP/1.1",
        """
        streammeta.controller.grpc_server.headers:
        - return _has_only(_VALUE_BYTES, value) and not has_blank_ends
        + return not has_blank_ends
        """,
        Tested(_BLOCKS + "test_bytes_that_could_begin_another_header_are_in_no_value[word]"),
    ),
    Mutant(
        "lengths-that-differ",
        "Of two lengths of one request the last one counts, where a proxy may count the first.",
        "request smuggling by two content-lengths",
        """
        streammeta.controller.grpc_server.headers:
        - elif not _is_valid(name, value) or (name in own and name in _SINGLE):
        + elif not _is_valid(name, value):
        """,
        Tested(
            _BLOCKS + "test_a_header_that_two_readers_could_read_differently_comes_once"
            "[content-length-5-6]"
        ),
    ),
    Mutant(
        "length-not-compared",
        "A request is complete with fewer or more bytes than its client said.",
        "request smuggling by content-length; h2spec's cases http2/8.1.2.6",
        """
        streammeta.controller.grpc_server.stream:
        - return self.length == 0 if is_last else self.length >= 0
        + return True
        """,
        Tested(
            _REQUESTS
            + "test_a_request_of_another_length_than_it_says_is_reset_and_never_complete[parts0]"
        ),
    ),
    Mutant(
        "length-not-compared-before-trailers",
        "A request whose trailers come too early is complete.",
        "a variant of the length that is not compared",
        """
        streammeta.controller.grpc_server.http2_connection:
        - elif not is_last or not head.may_end or stream.length:
        + elif not is_last or not head.may_end:
        """,
        Tested(
            _REQUESTS
            + "test_a_request_of_another_length_than_it_says_is_reset_and_never_complete[parts5]"
        ),
    ),
    Mutant(
        "pseudo-headers-in-trailers",
        "The end of a request names another path.",
        "RFC 9113, 8.1: trailers have no pseudo-headers",
        """
        streammeta.controller.grpc_server.http2_connection:
        - elif not is_last or not head.may_end or stream.length:
        + elif not is_last or stream.length:
        """,
        Tested(_REQUESTS + "test_headers_that_are_no_trailers_end_no_request[headers1]"),
    ),
    Mutant(
        "made-resets-uncounted",
        "A client begins calls without end, and has the server reset each by a broken frame.",
        "MadeYouReset, CVE-2025-8671: servers that count only the client's own resets",
        """
        streammeta.controller.grpc_server.http2_connection:
        - self._resets.take(now, "streams that break a rule")
        """,
        Tested(
            _SESSION
            + "test_streams_that_a_client_has_the_server_reset_count_as_its_own_resets[no grant]"
        ),
    ),
    Mutant(
        "broken-calls-uncounted",
        "A client begins calls without end, and ends each by a message that is none.",
        "a variant of MadeYouReset one layer above, in gRPC",
        """
        streammeta.controller.grpc_server.call:
        - self._connection.session.count_broken()
        + pass
        """,
        Tested(_BOUNDS + "test_calls_that_end_by_a_broken_message_count_as_resets[unknown flags]"),
    ),
    Mutant(
        "data-of-any-closed-stream-passed-over",
        "Data of a stream that its client has ended, or never opened, is passed over.",
        "h2spec's cases http2/5.1/8 and 5.1/11",
        """
        streammeta.controller.grpc_server.http2_connection:
        - self._reset(stream_id, ErrorCode.STREAM_CLOSED)
        """,
        Tested(_REQUESTS + "test_frames_of_a_stream_that_its_client_ended_break_the_rules[reset]"),
    ),
    Mutant(
        "pings-unbounded",
        "A client has each of its pings answered, however many it sends for nothing.",
        "CVE-2019-9512, ping flood",
        """
        streammeta.controller.grpc_server.http2_connection:
        - self._pings.take(now, "pings")
        + pass
        """,
        Tested(
            _SESSION + "test_what_is_wasted_ends_the_connection_and_a_little_of_it_does_not[pings]"
        ),
    ),
    Mutant(
        "measuring-pings-counted",
        "A client that measures its connection with pings is cut off amid a long answer.",
        "grpc-go's ENHANCE_YOUR_CALM, too_many_pings",
        """
        streammeta.controller.grpc_server.http2_connection:
        - if not self.has_answered:
        + if payload:
        """,
        Tested(_SESSION + "test_pings_by_which_a_client_measures_what_it_is_sent_are_answered"),
    ),
    Mutant(
        "answers-pile-up",
        "All frames that were read are answered, though the client reads no answer.",
        "CVE-2019-9512 and its kin: queues of control frames in memory",
        """
        streammeta.controller.grpc_server.connection:
        - elif self._is_full:
        + elif self._is_full and self._is_lost:
        """,
        Tested(
            "tests/grpc_server/test_unread_answers.py"
            "::test_frames_wait_while_their_answers_may_not_go"
        ),
    ),
    Mutant(
        "frames-held-up-for-ever",
        "A client that reads late has frames of before that nothing answers any more.",
        "a wake-up that is forgotten",
        """
        streammeta.controller.grpc_server.connection:
        - if self._is_held_up and not self._is_waiting:
        + if self._is_held_up and self._is_lost:
        """,
        Tested(
            "tests/grpc_server/test_unread_answers.py"
            "::test_frames_wait_while_their_answers_may_not_go"
        ),
    ),
)
