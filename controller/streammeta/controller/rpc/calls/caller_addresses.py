"""Addresses of controllers as a caller can use them.

A listener takes either certificates or tokens, so a caller with a token is told of the listeners
for tokens alone. Knows no particular request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from streammeta.controller.runtime.replication.operations import (
    QuorumDescription,
    ReplicaDescription,
)
from streammeta.controller.runtime.replication.quorum_driver import QuorumDriver
from streammeta.controller.trust.authenticator import came_by_token

OBSERVERS_MAX = 1_000
"""Maximum number of observers that an answer lists."""


def described(driver: QuorumDriver) -> QuorumDescription:
    """Return the quorum with the addresses that this task's caller can use; empty if unknown."""
    seen = driver.describe()
    seen = replace(seen, observers=seen.observers[:OBSERVERS_MAX])
    if not came_by_token():
        return seen

    def told(replicas: Sequence[ReplicaDescription]) -> tuple[ReplicaDescription, ...]:
        return tuple(
            replace(each, endpoint=driver.endpoints(each.key.node_id).tokens or "")
            for each in replicas
        )

    return replace(seen, voters=told(seen.voters), observers=told(seen.observers))


def leader_endpoint(driver: QuorumDriver) -> str:
    """Return where this task's caller reaches the leader; empty if that is not known."""
    leader = driver.leader
    if leader is None:
        return ""
    return driver.endpoints(leader[0]).tokens or "" if came_by_token() else leader[1]
