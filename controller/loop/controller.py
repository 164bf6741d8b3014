"""The single writer: orders requests, replays them, replicates them, answers when committed.

Every mutation is decided against the latest state of the map, including what is not committed yet,
replayed at once, appended to the log, and answered when the high watermark passes it. An answer
that changes nothing waits for what it was decided on. Losing leadership undoes what was replayed
and not committed. A request's error is only ever a reply; it never touches leadership.

Runs on one event loop; holds no rule of its own: those are in `metadata` and `quorum`.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from controller.errors import (
    InvalidRequestError,
    InvariantError,
    LimitExceededError,
    NotLeaderError,
    OutcomeUnknownError,
)
from controller.loop.clock import Clock
from controller.loop.parking import ParkedAnswers
from controller.metadata.answers import Answer
from controller.metadata.cluster_map import ClusterMap
from controller.metadata.frozen import FrozenMap
from controller.metadata.requests import ReadRequest, WriteRequest
from controller.quorum.messages import Batch, BatchKind
from controller.records.codec import decode_records, encode_records
from controller.records.record import Record

PARKED_ANSWERS_MAX = 100_000
"""Answers that may wait for the high watermark; beyond, writes are refused."""

_log = structlog.get_logger(component="loop")


class ReplicatedLog(Protocol):
    """What the loop asks of the quorum."""

    @property
    def next_offset(self) -> int:
        """Offset the next appended payload takes."""
        ...

    def append(self, payloads: Sequence[bytes], *, required_base_offset: int) -> int:
        """Append on the leader and return the end offset; see `QuorumDriver.append`."""
        ...

    async def read_barrier(self) -> int:
        """Prove leadership from now on; see `QuorumDriver.read_barrier`."""
        ...

    def leader_hint(self) -> NotLeaderError:
        """Where the leader is, as far as this node knows."""
        ...


class MetadataController:
    """Joins the map and the log into a replicated state machine."""

    def __init__(self, cluster_map: ClusterMap, clock: Clock) -> None:
        self._map = cluster_map
        self._clock = clock
        self._log: ReplicatedLog | None = None
        self._parked = ParkedAnswers()
        self._active = False
        self._committed_end = 0
        self._committed_epoch = 0
        self._freezing = asyncio.Lock()
        self._quiet: asyncio.Event | None = None
        self._on_leadership: list[Callable[[bool], None]] = []

    def bind(self, log: ReplicatedLog) -> None:
        """Connect the log; once, before it starts."""
        self._log = log

    def on_leadership(self, listener: Callable[[bool], None]) -> None:
        """Tell `listener` True when this node begins to serve writes and False when it ends."""
        self._on_leadership.append(listener)

    @property
    def is_active(self) -> bool:
        """Whether this node leads and has replayed everything committed."""
        return self._active

    @property
    def committed_end(self) -> int:
        """Exclusive end of what is committed and replayed here."""
        return self._committed_end

    @property
    def cluster_map(self) -> ClusterMap:
        """The map, for queries that may be stale or uncommitted (sizes, deadlines)."""
        return self._map

    async def write(self, request: WriteRequest) -> Answer:
        """Decide, replicate and answer one mutation.

        Raises:
            NotLeaderError: this node does not lead.
            InvalidRequestError: the request is malformed.
            LimitExceededError: it, or what waits already, is too large.
            OutcomeUnknownError: leadership was lost before it was committed.
        """
        log = self._leading_log()
        while self._quiet is not None:  # one freeze may follow another
            await self._quiet.wait()
            log = self._leading_log()
        if len(self._parked) >= PARKED_ANSWERS_MAX:
            raise LimitExceededError(
                f"{len(self._parked)} requests wait for a majority of controllers; try again later"
            )
        decision = self._map.decide(request, self._clock.wall_ms(), log.next_offset)
        end_offset = self._replicate(log, decision.records) if decision.records else log.next_offset
        await self._committed(end_offset)
        return decision.answer

    async def read(self, request: ReadRequest) -> Answer:
        """Answer a query linearizably: it sees everything acknowledged before it was asked.

        Raises the same errors as `write`.
        """
        log = self._leading_log()
        await log.read_barrier()
        self._leading_log()
        answer = self._map.query(request)
        await self._committed(log.next_offset)
        return answer

    async def settled(self) -> None:
        """Wait until everything the map shows now is committed; same errors as `write`."""
        await self._committed(self._leading_log().next_offset)

    async def frozen(self) -> tuple[FrozenMap, int]:
        """Return an immutable, committed, linearizable view of the map, and its quorum epoch.

        New writes wait for as long as those under way take to commit.
        """
        log = self._leading_log()
        await log.read_barrier()
        async with self._freezing:
            self._quiet = asyncio.Event()
            try:
                await self.settled()
                return self._map.freeze(self._committed_end), self._committed_epoch
            finally:
                self._quiet.set()
                self._quiet = None

    async def state_hash(self, at_offset: int) -> tuple[int, bytes]:
        """Return an offset, and 32 bytes that are equal on every controller for equal maps there.

        Any controller answers; the hash is taken in a thread.

        Raises:
            InvalidRequestError: the log is not committed up to `at_offset` here.
        """
        if self._active:
            view, _ = await self.frozen()
        else:
            view = self._map.freeze(self._committed_end)
        if at_offset > self._committed_end:
            raise InvalidRequestError(
                "at_offset", f"{at_offset}; committed here is the log up to {self._committed_end}"
            )
        return view.end_offset, await asyncio.to_thread(view.digest)

    def on_committed(self, batches: Sequence[Batch], high_watermark: int) -> None:
        """Replay what became committed, unless this node replayed it when it appended it."""
        for batch in batches:
            if batch.kind is BatchKind.DATA:
                self._replay(batch)
            self._committed_epoch = batch.epoch
        self._committed_end = high_watermark
        self._map.forget_undo(high_watermark)
        self._parked.release(high_watermark)

    def on_leadership_claimed(self, epoch: int) -> None:
        """Begin to serve: everything committed has been replayed."""
        self._active = True
        _log.info("leadership_claimed", epoch=epoch, end_offset=self._committed_end)
        for listener in self._on_leadership:
            listener(True)

    def on_leadership_lost(self) -> None:
        """Undo what was replayed and not committed; its outcome is with the next leader."""
        self._active = False
        self._map.undo_to(self._committed_end)
        self._parked.fail_all(
            OutcomeUnknownError(
                "leadership was lost while the request was replicated; repeat it with the same id"
            )
        )
        _log.info("leadership_lost", end_offset=self._committed_end)
        for listener in self._on_leadership:
            listener(False)

    def _leading_log(self) -> ReplicatedLog:
        if self._log is None:
            raise InvariantError("the controller was asked before its log was bound")
        if not self._active:
            raise self._log.leader_hint()
        return self._log

    def _replicate(self, log: ReplicatedLog, records: Sequence[Record]) -> int:
        # Replay first: a record that can't be applied must never be replicated.
        offset = log.next_offset
        payload = encode_records(records)
        self._map.apply(offset, records)
        try:
            return log.append([payload], required_base_offset=offset)
        except Exception:
            self._map.undo_to(offset)
            raise

    def _replay(self, batch: Batch) -> None:
        for index, payload in enumerate(batch.payloads):
            offset = batch.base_offset + index
            if offset >= self._map.applied_end_offset:
                self._map.apply(offset, decode_records(payload))

    async def _committed(self, end_offset: int) -> None:
        if end_offset > self._committed_end:
            await self._parked.park(end_offset)
