"""Memory guard: rejects calls by their memory class while the process is near its limit.

Messages between controllers do not pass it.
"""

from __future__ import annotations

from streammeta.controller.errors import MemoryHighError
from streammeta.controller.rpc.calls.memory_budget import SMALL_BYTES
from streammeta.controller.runtime.load.process_memory import Pressure, ProcessMemory
from streammeta.rpc.method_facts import MemoryClass

RETRY_AFTER_MS = 2_000
"""Time after which a rejected caller may retry, in milliseconds."""


class MemoryGuard:
    """Rejects calls by their memory class, their size, and the memory of the process."""

    def __init__(self, memory: ProcessMemory) -> None:
        self._memory = memory

    @property
    def is_easy(self) -> bool:
        """Whether every call is accepted."""
        return not self._memory.pressure

    def require(self, memory: MemoryClass, size: int = 0) -> None:
        """Accept a call whose request has `size` bytes.

        Raises:
            MemoryHighError: calls of this class and size are rejected at present.
        """
        pressure = self._memory.pressure
        # Heartbeats and calls that free memory pass always: rejecting them would make it worse.
        if pressure is Pressure.NONE or memory is MemoryClass.VITAL:
            return
        # Small ordinary calls still pass under high pressure, since they hardly allocate.
        is_large = memory is MemoryClass.ORDINARY and size > SMALL_BYTES
        if pressure is Pressure.FULL or memory is MemoryClass.BULK or is_large:
            raise MemoryHighError(self._memory.limit_bytes, self._memory.rss_bytes, RETRY_AFTER_MS)
