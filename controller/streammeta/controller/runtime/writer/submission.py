"""Appended changes, and the conditions under which their answers may be returned."""

import asyncio
from collections.abc import Callable, Sequence

from streammeta.controller.metadata.api.answers import Answer
from streammeta.controller.runtime.interfaces import ReplicatedLog
from streammeta.controller.runtime.writer.marker_lease import MarkerLease


class Submission:
    """Mutations that were decided and appended together, and the wait for their commit."""

    def __init__(
        self,
        answers: Sequence[Answer],
        offset: int,
        waiting: asyncio.Future[None] | None,
        log: ReplicatedLog,
        lease: MarkerLease | None,
        *,
        is_proven: bool,
    ) -> None:
        """`is_proven` says whether the commit itself proves that this node led.

        The answers require a valid `lease`, if one is passed.
        """
        self.answers = answers
        self.offset = offset
        self._waiting = waiting
        self._log = log
        self._lease = lease
        self._is_proven = is_proven

    def tell_flushed(self, told: Callable[[], None]) -> None:
        """Call `told` when everything is on this node's disk, if it leads until then."""
        self._log.tell_flushed(self.offset, told)

    async def committed(self) -> None:
        """Return when the answers may be returned.

        Raises:
            NotLeaderError: this node did not lead when it decided.
            OutcomeUnknownError: leadership or the lease was lost before the commit.
        """
        if not self._is_proven:
            # The last mutation appended nothing, so no commit proves that this node led.
            await self._log.read_barrier()
        if self._waiting is not None:
            await self._waiting
        if self._lease is not None:
            self._lease.require_for_answer()
