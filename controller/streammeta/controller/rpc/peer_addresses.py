"""Where each peer may be reached: what was configured, what the voters say, what answers told.

Addresses change while nodes are away, so none of the sources is right for ever. All are kept, one
is in use, and when it fails the next is tried. Knows no connection.
"""

from __future__ import annotations

from collections.abc import Mapping

from streammeta.controller.config import ConfigError, check_reachable
from streammeta.controller.ids import NodeId
from streammeta.controller.quorum.voters import VoterSet


class PeerAddresses:
    """The address book of one controller.

    `endpoint` is where this controller itself is reached. An entry of `overrides` is used instead
    of anything else, and is told to nobody: it holds for this controller's place in the network
    alone.
    """

    def __init__(
        self,
        local: NodeId,
        endpoint: str,
        seeds: Mapping[NodeId, str],
        overrides: Mapping[NodeId, str],
    ) -> None:
        self._local = local
        self._endpoint = endpoint
        self._seeds = seeds
        self._overrides = overrides
        self._voters = VoterSet()
        self._leader: tuple[NodeId, str] | None = None
        self._in_use: dict[NodeId, str] = {}
        self._failed: dict[NodeId, set[str]] = {}

    def set_voters(self, voters: VoterSet) -> None:
        """Take over the addresses of the voters now in force."""
        self._voters = voters

    def learn_leader(self, node_id: NodeId, endpoint: str) -> None:
        """Note where an answer says that the leader is; what can't be an address is ignored."""
        try:
            check_reachable("leader_endpoint", endpoint)
        except ConfigError:
            return
        self._leader = (node_id, endpoint)

    def in_use(self, node_id: NodeId) -> str | None:
        """Where to send what is meant for this node; None if nobody has told."""
        if node_id in self._overrides:
            return self._overrides[node_id]
        return self.published(node_id)

    def published(self, node_id: NodeId) -> str | None:
        """Where to send others who look for this node; None if nobody has told."""
        if node_id == self._local:
            return self._endpoint
        candidates = self._candidates(node_id)
        if not candidates:
            return None
        if self._in_use.get(node_id) not in candidates:
            self._in_use[node_id] = candidates[0]
        return self._in_use[node_id]

    def is_candidate(self, node_id: NodeId, endpoint: str) -> bool:
        """Whether this may still be the node's address."""
        if node_id in self._overrides:
            return endpoint == self._overrides[node_id]
        return endpoint in self._candidates(node_id)

    def worked(self, node_id: NodeId) -> None:
        """Note that the address in use led to the node."""
        self._failed.pop(node_id, None)

    def failed(self, node_id: NodeId, endpoint: str) -> bool:
        """Note that an address did not lead to the node, and use another from now on.

        Returns whether every known address has failed since one worked last.
        """
        candidates = self._candidates(node_id)
        if node_id in self._overrides or len(candidates) < 2:
            return True
        failed = self._failed.setdefault(node_id, set())
        failed.add(endpoint)
        if self._in_use.get(node_id) == endpoint and endpoint in candidates:
            following = candidates.index(endpoint) + 1
            self._in_use[node_id] = candidates[following % len(candidates)]
        return failed.issuperset(candidates)

    def _candidates(self, node_id: NodeId) -> list[str]:
        """Every address that this node may have, the likeliest first."""
        voter = self._voters.find(node_id)
        told = [
            voter.endpoint if voter else None,
            self._leader[1] if self._leader and self._leader[0] == node_id else None,
            self._seeds.get(node_id),
        ]
        return list(dict.fromkeys(filter(None, told)))
