"""CommitPipeline: batches of commits on one stream of messages, answered in order.

Messages are read ahead of the answers, and messages read are decided together: their entries share
a batch of the log and a flush. Back-pressure: reading stops at a number of bytes not yet answered,
of this pipeline or of all requests. Messages before the end of the stream are answered first. A
message that speaks for another's node ends the stream: it changes nothing, and no error of its rows
could name the right caller. A caller may repeat every message on another stream: commits are
idempotent by object id.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from streammeta.controller import errors
from streammeta.controller.metadata.api.answer_budget import commit_bytes
from streammeta.controller.metadata.api.answers import (
    CommitStreamSetObjectAnswer,
    CommitUploadsAnswer,
)
from streammeta.controller.metadata.api.requests import CommitStreamSetObject
from streammeta.controller.metadata.api.upload_batches import join_uploads, split_answers
from streammeta.controller.rpc.calls.error_mapping import Context, abort
from streammeta.controller.rpc.calls.interceptors import holder_of
from streammeta.controller.rpc.calls.memory_budget import MemoryBudget, MemoryGuard
from streammeta.controller.rpc.codec import wire_columns
from streammeta.controller.rpc.services import pipeline_core, pipeline_messages
from streammeta.controller.rpc.services.pipeline_messages import Outcome, PipelineMessage
from streammeta.controller.runtime.load.admission import TurnBudget
from streammeta.controller.runtime.writer.controller import MetadataController
from streammeta.controller.runtime.writer.group_commit import GroupCommitDelay
from streammeta.controller.runtime.writer.submission import Submission
from streammeta.controller.trust import authenticator
from streammeta.controller.trust.audit.auditor import current_record
from streammeta.controller.trust.namespaces import require_fields
from streammeta.controller.trust.rates import Rates
from streammeta.rpc import tracing
from streammeta.rpc.method_facts import MemoryClass
from streammeta.tls.identity import Principal
from streammeta.v1 import columns_pb2 as pb

MESSAGES_AHEAD = 256

ROWS_A_MESSAGE = 700
"""Minimum cost of a message, in rows."""

BYTES_A_ROW = 32
"""Size of a row in a message, for the cost of parsing it."""


@dataclass(eq=False)
class _Stream:
    """Tasks of one pipeline that wait for its messages, and the counts of all pipelines.

    Futures and an event, because an `asyncio.Queue` needs three times as many calls per message.
    """

    core: pipeline_core.PipelineCore
    _rests: GroupCommitDelay
    _memory: MemoryBudget
    _holder: str
    _fewer: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _more: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _decided: asyncio.Future[None] | None = field(init=False, default=None)

    async def room(self) -> None:
        """Wait until another message may be read."""
        while not self.core.has_room:
            self._fewer.clear()
            await self._fewer.wait()
        await self._memory.room(self._holder)

    def receive(self, data: bytes) -> None:
        """Add a message that was read."""
        self.core.receive(data, time.time_ns() if tracing.is_on() else 0)
        self._memory.take(self._holder, len(data))
        self._rests.record_arrival(len(data))

    def wake(self) -> None:
        """Resume the task that decides messages."""
        self.core.is_awaited = False
        self._more.set()

    def end(self) -> None:
        """Signal the end of the messages."""
        self.core.has_ended = True
        self.wake()

    async def wait(self) -> bool:
        """Wait for a message to decide. Return False at the end."""
        core = self.core
        while not (core.waiting or core.has_ended):
            self._more.clear()
            core.is_awaited = True
            await self._more.wait()
        return bool(core.waiting)

    def read_batch(self, refusal: Exception | None) -> None:
        """Begin a batch, and parse its messages."""
        core = self.core
        core.begin_batch()
        while (data := core.take()) is not None:
            self._rests.record_departure(len(data))
            core.add(_read(data, refusal, core.came_ns))

    async def next_answer(
        self,
    ) -> Outcome | None:
        """Wait for a message to answer. Return None at the end."""
        answers = self.core.answers
        if not answers:
            self._decided = asyncio.get_running_loop().create_future()
            await self._decided
        return answers.popleft()

    def wake_answers(self) -> None:
        """Resume the task that answers messages."""
        if self._decided is not None and not self._decided.done():
            self._decided.set_result(None)

    def mark_answered(self) -> None:
        """Note that the oldest message is answered."""
        size = self.core.mark_answered()
        self._memory.give_back(self._holder, size)
        self._rests.record_answer(size)
        self._fewer.set()

    def drop(self) -> None:
        """Forget all messages: their caller has gone."""
        self._rests.record_departure(self.core.drop_waiting())
        while self.core.sizes:
            self.mark_answered()


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
        self._budget = TurnBudget(pipeline_core.ROWS_A_PART)
        self._rests = GroupCommitDelay()
        self._open = pipeline_core.OpenPipelines()

    async def handle(self, messages: AsyncIterator[bytes], context: Context) -> None:
        """Serve one stream until its caller ends it, or a message fails."""
        connection, principal = context.peer(), authenticator.current_holder() or ""
        try:
            self._open.require_room(connection, principal, authenticator.current_quota().pipelines)
            if (record := current_record()) is not None:
                record.began()
        except (errors.TooManyPipelinesError, errors.AuditUnavailableError) as error:
            await abort(context, error)

        self._open.count(connection, principal, 1)
        try:
            await self._serve(messages, context)
        finally:
            self._open.count(connection, principal, -1)

    async def _serve(self, messages: AsyncIterator[bytes], context: Context) -> None:
        caller = authenticator.current_caller()
        core = pipeline_core.PipelineCore(self._messages_ahead)
        stream = _Stream(core, self._rests, self._memory, holder_of(caller, context))
        tasks = [
            asyncio.create_task(self._read(messages, stream)),
            asyncio.create_task(self._decide_all(stream)),
        ]
        try:
            while (message := await stream.next_answer()) is not None:
                answer = await _answer(message, context)
                answered_at = time.perf_counter()
                _record(message)
                # Its caller's next message may be here before the write returns, and is alone then.
                stream.mark_answered()
                try:
                    await context.write(answer)
                finally:
                    # After the answer, which its caller waits for. The commit is done in any case.
                    self._count(message, answered_at)
        finally:
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                stream.drop()

    def _count(
        self,
        message: Outcome,
        answered_at: float,
    ) -> None:
        if isinstance(message, pipeline_messages.DecidedMessage):
            self._controller.commits.add(*message.verdicts(), answered_at - message.decided_at)

    async def _read(self, messages: AsyncIterator[bytes], stream: _Stream) -> None:
        caller = authenticator.current_caller()
        try:
            await stream.room()
            async for data in messages:
                # Messages of many pipelines may arrive at once; their work is spread over turns.
                await self._budget.take(ROWS_A_MESSAGE + len(data) // BYTES_A_ROW)
                if caller.policy.quotas:
                    await self._rated(caller, len(data))
                stream.receive(data)
                if not (stream.core.is_awaited and self._rests.is_alone):
                    stream.wake()
                # Without waking another task.
                elif not await self._decide_batch(stream, is_alone=True):
                    return
                await stream.room()
        finally:
            stream.end()

    async def _rated(self, caller: authenticator.Caller, size: int) -> None:
        """Wait until a message may be taken by the rates of this pipeline's caller."""
        while True:
            try:
                return self._rates.take(caller, size, asyncio.get_running_loop().time())
            except errors.RateExceededError as error:
                await asyncio.sleep(error.retry_after_ms / 1000)

    async def _decide_all(self, stream: _Stream) -> None:
        try:
            while await stream.wait():
                await self._rests.wait()
                if not await self._decide_batch(stream):
                    return
                await asyncio.sleep(0)
        finally:
            stream.core.answers.append(None)
            stream.wake_answers()

    async def _decide_batch(self, stream: _Stream, *, is_alone: bool = False) -> bool:
        """Decide waiting messages. Return False if one of them ends the stream.

        A single message is replicated at once, since no other will join it.
        """
        refusal = await self._turn()
        self._rests.start_batch()
        stream.read_batch(refusal)
        decided = await self._decide_messages(stream.core.batch)
        if is_alone:
            self._controller.flush()
        stream.core.settle(decided)
        stream.wake_answers()
        return stream.core.rejected is None

    async def _turn(self) -> Exception | None:
        try:
            if (record := current_record()) is not None:
                record.require()
            if self._guard is not None:
                self._guard.require(MemoryClass.COMMIT)
            await self._controller.turn()
        except Exception as error:  # noqa: BLE001 - reported to the next message
            return error
        return None

    async def _decide_messages(self, messages: Sequence[PipelineMessage]) -> list[Outcome]:
        """Decide the messages of a batch. The last one may end the stream."""
        held_to = authenticator.current_caller().held_to
        decided = await self._decide_together(messages, held_to) if len(messages) > 1 else None
        return await self._decide_each(messages, held_to) if decided is None else decided

    async def _decide_together(
        self, messages: Sequence[PipelineMessage], held_to: Principal | None
    ) -> list[Outcome] | None:
        """Decide messages that contain only uploads as one request.

        None if they are not decided.
        """
        uploads = [
            part for message in messages if len(message.commits) == 1 and (part := message.uploads)
        ]
        joined = join_uploads(uploads) if len(uploads) == len(messages) else None
        if joined is None:
            return None
        await self._budget.take(pipeline_core.count_rows(joined))
        try:
            submission = self._controller.submit((joined,), held_to)
        except Exception:  # noqa: BLE001 - whose fault it is shows when each is decided alone
            return None
        answers = split_answers(cast(CommitUploadsAnswer, submission.answers[0]), uploads)
        now = time.perf_counter()
        return [
            pipeline_messages.DecidedMessage(
                message.sequence,
                *((submission,), (), answer, ()),
                now,
                message.trace and message.trace.decided((submission,)),
            )
            for message, answer in zip(messages, answers, strict=True)
        ]

    async def _decide_each(
        self, messages: Sequence[PipelineMessage], held_to: Principal | None
    ) -> list[Outcome]:
        decided: list[Outcome] = []
        for message in messages:
            try:
                decided.append(await self._decide(message, held_to))
            except Exception as error:  # noqa: BLE001 - reported when its turn comes
                decided.append(pipeline_messages.RejectedMessage(message.sequence, error))
                break
        return decided

    async def _decide(
        self, message: PipelineMessage, held_to: Principal | None
    ) -> pipeline_messages.DecidedMessage:
        submissions: list[Submission] = []
        if held_to is not None:
            # All of it at first, so that one that speaks for another's node changes nothing.
            self._controller.require_own(message.commits, held_to)
        answered_bytes = 0
        for part, rows in pipeline_core.split_message(message):
            await self._budget.take(rows)
            submission = self._controller.submit(part, held_to, answered_bytes)
            answered_bytes += sum(map(commit_bytes, submission.answers))
            submissions.append(submission)
        answers = [answer for submission in submissions for answer in submission.answers]
        uploads = answers.pop() if message.uploads is not None else None
        effects, now = message.with_effects, time.perf_counter()
        trace = message.trace and message.trace.decided(submissions)
        return pipeline_messages.DecidedMessage(
            message.sequence, submissions, answers, uploads, effects, now, trace
        )


def _read(
    data: bytes, refusal: Exception | None, came_ns: int
) -> PipelineMessage | pipeline_messages.RejectedMessage:
    """Parse a message completely before its commits are decided, so it changes all or nothing."""
    sequence: int | None = None
    try:
        message = wire_columns.parse_batch(data)
        sequence = message.sequence
        if refusal is not None:
            raise refusal
        commits: list[pipeline_messages.PipelineCommit] = [
            _read_commit(index, commit) for index, commit in enumerate(message.commits)
        ]
        if message.HasField("uploads"):
            commits.append(wire_columns.uploads_in(message.uploads))
        with_effects = [
            (place, commit)
            for place, commit in enumerate(message.commits)
            if commit.kv_puts or commit.trims
        ]
        trace = None
        if came_ns and message.traceparents:
            trace = pipeline_messages.MessageTrace(tuple(message.traceparents), came_ns)
        return PipelineMessage(
            sequence, commits, sum(map(pipeline_core.count_rows, commits)), with_effects, trace
        )
    except Exception as error:  # noqa: BLE001 - reported when its turn comes
        return pipeline_messages.RejectedMessage(sequence, error)


def _read_commit(
    index: int, commit: pb.PackedCommitStreamSetObjectRequest
) -> CommitStreamSetObject:
    try:
        request = wire_columns.commit_stream_set_object_in(commit)
    except errors.InvalidRequestError as error:
        reason = str(error).removeprefix(f"{error.field}: ")
        raise errors.InvalidRequestError(f"commits[{index}].{error.field}", reason) from None
    require_fields(authenticator.current_caller(), "ObjectService.CommitPipeline", request)
    return request


def _record(message: Outcome) -> None:
    """Note a message's commits in the record of the call, before they are answered."""
    if (
        isinstance(message, pipeline_messages.DecidedMessage)
        and (record := current_record()) is not None
    ):
        tally = message.tally()
        record.counted(*tally)
        for place, commit in message.with_effects:
            answer = cast(CommitStreamSetObjectAnswer, message.commits[place])
            record.carried(commit, wire_columns.commit_stream_set_object_out(answer), tally[-1])


async def _answer(message: Outcome, context: Context) -> bytes:
    try:
        return await message.response()
    except Exception as error:  # noqa: BLE001 - every failure of a message is a status
        where = {} if message.sequence is None else {"sequence": str(message.sequence)}
        await abort(context, error, where)
