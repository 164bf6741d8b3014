"""Addresses of one controller's peers, from all sources, and the hosts of the voters.

Addresses change while nodes are offline, so all sources of an address are kept. One is in use, and
when it fails the next one is tried. Opens no connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from streammeta.controller.config import CONTROLLER_ID_MAX, ConfigError, check_reachable
from streammeta.controller.ids import NodeId
from streammeta.controller.quorum.voters import VoterSet
from streammeta.controller.runtime.interfaces import Endpoints


@dataclass(eq=False)
class PeerAddresses:
    """Addresses of one controller's peers, for other controllers and for clients.

    `own` are this controller's addresses. `seeds` and `overrides` name addresses of peers. An entry
    in `overrides` replaces all others and is never published, because it is only valid from this
    controller's position in the network.
    """

    _local: NodeId
    _own: Endpoints
    _seeds: Mapping[NodeId, str]
    _overrides: Mapping[NodeId, str]
    _voters: VoterSet = field(init=False, default_factory=VoterSet)
    _leader: tuple[NodeId, Endpoints] | None = field(init=False, default=None)
    _from_hello: dict[NodeId, str] = field(init=False, default_factory=dict)
    _for_tokens: dict[NodeId, str] = field(init=False, default_factory=dict)
    _in_use: dict[NodeId, str] = field(init=False, default_factory=dict)
    _failed: dict[NodeId, set[str]] = field(init=False, default_factory=dict)
    _known: dict[NodeId, list[str]] = field(init=False, default_factory=dict)
    """Addresses of a node from all sources, the likeliest first, computed on demand."""

    def set_voters(self, voters: VoterSet) -> None:
        """Use the addresses of the current voters."""
        self._voters = voters
        self._known.clear()

    def of_voters(self) -> set[str]:
        """Return all addresses of voters: those in the log, seeds, and overrides."""
        in_log = {voter.endpoint for voter in self._voters}
        return in_log.union(self._seeds.values(), self._overrides.values())

    def learn_leader(self, node_id: NodeId, endpoint: str, client_endpoint: str) -> None:
        """Record the leader's addresses from an answer, and ignore malformed and empty ones."""
        # An answer may omit one of the addresses. The known one stays valid then.
        known = self._leader_endpoints(node_id)
        self._leader = (
            node_id,
            Endpoints(
                _if_reachable(endpoint) or known.peers,
                _if_reachable(client_endpoint) or known.clients,
            ),
        )
        self._known.clear()

    def record_hello(self, node_id: NodeId, client_endpoint: str) -> None:
        """Record where clients reach a connected node, according to its hello."""
        endpoint = _if_reachable(client_endpoint)
        # The sender chooses its node id, and the table must not grow without bound.
        if endpoint is not None and node_id <= CONTROLLER_ID_MAX:
            self._from_hello[node_id] = endpoint

    def record_hello_answer(self, node_id: NodeId, token_endpoint: str) -> None:
        """Record where clients with tokens reach a node, according to its hello. Empty: nowhere."""
        endpoint = _if_reachable(token_endpoint)
        if endpoint is None:
            self._for_tokens.pop(node_id, None)
        else:
            self._for_tokens[node_id] = endpoint

    def in_use(self, node_id: NodeId) -> str | None:
        """Return the address for requests to this node, None if none is known."""
        # An override is the only right address from here, so nothing else may replace it.
        if node_id in self._overrides:
            return self._overrides[node_id]
        return self.published(node_id)

    def published(self, node_id: NodeId) -> str | None:
        """Return the address for peers to publish to others, None if none is known."""
        if node_id == self._local:
            return self._own.peers
        candidates = self._candidates(node_id)
        if not candidates:
            return None
        # The address in use stays while it is possible: switching would close a working connection.
        if self._in_use.get(node_id) not in candidates:
            self._in_use[node_id] = candidates[0]
        return self._in_use[node_id]

    def for_clients(self, node_id: NodeId) -> str | None:
        """Return where clients reach this node, None if unknown.

        The leader's own statement is newer than its record in the log. An observer has no record
        and states its address when it connects.
        """
        if node_id == self._local:
            return self._own.clients
        voter = self._voters.find(node_id)
        return (
            self._leader_endpoints(node_id).clients
            or (voter.client_endpoint if voter else None)
            or self._from_hello.get(node_id)
        )

    def for_tokens(self, node_id: NodeId) -> str | None:
        """Return where clients with tokens reach this node, None if nowhere or unknown.

        It is known for every node that this one has connected to, including the leader.
        """
        return self._own.tokens if node_id == self._local else self._for_tokens.get(node_id)

    def is_candidate(self, node_id: NodeId, endpoint: str) -> bool:
        """Return whether this may still be the node's address."""
        if node_id in self._overrides:
            return endpoint == self._overrides[node_id]
        return endpoint in self._candidates(node_id)

    def record_success(self, node_id: NodeId) -> None:
        """Record that the address in use led to the node."""
        self._failed.pop(node_id, None)

    def record_failure(self, node_id: NodeId, endpoint: str) -> bool:
        """Record that an address did not lead to the node, and use another one from now on.

        Returns whether every known address has failed since the last success.
        """
        candidates = self._candidates(node_id)
        # There is no other address to try, so one failure means that all have failed.
        if node_id in self._overrides or len(candidates) < 2:
            return True
        failed = self._failed.setdefault(node_id, set())
        failed.add(endpoint)
        if self._in_use.get(node_id) == endpoint and endpoint in candidates:
            # In turn, so that every source is tried before one is tried again.
            following = candidates.index(endpoint) + 1
            self._in_use[node_id] = candidates[following % len(candidates)]
        return failed.issuperset(candidates)

    def _candidates(self, node_id: NodeId) -> list[str]:
        """Return all possible addresses of a node, the likeliest first."""
        known = self._known.get(node_id)
        if known is None:
            voter = self._voters.find(node_id)
            # The log is agreed by a majority. An answer is newer, but comes from one node. Seeds
            # may be old.
            found = [
                voter.endpoint if voter else None,
                self._leader_endpoints(node_id).peers,
                self._seeds.get(node_id),
            ]
            known = self._known[node_id] = list(dict.fromkeys(filter(None, found)))
        return known

    def _leader_endpoints(self, node_id: NodeId) -> Endpoints:
        """Return the addresses of this node that answers named for the leader."""
        return self._leader[1] if self._leader and self._leader[0] == node_id else Endpoints()


def _if_reachable(endpoint: str) -> str | None:
    """Return an address that others can connect to, None for anything else."""
    try:
        check_reachable("endpoint", endpoint)
    except ConfigError:
        return None
    return endpoint


LOOK_INTERVAL_S = 30.0
"""Interval between two look-ups of the names, in seconds."""

_MAPPED = "::ffff:"

Resolve = Callable[[str], Awaitable[Iterable[str]]]


class VoterHosts:
    """IP addresses of the hosts in a set of HOST:PORT addresses, which may change."""

    def __init__(self, addresses: Callable[[], Iterable[str]], resolve: Resolve | None = None):
        self._addresses = addresses
        self._resolve = resolve or _resolve
        self._resolved: dict[str, frozenset[str]] = {}

    def __contains__(self, host: str) -> bool:
        """Return whether an IP address is a voter's, as far as names are resolved."""
        plain = host.removeprefix(_MAPPED)
        return any(plain in self._known(name) for name in self._names())

    async def run(self) -> None:
        """Resolve names repeatedly until cancelled. A failed look-up keeps the old addresses."""
        while True:
            for name in self._names():
                if not _is_ip(name):
                    with contextlib.suppress(OSError, UnicodeError):  # UnicodeError: invalid name
                        self._resolved[name] = frozenset(await self._resolve(name))
            await asyncio.sleep(LOOK_INTERVAL_S)

    def _names(self) -> set[str]:
        return {address.rpartition(":")[0].strip("[]") for address in self._addresses()}

    def _known(self, name: str) -> frozenset[str]:
        return frozenset((name,)) if _is_ip(name) else self._resolved.get(name, frozenset())


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _resolve(name: str) -> Iterable[str]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return {str(address[0]) for *_, address in found}
