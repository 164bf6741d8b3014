"""Commit pipeline: many commits per message, several messages in flight, across leader changes.

Owns the connection, its unanswered messages, and the deadline of an answer. Commits that arrive
while messages are in flight share the next message. After a failure all unanswered messages are
sent again, in order: commits are idempotent by object id. `messages` builds the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from streammeta.client.arguments import check_client, check_kind, check_offers, check_seconds
from streammeta.client.commits.effects import EffectsCommit, EffectsVerdict, UploadWithEffects
from streammeta.client.commits.messages import (
    Commit,
    CommitMessage,
    CommitQueue,
    PendingCommit,
    PendingUpload,
    Upload,
    UploadVerdict,
)
from streammeta.client.controllers.controller_client import ControllerClient, refusal
from streammeta.client.errors import (
    BrokerClientError,
    ControllerUnavailableError,
    PermissionDeniedError,
    ProtocolViolationError,
    UnsupportedError,
    WriterClosedError,
)
from streammeta.client.model import NodeIdentity, node_message
from streammeta.client.resources.resources import ClosedAtExit, warn_unclosed
from streammeta.rpc import tracing
from streammeta.rpc.failures import RpcFailure
from streammeta.rpc.leader_router import LeaderSearch, kind_of
from streammeta.v1 import objects_pb2
from streammeta.v1.common_pb2 import ERROR_CODE_NONE

MESSAGES_IN_FLIGHT = 4
PENDING_MAX = 20_000
"""Maximum number of commits in flight. Further callers wait."""

_METHOD = "CommitPipeline"

VerdictT = TypeVar("VerdictT")
_PATH = f"/streammeta.v1.ObjectService/{_METHOD}"


class CommitPipeline(ClosedAtExit):
    """Commits of one node, decided in the order of submission.

    Use it from one event loop, as an async context manager or with `close`. `deadline_s` limits the
    time from the submission of a commit to its answer, in seconds, None for the client's deadline.
    """

    def __init__(
        self, client: ControllerClient, node: NodeIdentity, *, deadline_s: float | None = None
    ) -> None:
        check_client(client)
        check_kind("node", node, NodeIdentity, "a NodeIdentity, such as `session.node`")
        self._client = client
        self._node = node_message(node)
        self._deadline = (
            client.deadline_s if deadline_s is None else check_seconds("deadline_s", deadline_s)
        )
        self._queue = CommitQueue()
        self._sent: deque[CommitMessage] = deque()
        self._pending = 0
        self._work = asyncio.Event()
        self._space_freed = asyncio.Event()
        self._timeout: asyncio.Timeout | None = None
        self._search = LeaderSearch(client.router)
        self._closed = False
        self._is_stopped = False
        self._unanswered = 0
        self._ended: Exception | None = None
        self._task: asyncio.Task[None] | None = None

    def __del__(self) -> None:
        if getattr(self, "_task", None) is not None and not self._is_stopped:
            warn_unclosed(
                self,
                f"{self._unanswered} commits of node {self._node.node_id} were not answered",
                "use `async with CommitPipeline(...)` or `await pipeline.close()`",
            )

    async def upload(self, upload: Upload) -> asyncio.Future[UploadVerdict]:
        """Submit an upload. Wait while too many commits are pending.

        The result is a future of the verdict. It fails with `ControllerUnavailableError` when the
        deadline passes, and with a `RefusedError` when the controller rejects the whole commit.
        Raises `WriterClosedError` after `close`, and the error that ended the pipeline, if any.
        """
        check_kind("upload", upload, Upload, "an Upload")
        await self._wait_for_space()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[UploadVerdict] = loop.create_future()
        self._add(PendingUpload.of(upload, done, loop.time() + self._deadline))
        return done

    async def commit(self, commit: Commit[VerdictT]) -> asyncio.Future[VerdictT]:
        """Submit a commit of any other form, and return the future of its verdict.

        For the rest, see `upload`.
        """
        check_offers("commit", commit, "request", "a Commit, which builds its request")
        await self._wait_for_space()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[VerdictT] = loop.create_future()
        request, expires = commit.request(self._node), loop.time() + self._deadline
        self._add(PendingCommit(request, commit.verdict, done, expires))
        return done

    async def upload_with_effects(self, asked: UploadWithEffects) -> asyncio.Future[EffectsVerdict]:
        """Submit an upload with values to put and streams to trim. See `upload`."""
        check_kind("asked", asked, UploadWithEffects, "an UploadWithEffects")
        return await self.commit(EffectsCommit(asked))

    async def close(self, deadline_s: float | None = None) -> None:
        """Wait until every submitted commit is answered or has failed, then stop.

        Commits without an answer after `deadline_s` seconds fail with `WriterClosedError`.
        """
        self._closed = self._is_stopped = True
        self._space_freed.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while self._pending:
                    self._space_freed.clear()
                    await self._space_freed.wait()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # -- submission

    async def _wait_for_space(self) -> None:
        # A loop: other callers may have taken the space before this one runs.
        while self._pending >= PENDING_MAX and not self._closed:
            self._space_freed.clear()
            await self._space_freed.wait()
        if self._ended is not None:
            raise self._ended
        if self._closed:
            raise WriterClosedError("a commit came after its pipeline was closed")

    def _add(self, pending: PendingCommit | PendingUpload) -> None:
        pending.traceparent = tracing.current_traceparent()
        loop = asyncio.get_running_loop()
        pending.done.add_done_callback(partial(self._on_done, loop.time()))
        self._pending += 1
        self._queue.add(pending)
        self._work.set()
        if self._task is None:
            # The task outlives the caller whose commit starts it, so it is outside the caller's
            # trace.
            self._task = loop.create_task(self._run(), context=tracing.outside())

    def _on_done(self, began: float, done: asyncio.Future[Any]) -> None:
        self._pending -= 1
        if not done.cancelled():
            # A cancelled commit has no verdict, and is not counted.
            verdict = _verdict_of(done)
            self._client.tally.count_commit(verdict, asyncio.get_running_loop().time() - began)
        self._space_freed.set()

    # -- the search for the leader

    async def _run(self) -> None:
        ended: Exception = WriterClosedError(
            "the pipeline ended. Its unanswered commits may have been committed"
        )
        try:
            while True:
                await self._serve()
        except Exception as error:  # noqa: BLE001 - every caller receives it
            ended = self._ended = error
        finally:
            self._closed = True
            self._unanswered = self._pending
            self._fail_all(ended)

    async def _serve(self) -> None:
        """Send to the leader until that fails, then wait as long as the search for it requires."""
        while not self._sent and not self._queue:
            self._work.clear()
            await self._work.wait()

        try:
            await self._exchange(self._search.endpoint)
            failure = RpcFailure(grpc.StatusCode.UNAVAILABLE, "the stream of answers ended")
        except asyncio.CancelledError:
            if not self._client.was_replaced():
                raise
            return  # unanswered messages are sent again, on the new channel
        except TimeoutError:
            late = "no answer in the time of one attempt"
            failure = RpcFailure(grpc.StatusCode.DEADLINE_EXCEEDED, late)
        except grpc.aio.AioRpcError as error:
            failure = self._client.failure(error)

        wait = self._search.failed(failure)
        if wait is None:
            self._process_rejection(refusal(_METHOD, failure))
            return
        if self._sent or self._queue:
            self._client.tally.count_failure(kind_of(failure))
        # Before the wait, which is only for commits that still have time.
        self._drop_expired()
        if self._sent or self._queue:
            await asyncio.sleep(wait)
        else:
            self._search.restart()  # the next commit starts a new search

    def _drop_expired(self) -> None:
        now = asyncio.get_running_loop().time()
        error = self._client.unavailable(_METHOD, self._deadline, self._search)
        for message in self._sent:
            message.drop_expired(now, error)
        self._sent = deque(message for message in self._sent if message)
        self._queue.drop_expired(now, error)

    def _process_rejection(self, error: BrokerClientError) -> None:
        """Fail the commit for which the oldest message was rejected, or split the message."""
        # These errors concern the caller, so every other commit would fail in the same way.
        if isinstance(error, UnsupportedError | PermissionDeniedError):
            self._fail_all(error)
        elif self._sent:
            message = self._sent.popleft()
            if len(message) == 1:
                message.fail(error)
            else:
                # Bisection finds the bad commit with a logarithmic number of messages.
                self._sent.extendleft(reversed(self._queue.halves(message)))

    def _fail_all(self, error: Exception) -> None:
        while self._sent:
            self._sent.popleft().fail(error)
        self._queue.fail(error)

    # -- one stream of messages

    async def _exchange(self, endpoint: str) -> None:
        """Send messages and process answers until the stream ends.

        Raises `TimeoutError` when an answer takes too long.
        """
        call: Any = self._client.channel(endpoint).stream_stream(_PATH)()
        sender = asyncio.create_task(self._send(call))
        try:
            async with asyncio.timeout(None) as self._timeout:
                while (data := await call.read()) is not grpc.aio.EOF:
                    self._process_answer(data)
                    self._search.answered()
        finally:
            self._timeout = None
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            # After the sender: a write on a cancelled call raises.
            call.cancel()

    async def _send(self, call: Any) -> None:
        with contextlib.suppress(
            grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError
        ):
            # The reader of the answers reports why the stream ended.
            # A new stream starts with the unanswered messages, in their order.
            for message in tuple(self._sent):
                await self._write(call, message)
            while True:
                while not self._queue or len(self._sent) >= MESSAGES_IN_FLIGHT:
                    self._work.clear()
                    await self._work.wait()
                # No variable: during the wait it would keep the objects of its commits in memory.
                self._sent.append(self._queue.take())
                await self._write(call, self._sent[-1])

    async def _write(self, call: Any, message: CommitMessage) -> None:
        if self._timeout is not None and self._timeout.when() is None:
            self._restart_timeout()
        await call.write(message.encode(self._node))

    def _process_answer(self, data: bytes) -> None:
        try:
            answer = objects_pb2.CommitPipelineResponse.FromString(data)
        except DecodeError as error:
            raise ProtocolViolationError(_METHOD, detail="an answer does not parse") from error
        if not self._sent:
            raise ProtocolViolationError(
                _METHOD, detail="an answer arrived without a message in flight"
            )
        # Answers arrive in the order of the messages.
        self._sent[0].settle(answer)
        self._sent.popleft()
        self._work.set()
        self._restart_timeout()

    def _restart_timeout(self) -> None:
        """Start the timeout of the oldest message. Without any, disable it."""
        if self._timeout is not None:
            limit = min(self._client.attempt_timeout_s, self._deadline)
            now = asyncio.get_running_loop().time()
            self._timeout.reschedule(now + limit if self._sent else None)


def _verdict_of(done: asyncio.Future[Any]) -> str:
    """Return the outcome of a commit, one of `tally.VERDICTS`."""
    error = done.exception()  # marks it as retrieved: the caller may have been cancelled
    if error is not None:
        is_open = isinstance(error, ControllerUnavailableError | WriterClosedError)
        return "unanswered" if is_open else "refused"
    seen = done.result()
    codes = seen.values() if isinstance(seen, Mapping) else (seen.error,)
    return "accepted" if all(code == ERROR_CODE_NONE for code in codes) else "refused"
