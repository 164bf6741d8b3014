"""Detection of a process that was forked from one with connections to controllers.

The threads of gRPC and of stores exist only in the parent. In the child every call would wait
forever, even calls of a client created there.
"""

from __future__ import annotations

import os

from streammeta.client.errors import ForkedProcessError

_has_connected = False
_is_forked = False


def note_connection() -> None:
    """Record that this process has connections, so that its forks can't have any."""
    global _has_connected  # noqa: PLW0603 - a fact of the process
    _has_connected = True


def check_not_forked(call: str) -> None:
    """Raise `ForkedProcessError` in a process that was forked from one with connections."""
    if _is_forked:
        raise ForkedProcessError(call)


def _note_fork() -> None:
    global _is_forked  # noqa: PLW0603 - a fact of the process
    _is_forked = _is_forked or _has_connected


os.register_at_fork(after_in_child=_note_fork)
