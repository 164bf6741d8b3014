"""Memory guard: calls that are refused while the process holds much memory.

First what can wait and takes much: snapshots, watches, scans and large requests. Then, at the
limit, everything but what keeps the cluster alive, what operators need, and what takes things out
of the map. The quorum does not come this way.
"""

from __future__ import annotations

from enum import Enum, auto

from streammeta.controller.errors import MemoryHighError
from streammeta.controller.rpc.calls.memory_budget import SMALL_BYTES
from streammeta.controller.runtime.load.process_memory import Pressure, ProcessMemory

RETRY_AFTER_MS = 2_000
"""Time after which memory may be free again, in milliseconds."""


class Use(Enum):
    """Kinds of calls by what they do to memory."""

    VITAL = auto()
    """Never refused."""
    COMMIT = auto()
    """Refused at the limit, however large."""
    ORDINARY = auto()
    """Refused at the limit, and before it if the request is large."""
    BULK = auto()
    """Refused before the limit."""


_VITAL = (
    *("QuorumService.AddVoter", "QuorumService.RemoveVoter", "QuorumService.DescribeQuorum"),
    *("AdminService.DescribeCluster", "AdminService.TransferLeadership"),
    *("NodeService.Heartbeat", "NodeService.UnregisterNode"),
    *("NodeService.LockNode", "NodeService.UnlockNode"),
    *("StreamService.CloseStreams", "StreamService.TrimStreams", "StreamService.DeleteStreams"),
    *("StreamService.AbandonUploads", "KVService.DeleteKVs"),
    "ObjectService.DeleteNamedObjects",
)
_COMMITS = (
    *("ObjectService.CommitStreamSetObject", "ObjectService.CommitStreamObject"),
    "ObjectService.CommitPipeline",
)
_BULK = (
    *("MetadataService.GetSnapshot", "MetadataService.Watch"),
    *("AdminService.StateHash", "AdminService.TakeSnapshot"),
    *("NodeService.ListStreamSetObjects", "StreamService.DescribeStreams"),
    *("ObjectService.DescribeObjects", "ObjectService.CheckObjects", "KVService.ListKVs"),
    "ObjectService.DescribeNamedObjects",
)
_HEALTH = "grpc.health.v1.Health."
USES = {
    f"streammeta.v1.{name}": use
    for use, names in ((Use.VITAL, _VITAL), (Use.COMMIT, _COMMITS), (Use.BULK, _BULK))
    for name in names
}
"""Uses by full name of the method; those left out are ordinary."""


def use_of(method: str) -> Use:
    """Return what calls of a method do to memory."""
    return Use.VITAL if method.startswith(_HEALTH) else USES.get(method, Use.ORDINARY)


class MemoryGuard:
    """Refuses calls by their use, their size, and the memory of the process."""

    def __init__(self, memory: ProcessMemory) -> None:
        self._memory = memory

    @property
    def is_easy(self) -> bool:
        """Whether nothing is refused."""
        return not self._memory.pressure

    def require(self, use: Use, size: int = 0) -> None:
        """Let a call of `size` bytes go on.

        Raises:
            MemoryHighError: it is one of those that are refused now.
        """
        pressure = self._memory.pressure
        if pressure is Pressure.NONE or use is Use.VITAL:
            return
        is_large = use is Use.ORDINARY and size > SMALL_BYTES
        if pressure is Pressure.FULL or use is Use.BULK or is_large:
            raise MemoryHighError(self._memory.limit_bytes, self._memory.rss_bytes, RETRY_AFTER_MS)
