"""File descriptors of the process: as many as it may have, some of them kept from clients.

A process that has none left can't open a file of its log, nor reach a peer; so connections of
clients are limited to what leaves it enough.
"""

from __future__ import annotations

import resource

KEPT = 256
"""Descriptors kept for the journal, snapshots, the bucket and the peers."""

KEPT_FOR_HTTP = 128
"""Descriptors kept besides for the listener for HTTP: its connections and handshakes."""

CONNECTIONS_MIN = 16
"""Connections that are allowed however few descriptors there are."""

_ENOUGH = 1 << 20


def raise_limit() -> int:
    """Raise the limit of this process as far as it may be; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _ENOUGH if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def connections_within(limit: int, most: int, listeners: int, *, serves_http: bool = False) -> int:
    """Return the number of connections that each of `listeners` for clients may have.

    It is `most` if there is room for it beside what is kept, also for HTTP if that is served.
    """
    kept = KEPT + KEPT_FOR_HTTP if serves_http else KEPT
    return max(CONNECTIONS_MIN, min(most, limit - kept) // max(1, listeners))
