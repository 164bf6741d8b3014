"""Disk space as a leader's driver sees it: whether writes are rejected, and with which error.

Entries appended before the disk filled up may still be committed from the reserves. If they are not
after a while, their callers get an error. Reads never wait for disk space.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from streammeta.controller.ids import NodeId
from streammeta.controller.runtime.quorum_errors import NoDiskSpaceError
from streammeta.storage.durable_files import DiskFullError

_log = structlog.get_logger(component="quorum")


class DiskSpace:
    """Disk space of this node, and of a majority of the voters it leads."""

    def __init__(
        self,
        node_id: NodeId,
        patience_ms: int,
        *,
        on_short: Callable[[], None],
        on_impatient: Callable[[], None],
    ) -> None:
        """Set the callbacks.

        `on_short` is called when disk space runs out, `on_impatient` when that has lasted for
        `patience_ms`.
        """
        self._node_id = node_id
        self._patience_s = patience_ms / 1000
        self._on_short = on_short
        self._on_impatient = on_impatient
        self._own: DiskFullError | None = None
        self._full_voters: tuple[NodeId, ...] = ()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_disk_full(self) -> bool:
        """Whether this node's disk is full."""
        return self._own is not None

    @property
    def is_short(self) -> bool:
        """Whether appended entries may wait for disk space here or on other voters."""
        return self._own is not None or bool(self._full_voters)

    def require(self) -> None:
        """Raise NoDiskSpaceError while writes can't be accepted."""
        # A full majority is reported first: the next leader could not write either.
        # Its own full disk alone is reported below, with the error of the write.
        if set(self._full_voters) - {self._node_id}:
            full = ", ".join(map(str, self._full_voters))
            raise NoDiskSpaceError(
                f"the disks of controllers {full} are full, and the other fetching voters are not "
                "a majority: writes are accepted again when there is room"
            )
        if self._own is not None:
            raise NoDiskSpaceError(
                f"the disk of controller {self._node_id} is full ({self._own}): writes are "
                "accepted again when there is room, or by the next leader"
            )

    def on_disk(self, error: DiskFullError | None) -> None:
        """Record the state of this node's disk: the failed write, or None when it has room."""
        if error is None:
            _log.info("disk_has_room_again")
        else:
            _log.error("disk_full", reason=str(error), effect="writes are rejected, reads continue")
        self._own = error
        self._check()

    def on_majority(self, full_voters: tuple[NodeId, ...]) -> None:
        """Record the voters whose full disks prevent this leader from committing."""
        if full_voters:
            _log.error(
                "majority_full",
                controllers=list(full_voters),
                effect="writes are rejected, reads continue",
            )
        elif self._full_voters:
            _log.info("majority_has_room_again")
        self._full_voters = full_voters
        self._check()

    def leadership_ended(self) -> None:
        """Forget the other voters, whose disks only a leader knows."""
        self._full_voters = ()
        self._check()

    def close(self) -> None:
        """Cancel the pending callback."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        if not self.is_short:
            self.close()
            self._timer = None
            return
        # At once, for reads: they must not wait for entries without a disk.
        self._on_short()
        # The first shortage counts. A change of the full voters must not restart the patience.
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._patience_s, self._on_impatient)
