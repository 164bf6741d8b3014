"""Commit pipeline: many commits per message, several messages in flight, across leader changes.

Owns the connection, what was sent on it and not answered, and the time that may take. What is
handed in while messages are under way waits and travels together in the next one. After a failure
everything unanswered is sent again, in order: commits are idempotent by object id. The contents of
a message are in `commit_messages`.
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
"""Maximum of commits in flight; further callers wait."""

_METHOD = "CommitPipeline"

VerdictT = TypeVar("VerdictT")
_PATH = f"/streammeta.v1.ObjectService/{_METHOD}"


class CommitPipeline(ClosedAtExit):
    """Commits of one node, judged in the order in which they were handed in.

    Use it from one event loop, as an async context manager or with `close`. `deadline_s` bounds the
    time from handing a commit in to its answer, in seconds; None: the client's.
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
        self._room = asyncio.Event()
        self._patience: asyncio.Timeout | None = None
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
        """Hand in an upload; wait while too much is pending.

        The result is a future of the verdict. It fails with `ControllerUnavailableError` when the
        deadline passes, and with a `RefusedError` when the controller refuses the whole. Raises
        `WriterClosedError` after `close`, and what ended the pipeline if it ended by itself.
        """
        check_kind("upload", upload, Upload, "an Upload")
        await self._wait_for_room()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[UploadVerdict] = loop.create_future()
        self._add(PendingUpload.of(upload, done, loop.time() + self._deadline))
        return done

    async def commit(self, commit: Commit[VerdictT]) -> asyncio.Future[VerdictT]:
        """Hand in a commit of any other form; all else as `upload`.

        The future is of its verdict.
        """
        check_offers("commit", commit, "request", "a Commit, which makes its request")
        await self._wait_for_room()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[VerdictT] = loop.create_future()
        request, expires = commit.request(self._node), loop.time() + self._deadline
        self._add(PendingCommit(request, commit.verdict, done, expires))
        return done

    async def upload_with_effects(self, asked: UploadWithEffects) -> asyncio.Future[EffectsVerdict]:
        """Hand in an upload with values to put and streams to trim; all else as `upload`."""
        check_kind("asked", asked, UploadWithEffects, "an UploadWithEffects")
        return await self.commit(EffectsCommit(asked))

    async def close(self, deadline_s: float | None = None) -> None:
        """Wait until everything handed in is answered or has failed, then stop.

        What is not answered `deadline_s` seconds from now fails with `WriterClosedError`.
        """
        self._closed = self._is_stopped = True
        self._room.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while self._pending:
                    self._room.clear()
                    await self._room.wait()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # -- handing in

    async def _wait_for_room(self) -> None:
        while self._pending >= PENDING_MAX and not self._closed:
            self._room.clear()
            await self._room.wait()
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
            self._task = loop.create_task(self._run(), context=tracing.outside())

    def _on_done(self, began: float, done: asyncio.Future[Any]) -> None:
        self._pending -= 1
        if not done.cancelled():
            verdict = _verdict_of(done)
            self._client.tally.count_commit(verdict, asyncio.get_running_loop().time() - began)
        self._room.set()

    # -- finding the leader, again and again

    async def _run(self) -> None:
        ended: Exception = WriterClosedError(
            "the pipeline ended; what it carried may have been committed"
        )
        try:
            while True:
                await self._serve()
        except Exception as error:  # noqa: BLE001 - every caller gets it
            ended = self._ended = error
        finally:
            self._closed = True
            self._unanswered = self._pending
            self._fail_all(ended)

    async def _serve(self) -> None:
        """Send to the leader until that ends, then wait as long as the search for it asks."""
        while not self._sent and not self._queue:
            self._work.clear()
            await self._work.wait()
        try:
            await self._converse(self._search.endpoint)
            failure = RpcFailure(grpc.StatusCode.UNAVAILABLE, "the stream of answers ended")
        except asyncio.CancelledError:
            if not self._client.was_replaced():
                raise
            return  # what is not answered goes out again, on the new channel
        except TimeoutError:
            late = "no answer in the time of one attempt"
            failure = RpcFailure(grpc.StatusCode.DEADLINE_EXCEEDED, late)
        except grpc.aio.AioRpcError as error:
            failure = self._client.failure(error)
        wait = self._search.failed(failure)
        if wait is None:
            self._refused(refusal(_METHOD, failure))
            return
        if self._sent or self._queue:
            self._client.tally.count_failure(kind_of(failure))
        self._drop_expired()
        if self._sent or self._queue:
            await asyncio.sleep(wait)
        else:
            self._search.restart()  # nothing waits: the next commit begins anew

    def _drop_expired(self) -> None:
        now = asyncio.get_running_loop().time()
        error = self._client.unavailable(_METHOD, self._deadline, self._search)
        for message in self._sent:
            message.drop_expired(now, error)
        self._sent = deque(message for message in self._sent if message)
        self._queue.drop_expired(now, error)

    def _refused(self, error: BrokerClientError) -> None:
        """The oldest message was refused as a whole: find out which commit of it is to blame."""
        if isinstance(error, UnsupportedError | PermissionDeniedError):
            self._fail_all(error)
        elif self._sent:
            message = self._sent.popleft()
            if len(message) == 1:
                message.fail(error)
            else:
                self._sent.extendleft(reversed(self._queue.halves(message)))

    def _fail_all(self, error: Exception) -> None:
        while self._sent:
            self._sent.popleft().fail(error)
        self._queue.fail(error)

    # -- one stream of messages

    async def _converse(self, endpoint: str) -> None:
        """Send and take answers until the stream ends.

        Raises `TimeoutError` when an answer takes too long.
        """
        call: Any = self._client.channel(endpoint).stream_stream(_PATH)()
        sender = asyncio.create_task(self._send(call))
        try:
            async with asyncio.timeout(None) as self._patience:
                while (data := await call.read()) is not grpc.aio.EOF:
                    self._take(data)
                    self._search.answered()
        finally:
            self._patience = None
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            call.cancel()

    async def _send(self, call: Any) -> None:
        with contextlib.suppress(
            grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError
        ):
            # The reader of the answers reports why the stream ended.
            for message in tuple(self._sent):
                await self._write(call, message)
            while True:
                while not self._queue or len(self._sent) >= MESSAGES_IN_FLIGHT:
                    self._work.clear()
                    await self._work.wait()
                # Not in a variable: while this waits it would keep the objects of its commits.
                self._sent.append(self._queue.take())
                await self._write(call, self._sent[-1])

    async def _write(self, call: Any, message: CommitMessage) -> None:
        if self._patience is not None and self._patience.when() is None:
            self._be_patient()
        await call.write(message.encode(self._node))

    def _take(self, data: bytes) -> None:
        try:
            answer = objects_pb2.CommitPipelineResponse.FromString(data)
        except DecodeError as error:
            raise ProtocolViolationError(_METHOD, detail="an answer does not parse") from error
        if not self._sent:
            raise ProtocolViolationError(
                _METHOD, detail="an answer arrived without a message in flight"
            )
        self._sent[0].settle(answer)
        self._sent.popleft()
        self._work.set()
        self._be_patient()

    def _be_patient(self) -> None:
        """Give the oldest message its time to be answered; without any, wait for ever."""
        if self._patience is not None:
            limit = min(self._client.attempt_timeout_s, self._deadline)
            now = asyncio.get_running_loop().time()
            self._patience.reschedule(now + limit if self._sent else None)


def _verdict_of(done: asyncio.Future[Any]) -> str:
    """Return how a commit has ended, one of `tally.VERDICTS`."""
    error = done.exception()  # marks it as retrieved: the caller may have been cancelled
    if error is not None:
        is_open = isinstance(error, ControllerUnavailableError | WriterClosedError)
        return "unanswered" if is_open else "refused"
    seen = done.result()
    codes = seen.values() if isinstance(seen, Mapping) else (seen.error,)
    return "accepted" if all(code == ERROR_CODE_NONE for code in codes) else "refused"
