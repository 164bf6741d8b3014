"""The calls that clients make of a simulated node's controller, and their outcomes.

Decides nothing. Whatever an answer speaks of must be committed when it leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streammeta.controller.errors import ApiError, NotLeaderError, OutcomeUnknownError
from streammeta.controller.quorum.events import ReadIndexRequested
from streammeta.controller.rpc.watch.service import WatchHandler
from streammeta.controller.runtime.writer.controller import Answered as ControllerAnswered
from tests.linearizability.models import Delete, Get
from tests.sim.sim_controller import SimController
from tests.sim.sim_store import Answer, Keyed, Request
from tests.sim.sim_time import violated

if TYPE_CHECKING:
    from tests.sim.sim_node import SimNode

_NO_KEY = "absent"
CALL_MS = 400
"""How long a session's read may wait for what it asks to see; clients give up earlier."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer holds as of `offset`."""

    answer: Answer
    offset: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was done; `leader` is the one to ask instead, if known."""

    leader: int | None


@dataclass(frozen=True, slots=True)
class Unknown:
    """Leadership was lost before it was committed."""


Outcome = Answered | Refused | Unknown
Reply = Callable[[Outcome], None]


class SimService:
    def __init__(self, node: SimNode) -> None:
        self._node = node
        self.controller = SimController(node)
        self.watches = WatchHandler(self.controller.changes)
        self._probes = 0

    # -- calls

    def write(self, key: str, request: Request, reply: Reply) -> Callable[[], None]:
        """Take a mutation; the returned call gives it up."""
        return self._serve(self._write(key, request), reply, self._committed)

    async def _write(self, key: str, request: Request) -> ControllerAnswered:
        answered = await self.controller.write(_keyed(key, request))
        if (restoration := self._node.world.restoration) is not None:
            restoration.check_answer(key, request, answered)
        return answered

    def read(self, key: str, request: Request, reply: Reply) -> Callable[[], None]:
        return self._serve(self.controller.read(_keyed(key, request)), reply, self._committed)

    def read_after(
        self, key: str, request: Request, at_least: int, reply: Reply
    ) -> Callable[[], None]:
        """Take a session's read, which must not be older than what the session has seen."""
        call = self.controller.read(_keyed(key, request), at_least, CALL_MS)
        return self._serve(call, reply, at_least)

    def probe(self) -> None:
        """Ask for proofs of leadership: the core, whether this node may answer or not, and it all.

        By a read, and by a write that is refused: neither appends anything.
        """
        self._probes += 1
        self._node.step(ReadIndexRequested(-self._probes))
        self.read(_NO_KEY, Get(), ignore)
        self.write(_NO_KEY, Delete(), ignore)

    def begin(self, call: Coroutine[Any, Any, Any], on_end: Callable[[Any], None]) -> None:
        """Make a call of any kind; `on_end` gets what it returned, nothing if it was refused."""

        def ended(task: asyncio.Task[Any]) -> None:
            if not task.cancelled() and task.exception() is None:
                on_end(task.result())

        self._node.loop.create_task(call).add_done_callback(ended)

    # -- answers

    def _serve(
        self, call: Coroutine[Any, Any, ControllerAnswered], reply: Reply, at_least: int
    ) -> Callable[[], None]:
        """Make a call whose answer must know of everything below `at_least`."""

        def ended(task: asyncio.Task[ControllerAnswered]) -> None:
            if task.cancelled():
                return
            error = task.exception()
            if error is None:
                self._answer(task.result(), reply, at_least)
            elif isinstance(error, ApiError):
                reply(self._refusal(error))

        task = self._node.loop.create_task(call)
        task.add_done_callback(ended)

        def give_up() -> None:
            task.cancel()

        return give_up

    @property
    def _committed(self) -> int:
        """What any node calls committed by now: a caller may have heard of it."""
        return self._node.world.ghost.ledger.end

    def _answer(self, answered: ControllerAnswered, reply: Reply, at_least: int) -> None:
        if not at_least <= answered.offset <= self._committed:
            violated(
                "an answer speaks of what is committed, and of all that was",
                f"{self._node.key} answers as of {answered.offset}, committed is "
                f"{self._committed}, and {at_least} was before it was asked",
            )
        answer: Any = answered.answer
        reply(Answered(answer, answered.offset))

    def _refusal(self, error: ApiError) -> Outcome:
        if isinstance(error, OutcomeUnknownError):
            return Unknown()
        if isinstance(error, NotLeaderError):
            return Refused(error.leader_id if error.leader_id >= 0 else None)
        self._node.world.count("requests refused by a leader")
        return Refused(None)


def ignore(outcome: Outcome) -> None:
    """What is wrong with an answer shows before it gets here, what became of it at a later look."""


def _keyed(key: str, request: Request) -> Any:
    return Keyed(key, request)
