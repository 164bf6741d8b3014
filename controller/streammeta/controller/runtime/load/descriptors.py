"""File descriptors of the process: their limit, and the share reserved from client connections.

A process without free descriptors can neither open a log file nor connect to a peer, so client
connections are limited.
"""

from __future__ import annotations

import resource

KEPT = 256
"""Descriptors reserved for the journal, snapshots, the bucket and the peers."""

KEPT_FOR_HTTP = 128
"""Additional descriptors reserved for the HTTP listener's connections and handshakes."""

CONNECTIONS_MIN = 16
"""Connections that are always allowed, even with very few descriptors."""

_ENOUGH = 1 << 20


def raise_limit() -> int:
    """Raise this process's descriptor limit as far as allowed, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    # A higher soft limit than needed is left as the operator set it.
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _ENOUGH if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def connections_within(limit: int, most: int, listeners: int, *, serves_http: bool = False) -> int:
    """Return how many connections each of `listeners` for clients may have.

    This is `most` if that leaves the reserved descriptors free, including those for HTTP if served.
    """
    kept = KEPT + KEPT_FOR_HTTP if serves_http else KEPT
    # Divided by the listeners, because each enforces its own limit.
    return max(CONNECTIONS_MIN, min(most, limit - kept) // max(1, listeners))
