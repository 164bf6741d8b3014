"""Choice of the broker that Metadata names as the leader of a partition without a leader. Pure.

Every broker computes it from its own view. A wrong choice costs nothing, because all of them serve.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

_REMEMBERED = 100_000


@lru_cache(_REMEMBERED)
def choose_broker(nodes: Sequence[int], topic_id: str, partition: int) -> int:
    """Return one of the nodes, a tuple, for a partition; -1 without any.

    A node that leaves or joins changes the choice only for its own partitions.
    """

    def weight(node_id: int) -> bytes:
        name = f"{topic_id}/{partition}/{node_id}".encode()
        return hashlib.blake2b(name, digest_size=8).digest()

    return max(nodes, key=weight, default=-1)
