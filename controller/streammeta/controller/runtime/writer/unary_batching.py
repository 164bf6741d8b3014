"""Batching of commits that arrive as single calls together: decided and appended as one.

Deciding and applying a commit costs about the same for one object as for fifty, and so does a log
record. Calls that arrive while a batch is in flight therefore wait and share the next one. A lone
call that follows another lone one is decided immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from streammeta.controller.errors import OutcomeUnknownError
from streammeta.controller.metadata.api.answers import Answer, CommitUploadsAnswer
from streammeta.controller.metadata.api.requests import CommitStreamSetObject
from streammeta.controller.metadata.api.upload_batches import UploadBatch, is_plain
from streammeta.controller.metadata.tables.values import NodeIdentity
from streammeta.controller.runtime.writer.controller import Answered, MetadataController
from streammeta.controller.runtime.writer.group_commit import ENOUGH_BYTES, GroupCommitDelay
from streammeta.controller.runtime.writer.submission import Submission
from streammeta.tls.identity import Principal

ANSWERED_PER_TURN = 32
"""Callers woken in one event loop turn: their work costs more than waking them."""

_CALL_BYTES = ENOUGH_BYTES // 20
"""Size of a call for the group-commit delay: twenty calls justify a batch."""

_Speaker: TypeAlias = tuple[NodeIdentity, Principal | None]
"""The node that commits speak for, and the broker that is limited to its own node."""


@dataclass(frozen=True, slots=True)
class _Call:
    request: CommitStreamSetObject
    held_to: Principal | None
    answered: asyncio.Future[Answered]

    def fail(self, error: Exception) -> None:
        if not self.answered.done():
            self.answered.set_exception(error)


class CommitBatcher:
    """Commits that wait for the next log batch, on the controller's event loop."""

    def __init__(self, controller: MetadataController) -> None:
        self._controller = controller
        self._calls: deque[_Call] = deque()
        self._deciding: asyncio.Task[None] | None = None
        self._rests = GroupCommitDelay()
        self._came_together = 2
        """Calls in the last batch. Starts at 2, so that no caller counts as alone before the
        first."""
        self._answering: set[asyncio.Task[None]] = set()

    async def write(
        self, request: CommitStreamSetObject, held_to: Principal | None = None
    ) -> Answered:
        """Decide, replicate and answer one commit. Raises as `MetadataController.write` does."""
        if not is_plain(request):
            return await self._controller.write(request, held_to)
        if self._is_alone():
            return await self._write_alone(request, held_to)
        call = _Call(request, held_to, asyncio.get_running_loop().create_future())
        self._calls.append(call)
        self._rests.record_arrival(_CALL_BYTES)
        if self._deciding is None:
            self._deciding = asyncio.create_task(self._decide_all())
        try:
            return await call.answered
        finally:
            self._rests.record_answer(_CALL_BYTES)

    def _is_alone(self) -> bool:
        """Whether no other call waits, is in flight, or is likely to arrive at the same time."""
        is_first = self._deciding is None and not self._calls
        return is_first and self._came_together <= 1 and self._controller.is_settled

    async def _write_alone(
        self, request: CommitStreamSetObject, held_to: Principal | None
    ) -> Answered:
        await self._controller.turn()
        submission = self._controller.submit((request,), held_to)
        # No other call is expected in this turn, so waiting for the next one would only add
        # latency.
        self._controller.flush()
        await submission.committed()
        return Answered(submission.answers[0], submission.offset)

    async def _decide_all(self) -> None:
        try:
            while self._calls:
                try:
                    await self._turn()
                except Exception as error:  # noqa: BLE001 - passed to the callers
                    self._fail_all(error)
                    return
                self._decide_waiting()
                # Calls that arrived meanwhile join the queue before the next batch forms.
                await asyncio.sleep(0)
        finally:
            self._deciding = None

    async def _turn(self) -> None:
        """Wait for the commit of everything appended so far.

        Calls arrive one by one as others are answered. Without this wait each batch would contain
        one or two. A commit may also be faster than gRPC delivers concurrent calls.
        """
        with contextlib.suppress(OutcomeUnknownError):  # the next decision sees the new state
            await self._controller.settled()
        await self._rests.wait()
        await self._controller.turn()
        self._rests.start_batch()

    def _fail_all(self, error: Exception) -> None:
        while self._calls:
            self._rests.record_departure(_CALL_BYTES)
            self._calls.popleft().fail(error)

    def _decide_waiting(self) -> None:
        """Decide the waiting calls, one batch per node.

        Calls that fit no batch wait for the next round.
        """
        batches: defaultdict[_Speaker, UploadBatch] = defaultdict(UploadBatch)
        taken: defaultdict[_Speaker, list[_Call]] = defaultdict(list)
        left: deque[_Call] = deque()
        for call in self._calls:
            if call.answered.done():
                continue  # its caller has disconnected
            speaker = (call.request.node, call.held_to)
            if batches[speaker].add(call.request):
                taken[speaker].append(call)
            else:
                left.append(call)

        self._rests.record_departure(_CALL_BYTES * (len(self._calls) - len(left)))
        self._calls = left
        self._came_together = sum(map(len, taken.values()))
        for speaker, calls in taken.items():
            if len(calls) == 1:
                self._decide_alone(calls[0])
            else:
                self._decide_together(batches[speaker], calls)

    def _decide_together(self, batch: UploadBatch, calls: Sequence[_Call]) -> None:
        try:
            submission = self._controller.submit((batch.request(),), calls[0].held_to)
        except Exception:  # noqa: BLE001 - deciding each call alone shows which one it is
            for call in calls:
                self._decide_alone(call)
            return

        (answer,) = submission.answers
        assert isinstance(answer, CommitUploadsAnswer)
        accepted = batch.answers(answer)
        done: list[tuple[_Call, Answer]] = []
        for call in calls:
            if (found := accepted.get(call.request.object_id)) is None:
                self._decide_alone(call)
            else:
                done.append((call, found))

        if done:
            self._answer_when_committed(submission, done)

    def _decide_alone(self, call: _Call) -> None:
        try:
            submission = self._controller.submit((call.request,), call.held_to)
        except Exception as error:  # noqa: BLE001 - passed to the caller
            call.fail(error)
        else:
            self._answer_when_committed(submission, [(call, submission.answers[0])])

    def _answer_when_committed(
        self, submission: Submission, done: Sequence[tuple[_Call, Answer]]
    ) -> None:
        task = asyncio.create_task(_answer(submission, done))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)


async def _answer(submission: Submission, done: Sequence[tuple[_Call, Answer]]) -> None:
    try:
        await submission.committed()
    except Exception as error:  # noqa: BLE001 - passed to the callers
        for call, _ in done:
            call.fail(error)
        return
    for count, (call, answer) in enumerate(done, start=1):
        if not call.answered.done():
            call.answered.set_result(Answered(answer, submission.offset))
        if count % ANSWERED_PER_TURN == 0:
            await asyncio.sleep(0)
