"""CommitPipeline: batches of commits on one stream of messages, answered in order.

Messages are read ahead of the answers, and messages read are decided together: their entries share
a batch of the log and a flush. Back-pressure: reading stops at a number of bytes not yet answered,
of this pipeline or of all requests. Messages before the end of the stream are answered first. A
message that speaks for another's node ends the stream: it changes nothing, and no error of its rows
could name the right caller. A caller may repeat every message on another stream: commits are
idempotent by object id.
"""

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import cast

from streammeta.controller.errors import (
    AuditUnavailableError,
    InvalidRequestError,
    RateExceededError,
    TooManyPipelinesError,
)
from streammeta.controller.metadata.api.answer_budget import commit_bytes
from streammeta.controller.metadata.api.answers import (
    CommitStreamSetObjectAnswer,
    CommitUploadsAnswer,
)
from streammeta.controller.metadata.api.requests import CommitStreamSetObject
from streammeta.controller.metadata.api.upload_batches import join_uploads, split_answers
from streammeta.controller.rpc.calls.error_mapping import Context, abort
from streammeta.controller.rpc.calls.interceptors import holder_of
from streammeta.controller.rpc.calls.memory_budget import MemoryBudget
from streammeta.controller.rpc.calls.memory_guard import MemoryGuard
from streammeta.controller.rpc.calls.message_trace import MessageTrace
from streammeta.controller.rpc.codec.wire_columns import (
    commit_stream_set_object_in,
    commit_stream_set_object_out,
    parse_batch,
    uploads_in,
)
from streammeta.controller.rpc.services.pipeline_messages import (
    DecidedMessage,
    PipelineCommit,
    PipelineMessage,
    RejectedMessage,
)
from streammeta.controller.runtime.load.admission import TurnBudget
from streammeta.controller.runtime.writer.controller import MetadataController
from streammeta.controller.runtime.writer.group_commit import GroupCommitDelay
from streammeta.controller.runtime.writer.submission import Submission
from streammeta.controller.trust.audit.auditor import current_record
from streammeta.controller.trust.authenticator import (
    Caller,
    current_caller,
    current_holder,
    current_quota,
)
from streammeta.controller.trust.field_access import require_fields
from streammeta.controller.trust.rates import Rates
from streammeta.rpc import tracing
from streammeta.rpc.method_facts import MemoryClass
from streammeta.tls.identity import Principal
from streammeta.v1 import columns_pb2 as pb

BYTES_AHEAD = 4 << 20
"""Maximum size of the messages read and not yet answered, in bytes; one message may be larger."""

MESSAGES_AHEAD = 256

ROWS_A_PART = 20_000
"""Rows that all pipelines decide in one turn of the event loop: as many as a commit may hold."""

ROWS_A_COMMIT = 300
"""Cost of a commit in addition to its rows, in rows."""

ROWS_A_MESSAGE = 700
"""Minimum cost of a message, in rows."""

BYTES_A_ROW = 32
"""Size of a row in a message, for the cost of parsing it."""

PIPELINES_MAX = 1_000
"""Maximum number of pipelines open on one controller."""

PIPELINES_PER_PRINCIPAL = 4
"""Maximum number of pipelines that one principal has open on a controller."""

PIPELINES_PER_CONNECTION = 100
"""Maximum number of pipelines open on one connection."""


class _Taken:
    """Decided and rejected messages in order, for the task that answers them. None is the end.

    An `asyncio.Queue` needs three times as many calls per message.
    """

    def __init__(self) -> None:
        self._messages: deque[DecidedMessage | RejectedMessage | None] = deque()
        self._arrival: asyncio.Future[None] | None = None

    def put(self, message: DecidedMessage | RejectedMessage | None) -> None:
        """Add a message."""
        self._messages.append(message)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def get(self) -> DecidedMessage | RejectedMessage | None:
        """Return the next message when there is one."""
        if not self._messages:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        return self._messages.popleft()


class _Ahead:
    """Messages that are read and not answered. Undecided ones are queued in order."""

    def __init__(
        self,
        messages_max: int,
        rests: GroupCommitDelay,
        memory: MemoryBudget,
        holder: str,
        held_to: Principal | None = None,
    ) -> None:
        """`held_to` is the broker whose messages they are, if it is held to its node."""
        self.held_to = held_to
        self._messages_max = messages_max
        self._rests = rests
        self._memory = memory
        self._holder = holder
        self._sizes: deque[int] = deque()
        self._bytes = 0
        self._undecided: deque[bytes] = deque()
        self._came: deque[int] = deque()
        self.came_ns = 0
        """Time when the last message was read, in ns since 1970. 0: tracing is off."""
        self._is_over = False
        self.is_awaited = False
        """Whether the task that decides messages waits for one."""
        self._fewer = asyncio.Event()
        self._more = asyncio.Event()

    async def room(self) -> None:
        """Wait until another message may be read."""
        while len(self._sizes) >= self._messages_max or self._bytes >= BYTES_AHEAD:
            self._fewer.clear()
            await self._fewer.wait()
        await self._memory.room(self._holder)

    def put(self, data: bytes) -> None:
        """Add a message that was read."""
        self._sizes.append(len(data))
        self._bytes += len(data)
        self._memory.take(self._holder, len(data))
        self._undecided.append(data)
        if tracing.is_on():
            self._came.append(time.time_ns())
        self._rests.record_arrival(len(data))

    def wake(self) -> None:
        """Resume the task that decides messages."""
        self.is_awaited = False
        self._more.set()

    def end(self) -> None:
        """Signal the end of the messages."""
        self._is_over = True
        self.wake()

    async def wait(self) -> bool:
        """Wait for a message to decide. Return False at the end."""
        while not (self._undecided or self._is_over):
            self._more.clear()
            self.is_awaited = True
            await self._more.wait()
        return bool(self._undecided)

    def take(self) -> bytes | None:
        """Return the next message to decide, None if there is none now."""
        if not self._undecided:
            return None
        data = self._undecided.popleft()
        if self._came:
            self.came_ns = self._came.popleft()
        self._rests.record_departure(len(data))
        return data

    def answered(self) -> None:
        """Note that the oldest message is answered."""
        size = self._sizes.popleft()
        self._bytes -= size
        self._memory.give_back(self._holder, size)
        self._rests.record_answer(size)
        self._fewer.set()

    def drop(self) -> None:
        """Forget all messages: their caller has gone."""
        while self.take() is not None:
            pass
        while self._sizes:
            self.answered()


class CommitPipeline:
    """Handler of ObjectService.CommitPipeline. Messages are bytes in both directions."""

    def __init__(
        self,
        controller: MetadataController,
        messages_ahead: int = MESSAGES_AHEAD,
        memory: MemoryBudget | None = None,
        rates: Rates | None = None,
        guard: MemoryGuard | None = None,
    ) -> None:
        self._controller = controller
        self._guard = guard
        self._rates = Rates() if rates is None else rates
        self._memory = MemoryBudget() if memory is None else memory
        self._messages_ahead = messages_ahead
        self._budget = TurnBudget(ROWS_A_PART)
        self._rests = GroupCommitDelay()
        self._open: Counter[str] = Counter()
        self._open_of: Counter[str] = Counter()

    async def handle(self, messages: AsyncIterator[bytes], context: Context) -> None:
        """Serve one stream until its caller ends it, or a message fails."""
        try:
            opened = self._counted(context.peer(), current_holder())
            if (record := current_record()) is not None:
                record.began()
        except (TooManyPipelinesError, AuditUnavailableError) as error:
            await abort(context, error)
        with opened:
            await self._serve(messages, context)

    def _counted(
        self, connection: str, holder: str | None
    ) -> contextlib.AbstractContextManager[None]:
        """Count a pipeline as open until the context ends.

        The pipelines of a principal have a limit.
        """
        name, given = f"of {holder}", current_quota().pipelines
        own = PIPELINES_PER_PRINCIPAL if given is None else given
        for count, limit, place in (
            (self._open_of[name] if holder else 0, own, "principal"),
            (self._open[connection], PIPELINES_PER_CONNECTION, "connection"),
            (self._open.total(), PIPELINES_MAX, "controller"),
        ):
            if count >= limit:
                raise TooManyPipelinesError(
                    f"{count} commit pipelines are open on this {place}, the maximum. "
                    "Commit on an open one, or close one"
                )
        return self._held(connection, name)

    @contextlib.contextmanager
    def _held(self, connection: str, name: str) -> Iterator[None]:
        counts = ((self._open, connection), (self._open_of, name))
        for open_by, key in counts:
            open_by[key] += 1
        try:
            yield
        finally:
            for open_by, key in counts:
                open_by[key] -= 1
                if not open_by[key]:
                    del open_by[key]

    async def _serve(self, messages: AsyncIterator[bytes], context: Context) -> None:
        caller = current_caller()
        holder = holder_of(caller, context)
        ahead = _Ahead(self._messages_ahead, self._rests, self._memory, holder, caller.held_to)
        taken = _Taken()
        tasks = [
            asyncio.create_task(self._read(messages, ahead, taken)),
            asyncio.create_task(self._decide_all(ahead, taken)),
        ]
        try:
            while (message := await taken.get()) is not None:
                answer = await _answer(message, context)
                answered_at = time.perf_counter()
                _record(message)
                # Its caller's next message may be here before the write returns, and is alone then.
                ahead.answered()
                try:
                    await context.write(answer)
                finally:
                    # Behind the answer, which its caller waits for; it is committed in any case.
                    self._count(message, answered_at)
        finally:
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                ahead.drop()

    def _count(self, message: DecidedMessage | RejectedMessage, answered_at: float) -> None:
        if isinstance(message, DecidedMessage):
            self._controller.commits.add(*message.verdicts(), answered_at - message.decided_at)

    async def _read(self, messages: AsyncIterator[bytes], ahead: _Ahead, taken: _Taken) -> None:
        caller = current_caller()
        try:
            await ahead.room()
            async for data in messages:
                # Messages of many pipelines may arrive at once; their work is spread over turns.
                await self._budget.take(ROWS_A_MESSAGE + len(data) // BYTES_A_ROW)
                if caller.policy.quotas:
                    await self._rated(caller, len(data))
                ahead.put(data)
                if not (ahead.is_awaited and self._rests.is_alone):
                    ahead.wake()
                # Without waking another task.
                elif not await self._decide_batch(ahead, taken, is_alone=True):
                    return
                await ahead.room()
        finally:
            ahead.end()

    async def _rated(self, caller: Caller, size: int) -> None:
        """Wait until a message may be taken by the rates of this pipeline's caller."""
        while True:
            try:
                return self._rates.take(caller, size, asyncio.get_running_loop().time())
            except RateExceededError as error:
                await asyncio.sleep(error.retry_after_ms / 1000)

    async def _decide_all(self, ahead: _Ahead, taken: _Taken) -> None:
        try:
            while await ahead.wait():
                await self._rests.wait()
                if not await self._decide_batch(ahead, taken):
                    return
                await asyncio.sleep(0)
        finally:
            taken.put(None)

    async def _decide_batch(self, ahead: _Ahead, taken: _Taken, *, is_alone: bool = False) -> bool:
        """Decide waiting messages. Return False if one of them ends the stream.

        A single message is replicated at once, since no other will join it.
        """
        refusal = await self._turn()
        self._rests.start_batch()
        decided = await self._decide_waiting(ahead, refusal)
        if is_alone:
            self._controller.flush()
        for message in decided:
            taken.put(message)
        return not isinstance(decided[-1], RejectedMessage) if decided else True

    async def _turn(self) -> Exception | None:
        try:
            if (record := current_record()) is not None:
                record.require()
            if self._guard is not None:
                self._guard.require(MemoryClass.COMMIT)
            await self._controller.turn()
        except Exception as error:  # noqa: BLE001 - told to the next message
            return error
        return None

    async def _decide_waiting(
        self, ahead: _Ahead, refusal: Exception | None
    ) -> list[DecidedMessage | RejectedMessage]:
        """Decide waiting messages. The last one may end the stream."""
        waiting: list[PipelineMessage] = []
        rows = 0
        refused: RejectedMessage | None = None
        while refused is None and rows < ROWS_A_PART and (data := ahead.take()) is not None:
            message = _read(data, refusal, ahead.came_ns)
            if isinstance(message, RejectedMessage):
                refused = message
            else:
                waiting.append(message)
                rows += message.rows
        decided = await self._decide_together(waiting, ahead.held_to) if len(waiting) > 1 else None
        if decided is None:
            decided = await self._decide_each(waiting, ahead.held_to)
        if refused is not None and not (decided and isinstance(decided[-1], RejectedMessage)):
            decided.append(refused)
        return decided

    async def _decide_together(
        self, messages: Sequence[PipelineMessage], held_to: Principal | None
    ) -> list[DecidedMessage | RejectedMessage] | None:
        """Decide messages that contain only uploads as one request.

        None if they are not decided.
        """
        uploads = [
            part for message in messages if len(message.commits) == 1 and (part := message.uploads)
        ]
        joined = join_uploads(uploads) if len(uploads) == len(messages) else None
        if joined is None:
            return None
        await self._budget.take(_size(joined))
        try:
            submission = self._controller.submit((joined,), held_to)
        except Exception:  # noqa: BLE001 - whose fault it is shows when each is decided alone
            return None
        answers = split_answers(cast(CommitUploadsAnswer, submission.answers[0]), uploads)
        now = time.perf_counter()
        return [
            DecidedMessage(
                message.sequence,
                *((submission,), (), answer, ()),
                now,
                message.trace and message.trace.decided((submission,)),
            )
            for message, answer in zip(messages, answers, strict=True)
        ]

    async def _decide_each(
        self, messages: Sequence[PipelineMessage], held_to: Principal | None
    ) -> list[DecidedMessage | RejectedMessage]:
        decided: list[DecidedMessage | RejectedMessage] = []
        for message in messages:
            try:
                decided.append(await self._decide(message, held_to))
            except Exception as error:  # noqa: BLE001 - told when it is its turn to be answered
                decided.append(RejectedMessage(message.sequence, error))
                break
        return decided

    async def _decide(self, message: PipelineMessage, held_to: Principal | None) -> DecidedMessage:
        submissions: list[Submission] = []
        if held_to is not None:
            # All of it at first, so that one that speaks for another's node changes nothing.
            self._controller.require_own(message.commits, held_to)
        answered_bytes = 0
        for part, rows in _parts(message):
            await self._budget.take(rows)
            submission = self._controller.submit(part, held_to, answered_bytes)
            answered_bytes += sum(map(commit_bytes, submission.answers))
            submissions.append(submission)
        answers = [answer for submission in submissions for answer in submission.answers]
        uploads = answers.pop() if message.uploads is not None else None
        effects, now = message.with_effects, time.perf_counter()
        trace = message.trace and message.trace.decided(submissions)
        return DecidedMessage(message.sequence, submissions, answers, uploads, effects, now, trace)


def _read(
    data: bytes, refusal: Exception | None, came_ns: int
) -> PipelineMessage | RejectedMessage:
    """Parse a message completely before its commits are decided, so it changes all or nothing."""
    sequence: int | None = None
    try:
        message = parse_batch(data)
        sequence = message.sequence
        if refusal is not None:
            raise refusal
        commits: list[PipelineCommit] = [
            _read_commit(index, commit) for index, commit in enumerate(message.commits)
        ]
        if message.HasField("uploads"):
            commits.append(uploads_in(message.uploads))
        with_effects = [
            (place, commit)
            for place, commit in enumerate(message.commits)
            if commit.kv_puts or commit.trims
        ]
        trace = None
        if came_ns and message.traceparents:
            trace = MessageTrace(tuple(message.traceparents), came_ns)
        return PipelineMessage(sequence, commits, sum(map(_size, commits)), with_effects, trace)
    except Exception as error:  # noqa: BLE001 - told when it is its turn to be answered
        return RejectedMessage(sequence, error)


def _read_commit(
    index: int, commit: pb.PackedCommitStreamSetObjectRequest
) -> CommitStreamSetObject:
    try:
        request = commit_stream_set_object_in(commit)
    except InvalidRequestError as error:
        reason = str(error).removeprefix(f"{error.field}: ")
        raise InvalidRequestError(f"commits[{index}].{error.field}", reason) from None
    require_fields(current_caller(), "ObjectService.CommitPipeline", request)
    return request


def _record(message: DecidedMessage | RejectedMessage) -> None:
    """Note a message's commits in the record of the call, before they are answered."""
    if isinstance(message, DecidedMessage) and (record := current_record()) is not None:
        tally = message.tally()
        record.counted(*tally)
        for place, commit in message.with_effects:
            answer = cast(CommitStreamSetObjectAnswer, message.commits[place])
            record.carried(commit, commit_stream_set_object_out(answer), tally[-1])


async def _answer(message: DecidedMessage | RejectedMessage, context: Context) -> bytes:
    try:
        return await message.response()
    except Exception as error:  # noqa: BLE001 - every failure of a message is a status
        where = {} if message.sequence is None else {"sequence": str(message.sequence)}
        await abort(context, error, where)


def _parts(message: PipelineMessage) -> Iterator[tuple[Sequence[PipelineCommit], int]]:
    """Divide commits into parts that hold the event loop for milliseconds at most.

    Each comes with its work in rows.
    """
    if message.rows <= ROWS_A_PART:
        if message.commits:
            yield message.commits, message.rows
        return
    part: list[PipelineCommit] = []
    rows = 0
    for commit in message.commits:
        size = _size(commit)
        if part and rows + size > ROWS_A_PART:
            yield part, rows
            part, rows = [], 0
        part.append(commit)
        rows += size
    yield part, rows


def _size(commit: PipelineCommit) -> int:
    """Return the work that a commit is, in rows."""
    rows = ROWS_A_COMMIT + len(commit.ranges.stream_id)
    if isinstance(commit, CommitStreamSetObject):
        rows += len(commit.kv_puts) + len(commit.trims)
    return rows
