"""Mutants of the server of clients: frames, headers, windows and bounds of HTTP/2."""

from tests.mutants.mutant import Mutant, Tested

_FRAMES = "tests/grpc_server/test_http2_frames.py::"
_HEADERS = "tests/grpc_server/test_header_blocks.py::"
_SESSION = "tests/grpc_server/test_http2_session.py::"
_CALLS = "tests/grpc_server/test_grpc_calls.py::"

CLIENTS = (
    Mutant(
        "oversized-client-frame-buffered",
        "The length of a client's frame is believed, and as many bytes are waited for and kept.",
        "CVE-2019-9517 and its like: memory for what a client only announces",
        """
        streammeta.controller.grpc_server.frames:
        - if length > FRAME_BYTES_MAX:
        + if length < 0:
        """,
        Tested(_FRAMES + "test_a_frame_that_may_not_come_is_refused_from_its_header"),
    ),
    Mutant(
        "headers-of-an-earlier-table",
        "What a block of headers meant is kept although another entry took a place in the table.",
        "a cache whose key leaves the state out",
        """
        streammeta.controller.grpc_server.headers:
        - if before[:2] != after[:2] or before[2] is not after[2]:
        + if before[:2] != after[:2]:
        """,
        Tested(_HEADERS + "test_a_kept_meaning_is_forgotten_when_an_entry_takes_anothers_place"),
    ),
    Mutant(
        "rapid-resets-unbounded",
        "A client may open calls and reset them at once without end.",
        "CVE-2023-44487",
        """
        streammeta.controller.grpc_server.http2_connection:
        - self._resets.take(now, "resets")
        + pass
        """,
        Tested(_SESSION + "test_what_is_wasted_ends_the_connection_and_a_little_of_it_does_not"),
    ),
    Mutant(
        "empty-continuations-unbounded",
        "Only the bytes of a block of headers are bounded, and not its frames.",
        "CVE-2024-27316 and its like: CONTINUATION without an end",
        """
        streammeta.controller.grpc_server.http2_connection:
        - CONTINUATIONS_MAX = 64
        + CONTINUATIONS_MAX = 1 << 40
        """,
        Tested(_SESSION + "test_headers_without_an_end_are_cut_off"),
    ),
    Mutant(
        "stream-window-not-kept",
        "A client may send more on a stream than it was granted.",
        "flow control that only the honest keep",
        """
        streammeta.controller.grpc_server.http2_connection:
        - if size > stream.granted:
        + if size < 0:
        """,
        Tested(_SESSION + "test_a_broken_rule_of_a_stream_resets_it_alone"),
    ),
    Mutant(
        "untaken-messages-granted-anew",
        "A client is granted more for what has arrived, whether its handler takes it or not.",
        "a pipeline that is read faster than it is decided fills the memory",
        """
        streammeta.controller.grpc_server.call:
        - target = self._consumed + ahead
        + target = self._consumed + reader.held + self._queued_bytes + ahead
        """,
        Tested(_CALLS + "test_what_a_handler_does_not_take_is_not_granted_anew"),
    ),
    Mutant(
        "incomplete-requests-unbounded",
        "Bytes of requests that never become complete are counted and not refused.",
        "memory for as many large requests as there may be calls",
        """
        streammeta.controller.grpc_server.connection:
        - self._held <= self.limits.held_bytes_of_connection and share.held <= share.held_max
        + self._held >= 0
        """,
        Tested(_CALLS + "test_requests_that_are_never_complete_are_bounded"),
    ),
)
