"""Registry of the software versions of connected controllers, from their hellos.

A controller fetches from the leader over a connection that it opened itself, so the leader knows
every active replica. Disconnected controllers are removed, because they may return with another
version.
"""

from __future__ import annotations

from collections.abc import Iterable

from streammeta.controller.features import Software
from streammeta.controller.ids import NodeId


class PeerVersions:
    """Software of this controller and of those connected to it."""

    def __init__(self, local: NodeId, own: Software) -> None:
        self._local = local
        self._own = own
        self._connected: dict[NodeId, list[Software]] = {}
        """Software of each open connection, the newest last."""

    def connected(self, node_id: NodeId, software: Software) -> None:
        """Record a connection made by a controller."""
        self._connected.setdefault(node_id, []).append(software)

    def disconnected(self, node_id: NodeId, software: Software) -> None:
        """Record the end of a controller's connection."""
        # A node may have a control and a bulk connection, and reconnects before the old ones end.
        self._connected[node_id].remove(software)
        if not self._connected[node_id]:
            del self._connected[node_id]

    def of(self, node_id: NodeId) -> Software | None:
        """Return a controller's software, None while it is not connected."""
        if node_id == self._local:
            return self._own
        known = self._connected.get(node_id)
        # The newest connection is of the process that runs now.
        return known[-1] if known else None

    def blocking(self, level: int, voters: Iterable[NodeId]) -> dict[NodeId, str]:
        """Return the controllers that can't run at a level, or may not be able to, with the reason.

        These are voters, connected or not, and connected observers.
        """
        # Observers count as well: they apply the same log and would stop at an unknown record.
        asked = {self._local, *self._connected, *voters}
        reasons = {node_id: self._missing(level, node_id) for node_id in sorted(asked)}
        return {node_id: reason for node_id, reason in reasons.items() if reason is not None}

    def _missing(self, level: int, node_id: NodeId) -> str | None:
        software = self.of(node_id)
        if software is None:
            return "is a voter that is not connected, so its version is unknown"
        return None if software.levels.include(level) else f"runs {software}"
