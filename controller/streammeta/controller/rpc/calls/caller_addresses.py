"""Addresses of controllers that a caller can use.

A listener accepts either certificates or tokens, so a caller with a token only learns token
listeners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from streammeta.controller.runtime.replication import operations
from streammeta.controller.runtime.replication.quorum_driver import QuorumDriver
from streammeta.controller.trust.authenticator import came_by_token

OBSERVERS_MAX = 1_000
"""Maximum number of observers that an answer lists."""


def described(driver: QuorumDriver) -> operations.QuorumDescription:
    """Return the quorum with addresses that the current caller can use. Unknown ones are empty."""
    seen = driver.describe()
    # Anyone with a directory may observe, and an answer must stay within a message.
    seen = replace(seen, observers=seen.observers[:OBSERVERS_MAX])
    # Callers with certificates use the addresses that the quorum itself publishes.
    if not came_by_token():
        return seen

    def with_token_endpoints(
        replicas: Sequence[operations.ReplicaDescription],
    ) -> tuple[operations.ReplicaDescription, ...]:
        return tuple(
            replace(replica, endpoint=driver.endpoints(replica.key.node_id).tokens or "")
            for replica in replicas
        )

    return replace(
        seen,
        voters=with_token_endpoints(seen.voters),
        observers=with_token_endpoints(seen.observers),
    )


def leader_endpoint(driver: QuorumDriver) -> str:
    """Return the leader's address for the current caller, empty if it is unknown."""
    leader = driver.leader
    if leader is None:
        return ""
    return driver.endpoints(leader[0]).tokens or "" if came_by_token() else leader[1]
