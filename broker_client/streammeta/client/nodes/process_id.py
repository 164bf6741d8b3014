"""Random id of this process. It distinguishes two processes of a node with the same epoch."""

from __future__ import annotations

import functools
import os
import secrets


def own_process_id() -> str:
    """Return the id of this process: the same at each call, another one after a fork."""
    return _draw(os.getpid())


@functools.cache
def _draw(_pid: int) -> str:
    return secrets.token_hex(16)
