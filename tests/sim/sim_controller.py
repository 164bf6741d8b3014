"""The product's active controller in a simulated node, and the calls that clients make of it.

Whatever a replica has replayed and may not undo must be what the ledger has; that is looked at
after every piece of delivery, every undo and every exchange of the state.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from streammeta.controller.errors import ApiError, NotLeaderError, OutcomeUnknownError
from streammeta.controller.ids import SnapshotId
from streammeta.controller.quorum.events import ReadIndexRequested
from streammeta.controller.quorum.messages import Batch
from streammeta.controller.rpc.watch.service import WatchHandler
from streammeta.controller.runtime.interfaces import SnapshotPoint
from streammeta.controller.runtime.persistence.metadata_checkpoint import LoadedMetadata
from streammeta.controller.runtime.replication.log_time import LogTime
from streammeta.controller.runtime.writer.change_feed import ChangeFeed
from streammeta.controller.runtime.writer.controller import Answered as ControllerAnswered
from streammeta.controller.runtime.writer.controller import MetadataController
from tests.linearizability.models import Delete, Get
from tests.sim.sim_store import Answer, Keyed, Request, Store, StoreImage, decode_image
from tests.sim.sim_time import check, violated

if TYPE_CHECKING:
    from tests.sim.sim_node import SimNode


_DAY_MS = 86_400_000
_EPOCH_MS = 1_000 * _DAY_MS
_WRONG_FOR_MS = 300


class MapClock:
    """What a node's wall shows; leaders' clocks differ, and are wrong at times."""

    def __init__(self, node: SimNode) -> None:
        self._node = node

    def monotonic_ms(self) -> int:
        return self._node.now()

    def wall_ms(self) -> int:
        """Milliseconds since some time long ago."""
        return _EPOCH_MS + self._node.now() + self._error_ms()

    def _error_ms(self) -> int:
        """Return how far the clock is off, which changes every now and then."""
        world = self._node.world
        if not world.profile.wrong_clocks:
            return 0
        span = world.timeline.now // _WRONG_FOR_MS
        rng = random.Random(f"{world.seed}/{self._node.node_id}/{span}")
        if rng.random() >= world.profile.wrong_clocks:
            return 0
        return rng.choice((-1, 1)) * rng.choice((3_700_000, 30 * _DAY_MS, 400 * _DAY_MS))


class WatchedTime(LogTime):
    """Log time of a simulated node: within a term no clock moves it by more than a tenth."""

    _seen: tuple[int, int] | None = None

    def begin_term(self) -> None:
        super().begin_term()
        self._seen = None

    def now_ms(self) -> int:
        now_ms, timer_ms = super().now_ms(), self._clock.monotonic_ms()
        first_ms, began_ms = self._seen = self._seen or (now_ms, timer_ms)
        passed_ms = timer_ms - began_ms
        check(
            abs(now_ms - first_ms - passed_ms) <= passed_ms // 10 + 1,
            "log time follows the timer",
            f"{now_ms - first_ms} ms in {passed_ms} ms",
        )
        return now_ms


class SimController(MetadataController):
    """The state machine of one life of a node, with a `Store` for a map."""

    def __init__(self, node: SimNode) -> None:
        restoration = node.world.restoration
        super().__init__(
            Store(node.levels),  # type: ignore[arg-type]
            MapClock(node),
            lease=None if restoration is None else restoration.lease_of(node),
        )
        self.log_time = WatchedTime(MapClock(node))
        self._node = node
        self._changes = ChangeFeed(node.world.ring_bytes)

    @property
    def store(self) -> Store:
        return cast(Store, self._metadata)

    # -- what the driver asks

    def on_committed(self, batches: Sequence[Batch], high_watermark: int) -> None:
        super().on_committed(batches, high_watermark)
        self._compare()

    def on_leadership_claimed(self, epoch: int) -> None:
        self._node.world.count("leaderships claimed")
        super().on_leadership_claimed(epoch)

    def on_leadership_lost(self) -> None:
        self._node.world.counts["entries undone"] += len(self._uncommitted)
        super().on_leadership_lost()
        self._compare()

    def load(self, file: BinaryIO, snapshot_id: SnapshotId) -> Callable[[], None]:
        image = decode_image(file.read())
        return partial(self._exchange, image)

    def _exchange(self, image: StoreImage) -> None:
        self._node.world.count("snapshots loaded")
        self._replace(LoadedMetadata(Store.of(image, self._node.levels), image.log_hash))  # type: ignore[arg-type]
        ghost = self._node.world.ghost
        ghost.check_snapshot(self._node.key, image.snapshot_id, image.voters)
        ghost.ledger.check_image(self._node.key, self.image_of(image))
        self._compare()

    def image_of(self, image: StoreImage) -> StoreImage:
        """Return the image of what an image was read to."""
        return self.store.image(image.snapshot_id, image.voters, image.log_hash)

    # -- checkpoints

    def image(self, point: SnapshotPoint) -> StoreImage:
        """Return an image of what is committed; what is not is taken back for the moment."""
        self._metadata.undo_to(self._committed_end)
        try:
            return self.store.image(point.snapshot_id, point.voters, self._committed_log_hash())
        finally:
            for offset, records in self._uncommitted:
                self._metadata.apply(offset, records)

    def _committed_log_hash(self) -> bytes:
        for offset, before in self._log_hash._before:
            if offset >= self._committed_end:
                return before
        return self._log_hash.value

    # -- comparing

    def _compare(self) -> None:
        """Nothing is uncommitted here: then all of it is what the ledger has."""
        levels, level = self._node.levels, self.store.level
        check(levels.include(level), "a version runs at its own levels", f"{level}, has {levels}")
        end = self._committed_end
        if self._metadata.applied_end_offset <= end:
            ledger = self._node.world.ghost.ledger
            ledger.check_state(self._node.key, end, self.store.hash, self._log_hash.value)


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
