"""Bounds of the server of clients: sizes, numbers, times and what a client may waste."""

from __future__ import annotations

from dataclasses import dataclass

REQUEST_BYTES_MAX = 16 << 20
"""Largest request that a controller takes."""

ANSWER_BYTES_MAX = 4 << 20
"""Largest answer: clients of gRPC accept as much unless they are set up otherwise."""

STREAMS_MAX = 1_024
"""Calls in flight on one connection. Further calls wait at their client, or are rejected unread."""

CONNECTIONS_MAX = 4_096
"""Connections of one listener. Further connections are closed at once."""

CALLS_MAX = 25_000
"""Calls in flight on one server, in equal parts for its listeners. Further calls are rejected.

This limit protects the server where admission control does not apply.
"""

WAITING_SOME, WAITING_MOST = 1_000, 2_000
"""Calls of a listener that wait to begin: above the first number some are rejected, above the
second all.

Rejecting a call unread (REFUSED_STREAM) costs almost nothing, while rejecting it in a handler costs
half of serving it. A full queue is served in about a second. All watches of a controller may arrive
at once.
"""

LOOKAHEAD_BYTES = 1 << 20
"""Bytes of a call's messages that may be on their way to a handler that has not asked for them."""

AGE_GRACE_S = 60.0
"""Time that the calls of a connection have left when it is too old, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one server. Times are in seconds."""

    request_bytes: int = REQUEST_BYTES_MAX
    answer_bytes: int = ANSWER_BYTES_MAX
    streams: int = STREAMS_MAX
    connections: int = CONNECTIONS_MAX
    calls: int = CALLS_MAX
    waiting_some: int = WAITING_SOME
    waiting_most: int = WAITING_MOST
    begun_a_turn: int = 32
    """Calls begun in one turn of the event loop, so that a burst leaves turns for other work.

    The same number of prioritized calls begins in addition.
    """
    work_a_turn: int = 1_024
    """Units of work that all connections together may cause in one turn of the event loop.

    A unit takes some microseconds: a frame, a header, a stream that is visited. The work of one
    frame is never cut short, and takes some thousand units at most.
    """
    work_a_turn_s: float = 0.005
    """Time for the same, where units take longer than they should."""
    work_of_connection: int = 256
    """Units that one connection has before others have their turn."""
    lookahead_bytes: int = LOOKAHEAD_BYTES
    held_bytes_of_connection: int = 64 << 20
    """Bytes of requests that are not complete, or not taken by their handlers."""
    held_bytes: int = 256 << 20
    """The same of all connections, in equal parts for the listeners."""
    header_list_bytes: int = 16 << 10
    """Headers of one call, each with 32 bytes more than it has."""
    handshake_s: float = 10.0
    """Time for the TLS handshake, and for the first frame after it."""
    handshakes: int = 1_024
    """TLS handshakes in flight on a listener. Further ones are closed."""
    handshakes_of_host: int = 512
    """The same of one host, so that one that shows nothing leaves room for the others."""
    keepalive_s: float = 30.0
    """Silence after which a connection is pinged, to detect dead hosts with open watches."""
    keepalive_timeout_s: float = 10.0
    """Time for an answer to a ping, after which the connection ends."""
    age_s: float | None = None
    """Age at which a connection accepts no more calls. None: no limit."""
    age_grace_s: float = AGE_GRACE_S
    unread_s: float = 10.0
    """Time for the last bytes of an ended stream to be taken, before it is reset."""


DEFAULT = Limits()
