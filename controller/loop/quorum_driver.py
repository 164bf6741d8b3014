"""Runs a quorum core: feeds it messages and time, carries out its effects in order.

Owns the core, the journal's thread and the delivery of committed batches to the state machine.
Appends of one turn of the event loop become one batch and one flush. Everything here runs on one
event loop; no call of the state machine blocks, and none is made from within another.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from controller.errors import InvariantError, LimitExceededError, NotLeaderError
from controller.ids import EndOffset, Epoch, NodeId
from controller.journal.journal import Journal
from controller.loop.clock import Clock
from controller.loop.quorum_describe import QuorumDescription, describe_quorum
from controller.loop.quorum_disk import DiskRead, JournalThread
from controller.loop.quorum_transport import PeerTransport
from controller.quorum.config import QuorumConfig
from controller.quorum.core import QuorumCore
from controller.quorum.events import (
    Append,
    AppendLog,
    CommitAdvanced,
    Effect,
    Event,
    LeadershipEnded,
    LeadershipStarted,
    LogReadDone,
    PeerConnectionLost,
    PersistQuorumState,
    ReadIndexReady,
    ReadIndexRefused,
    ReadIndexRequested,
    ReadLog,
    Received,
    RequestFailed,
    Resign,
    Send,
    Tick,
    TruncateLog,
    WriteDone,
)
from controller.quorum.messages import (
    Batch,
    BeginQuorumEpochRequest,
    EndQuorumEpochRequest,
    FetchRequest,
    Message,
    Request,
    Response,
    VoteRequest,
)
from controller.quorum.roles import Resigned

_DELIVERY_BYTES = 4 << 20
_PAYLOAD_OVERHEAD_BYTES = 4
_STOP_ROUNDS = 20

_log = structlog.get_logger(component="quorum")


class UncommittedLogFullError(LimitExceededError):
    """Too much is appended and not committed: a majority of the voters is slow or gone."""


class RecordTooLargeError(LimitExceededError):
    """One payload does not fit a batch."""


class StateMachine(Protocol):
    """What is replicated. All calls are made on the event loop and must not block or raise."""

    def on_committed(self, batches: Sequence[Batch], high_watermark: int) -> None:
        """Take committed batches, control batches too, each once and in order.

        Everything below `high_watermark` has been delivered with this call.
        """
        ...

    def on_leadership_claimed(self, epoch: int) -> None:
        """Begin to append: this node leads and everything committed was delivered."""
        ...

    def on_leadership_lost(self) -> None:
        """Stop at once; what was appended and not delivered may or may not be committed."""
        ...


@dataclass(frozen=True, slots=True)
class _Held:
    """A message waiting for the write `after`."""

    after: int
    message: Message


class QuorumDriver:
    """One replica in production."""

    def __init__(
        self,
        *,
        config: QuorumConfig,
        journal: Journal,
        transport: PeerTransport,
        state_machine: StateMachine,
        clock: Clock,
        rng: random.Random | None = None,
    ) -> None:
        self._config = config
        self._journal = journal
        self._transport = transport
        self._state_machine = state_machine
        self._clock = clock
        self._core = QuorumCore(
            config, journal.quorum_state, journal.log_start, rng or random.Random()
        )
        self._disk = JournalThread(journal, self._on_durable, self._fail)
        self._durable_token = 0
        self._held: deque[_Held] = deque()
        self._events: deque[Event] = deque()
        self._is_stepping = False
        self._is_running = False
        self._timer: asyncio.TimerHandle | None = None
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._flush_scheduled = False
        self._delivered_end = EndOffset(journal.log_start.start_offset)
        self._is_reading_for_delivery = False
        self._elected: LeadershipStarted | None = None
        self._claimed_epoch: Epoch | None = None
        self._answers: dict[tuple[NodeId, int, int], asyncio.Future[Response]] = {}
        self._reads: dict[int, asyncio.Future[int]] = {}
        self._next_read_id = 0
        self._forming_read: int | None = None
        self.fatal: asyncio.Future[None] = asyncio.Future()
        transport.bind(self)

    # -- life

    async def start(self) -> None:
        """Take part in the quorum."""
        self._disk.start()
        self._is_running = True
        self._is_stepping = True
        try:
            self._carry_out(self._core.start(self._clock.monotonic_ms()))
        except Exception as error:  # noqa: BLE001 (as below)
            self._fail(error)
            return
        finally:
            self._is_stepping = False
        self._drain()

    async def stop(self) -> None:
        """Resign if leading, tell the voters, flush, and take no further part."""
        self._feed(Resign())
        for _ in range(_STOP_ROUNDS):
            role = self._core.role
            if self.fatal.done() or not isinstance(role, Resigned) or not role.unacknowledged:
                break
            await asyncio.sleep(self._config.timings.retry_backoff_ms / 1000)
        self._halt(NotLeaderError())
        await self._disk.stop()
        await self._transport.close()

    def _halt(self, error: Exception) -> None:
        self._is_running = False
        if self._timer is not None:
            self._timer.cancel()
        waiting: list[asyncio.Future[Response] | asyncio.Future[int]] = [
            *self._answers.values(),
            *self._reads.values(),
        ]
        for future in waiting:
            if not future.done():
                future.set_exception(error)
                future.exception()  # seen: nobody may be waiting any more
        self._answers.clear()
        self._reads.clear()
        self._held.clear()

    def _fail(self, error: BaseException) -> None:
        """Stop at once: a crashed voter is safe, a confused one is not."""
        if self.fatal.done():
            return
        _log.critical("quorum_failed", error=repr(error), epoch=self._core.epoch)
        self.fatal.set_exception(error)
        self.fatal.exception()  # seen: the server decides when to look
        self._lose_leadership()
        self._halt(NotLeaderError())

    # -- what the state machine asks

    @property
    def epoch(self) -> Epoch:
        """Return the present epoch."""
        return self._core.epoch

    @property
    def high_watermark(self) -> EndOffset:
        """Return the end of what is known to be committed."""
        return self._core.high_watermark

    @property
    def next_offset(self) -> int:
        """Return the offset that the next appended payload takes."""
        return self._core.log.end_offset + len(self._pending)

    @property
    def is_leader(self) -> bool:
        """Whether leadership was announced to the state machine and not lost since."""
        return self._claimed_epoch is not None

    @property
    def leader(self) -> tuple[NodeId, str] | None:
        """Return the leader's node id and endpoint, if known."""
        leader_id = self._core.leader_id
        voter = None if leader_id is None else self._config.voters.find(leader_id)
        return None if voter is None else (voter.key.node_id, voter.endpoint)

    def leader_hint(self) -> NotLeaderError:
        """Return the error that sends a client to the leader."""
        leader = self.leader
        if leader is None or leader[0] == self._config.local.node_id:
            return NotLeaderError(epoch=self._core.epoch)
        return NotLeaderError(leader[0], leader[1], self._core.epoch)

    def append(self, payloads: Sequence[bytes], *, required_base_offset: int) -> int:
        """Replicate payloads, in order; return the end offset at which they are committed.

        They travel with everything else appended in this turn of the event loop.

        Raises:
            NotLeaderError: this node does not lead; nothing was appended.
            RecordTooLargeError: a payload is larger than a batch may be; nothing was appended.
            UncommittedLogFullError: too much waits for a majority; nothing was appended.
            InvariantError: the first payload would not take `required_base_offset`.
        """
        if self._claimed_epoch is None:
            raise self.leader_hint()
        limits = self._config.limits
        sizes = [len(payload) + _PAYLOAD_OVERHEAD_BYTES for payload in payloads]
        largest = max(sizes, default=0)
        if largest > limits.max_batch_bytes:
            raise RecordTooLargeError(
                f"a record of {largest} bytes; at most {limits.max_batch_bytes} fit a batch"
            )
        waiting = self._core.uncommitted_bytes + self._pending_bytes
        if waiting and waiting + sum(sizes) > limits.max_uncommitted_bytes:
            raise UncommittedLogFullError(
                f"{waiting} bytes wait for a majority of the voters, at most "
                f"{limits.max_uncommitted_bytes} may; try again when they have caught up"
            )
        if required_base_offset != self.next_offset:
            raise InvariantError(
                f"append at {required_base_offset} to a log that ends at {self.next_offset}"
            )
        self._pending.extend(payloads)
        self._pending_bytes += sum(sizes)
        self._schedule_flush()
        return self.next_offset

    async def read_barrier(self, timeout_ms: int | None = None) -> int:
        """Prove that this node leads from now on; return how far a read must have applied.

        What was committed before this call began lies below the returned offset, and has been
        delivered when it returns.

        Raises:
            NotLeaderError: this node does not lead, or stopped leading meanwhile.
            TimeoutError: no majority answered in time.
        """
        if self._claimed_epoch is None:
            raise self.leader_hint()
        if self._forming_read is None:
            self._next_read_id += 1
            self._forming_read = self._next_read_id
            self._reads[self._next_read_id] = asyncio.get_running_loop().create_future()
            self._schedule_flush()
        waiting = asyncio.shield(self._reads[self._forming_read])
        return await asyncio.wait_for(waiting, None if timeout_ms is None else timeout_ms / 1000)

    def resign(self) -> None:
        """Give up leadership, if held; the voter with the longest log should follow."""
        self._feed(Resign())

    def describe(self) -> QuorumDescription:
        """Return what DescribeQuorum tells."""
        return describe_quorum(self._core, self._config, self._clock.monotonic_ms())

    # -- what the network tells

    async def handle(self, request: Request) -> Response:
        """Answer a peer's request; a Fetch may take as long as it asks to wait.

        Raises NotLeaderError when this replica stops meanwhile.
        """
        if not self._is_running:
            raise NotLeaderError()
        header = request.header
        key = (header.sender.node_id, header.incarnation, header.request_id)
        future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._answers[key] = future
        try:
            self._feed(Received(request))
            return await future
        finally:
            if self._answers.get(key) is future:
                del self._answers[key]

    def on_response(self, response: Response) -> None:
        """Take a peer's answer."""
        self._feed(Received(response))

    def on_request_failed(self, peer: NodeId, request_id: int) -> None:
        """Take note that no answer will come."""
        self._feed(RequestFailed(peer, request_id))

    def on_connection_lost(self, peer: NodeId) -> None:
        """Take note that a peer's process is probably gone."""
        self._feed(PeerConnectionLost(peer))

    # -- stepping

    def _feed(self, event: Event) -> None:
        self._events.append(event)
        if not self._is_stepping:
            self._drain()

    def _drain(self) -> None:
        self._is_stepping = True
        try:
            while self._events and self._is_running:
                event = self._events.popleft()
                self._carry_out(self._core.step(self._clock.monotonic_ms(), event))
        except Exception as error:  # noqa: BLE001 (an unexpected state ends the process)
            self._fail(error)
        finally:
            self._is_stepping = False
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._core.next_deadline()
        if deadline is None or not self._is_running:
            return
        wait_ms = max(0, deadline - self._clock.monotonic_ms())
        loop = asyncio.get_running_loop()
        # One millisecond more: the clock's milliseconds are truncated.
        self._timer = loop.call_later((wait_ms + 1) / 1000, self._feed, Tick())

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(message=message, after=after):
                    self._send_after(after, message)
                case PersistQuorumState() | AppendLog() | TruncateLog():
                    self._disk.submit(effect)
                case CommitAdvanced():
                    self._deliver()
                case ReadLog():
                    self._read_log(effect)
                case LeadershipEnded():
                    self._lose_leadership()
                case LeadershipStarted():
                    _log.info("leader_elected", epoch=effect.epoch)
                    self._elected = effect
                case ReadIndexReady(read_id=read_id, index=index):
                    self._end_read(read_id, index)
                case ReadIndexRefused(read_id=read_id):
                    self._end_read(read_id, None)

    def _read_log(self, effect: ReadLog) -> None:
        def done(batches: tuple[Batch, ...]) -> None:
            self._feed(LogReadDone(effect.read_id, batches))

        self._disk.submit(DiskRead(effect.start_offset, effect.max_bytes, done))

    # -- sending

    def _send_after(self, after: int, message: Message) -> None:
        if after > self._durable_token:
            self._held.append(_Held(after, message))
        else:
            self._send(message)

    def _on_durable(self, token: int) -> None:
        if not self._is_running:
            return
        self._durable_token = token
        held, self._held = self._held, deque()
        for item in held:
            self._send_after(item.after, item.message)
        self._feed(WriteDone(token))

    def _send(self, message: Message) -> None:
        if isinstance(
            message, VoteRequest | BeginQuorumEpochRequest | EndQuorumEpochRequest | FetchRequest
        ):
            self._transport.send(message)
            return
        header = message.header
        future = self._answers.get((header.receiver, header.incarnation, header.request_id))
        if future is not None and not future.done():
            future.set_result(message)

    # -- appending

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        for chunk in _split(pending, self._config.limits.max_batch_bytes):
            self._feed(Append(chunk))
        read_id, self._forming_read = self._forming_read, None
        if read_id is not None:
            self._feed(ReadIndexRequested(read_id))

    # -- delivering

    def _deliver(self) -> None:
        """Hand on what is committed, from memory or, for what is older, by way of the disk."""
        while self._delivered_end < self._core.high_watermark and not self._is_reading_for_delivery:
            batches = self._core.log.read(
                self._delivered_end, max_bytes=_DELIVERY_BYTES, end=self._core.high_watermark
            )
            if batches is None:
                self._is_reading_for_delivery = True
                read = DiskRead(self._delivered_end, _DELIVERY_BYTES, self._on_read_for_delivery)
                self._disk.submit(read)
                return
            if not batches:
                raise InvariantError(f"nothing to deliver at {self._delivered_end}")
            self._hand_on(batches)
        self._claim_if_ready()

    def _on_read_for_delivery(self, batches: tuple[Batch, ...]) -> None:
        self._is_reading_for_delivery = False
        if not self._is_running:
            return
        self._is_stepping = True
        try:
            committed = [b for b in batches if b.end_offset <= self._core.high_watermark]
            if not committed:
                raise InvariantError(f"the journal has no batch at {self._delivered_end}")
            self._hand_on(committed)
            self._deliver()
        except Exception as error:  # noqa: BLE001 (an unexpected state ends the process)
            self._fail(error)
        finally:
            self._is_stepping = False
        self._drain()

    def _hand_on(self, batches: Sequence[Batch]) -> None:
        self._delivered_end = batches[-1].end_offset
        self._state_machine.on_committed(batches, self._delivered_end)

    def _claim_if_ready(self) -> None:
        elected = self._elected
        if elected is None or self._claimed_epoch is not None:
            return
        is_caught_up = self._delivered_end == self._core.high_watermark
        if is_caught_up and self._core.is_established:
            self._claimed_epoch = elected.epoch
            self._state_machine.on_leadership_claimed(elected.epoch)

    def _lose_leadership(self) -> None:
        was_claimed = self._claimed_epoch is not None
        self._elected = None
        self._claimed_epoch = None
        self._pending, self._pending_bytes = [], 0
        if was_claimed:
            self._state_machine.on_leadership_lost()
        if self._forming_read is not None:
            self._end_read(self._forming_read, None)
            self._forming_read = None

    def _end_read(self, read_id: int, index: EndOffset | None) -> None:
        future = self._reads.pop(read_id, None)
        if future is None or future.done():
            return
        if index is None:
            future.set_exception(self.leader_hint())
            future.exception()  # seen: its readers may have given up
        else:
            future.set_result(index)


def _split(payloads: Sequence[bytes], max_bytes: int) -> list[tuple[bytes, ...]]:
    """Divide payloads into batches of at most `max_bytes`; each fits one alone."""
    chunks: list[tuple[bytes, ...]] = []
    chunk: list[bytes] = []
    size = 0
    for payload in payloads:
        length = len(payload) + _PAYLOAD_OVERHEAD_BYTES
        if chunk and size + length > max_bytes:
            chunks.append(tuple(chunk))
            chunk, size = [], 0
        chunk.append(payload)
        size += length
    if chunk:
        chunks.append(tuple(chunk))
    return chunks
