"""Changes that are appended, and the conditions under which their answers may be given."""

import asyncio
from collections.abc import Callable, Sequence

from streammeta.controller.metadata.api.answers import Answer
from streammeta.controller.runtime.interfaces import ReplicatedLog
from streammeta.controller.runtime.writer.marker_lease import MarkerLease


class Submission:
    """Mutations that were decided and appended together, and the wait for them to be committed."""

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
        """Take what was decided; `is_proven`: its commit proves that this node led.

        The answers may be given while `lease` is held, None: at any time.
        """
        self.answers = answers
        self.offset = offset
        self._waiting = waiting
        self._log = log
        self._lease = lease
        self._is_proven = is_proven

    def tell_flushed(self, told: Callable[[], None]) -> None:
        """Call `told` when all is on this node's disk, if it leads until then."""
        self._log.tell_flushed(self.offset, told)

    async def committed(self) -> None:
        """Return when the answers may be given.

        Raises:
            NotLeaderError: this node did not lead when it decided.
            OutcomeUnknownError: leadership or the lease was lost before all was committed.
        """
        if not self._is_proven:
            # The last mutation appended nothing whose commit would prove that this node led.
            await self._log.read_barrier()
        if self._waiting is not None:
            await self._waiting
        if self._lease is not None:
            self._lease.require_for_answer()
