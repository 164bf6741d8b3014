"""Commit pipeline: many commits per message, several messages in flight, across leader changes.

Commits that arrive while messages are in flight share the next message. After a failure all
unanswered messages are sent again, in order: commits are idempotent by object id. `core` decides
which messages to send and which commit has which outcome. This module owns the connection, the
callers' futures and the timers, and carries that out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import grpc

from streammeta.client.arguments import check_client, check_kind, check_offers, check_seconds
from streammeta.client.commits import messages as commit_messages
from streammeta.client.commits.core import PipelineCore
from streammeta.client.commits.effects import EffectsCommit, EffectsVerdict, UploadWithEffects
from streammeta.client.controllers.controller_client import ControllerClient, rejection
from streammeta.client.errors import ControllerUnavailableError, WriterClosedError
from streammeta.client.model import NodeIdentity, node_message
from streammeta.client.resources.resources import ClosedAtExit, warn_unclosed
from streammeta.rpc import tracing
from streammeta.rpc.failures import RpcFailure
from streammeta.rpc.leader_router import LeaderSearch, kind_of
from streammeta.v1.common_pb2 import ERROR_CODE_NONE

_METHOD = "CommitPipeline"
_PATH = f"/streammeta.v1.ObjectService/{_METHOD}"

VerdictT = TypeVar("VerdictT")


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
        self._core = PipelineCore(self._node, min(client.attempt_timeout_s, self._deadline))
        self._work = asyncio.Event()
        self._space_freed = asyncio.Event()
        self._timeout: asyncio.Timeout | None = None
        self._search = LeaderSearch(client.router)
        self._is_stopped = False
        self._unanswered = 0
        self._task: asyncio.Task[None] | None = None

    def __del__(self) -> None:
        if getattr(self, "_task", None) is not None and not self._is_stopped:
            warn_unclosed(
                self,
                f"{self._unanswered} commits of node {self._node.node_id} were not answered",
                "use `async with CommitPipeline(...)` or `await pipeline.close()`",
            )

    async def upload(
        self, upload: commit_messages.Upload
    ) -> asyncio.Future[commit_messages.UploadVerdict]:
        """Submit an upload. Wait while too many commits are pending.

        The result is a future of the verdict. It fails with `ControllerUnavailableError` when the
        deadline passes, and with a `RejectedError` when the controller rejects the whole commit.
        Raises `WriterClosedError` after `close`, and the error that ended the pipeline, if any.
        """
        check_kind("upload", upload, commit_messages.Upload, "an Upload")
        await self._wait_for_space()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[commit_messages.UploadVerdict] = loop.create_future()
        self._add(commit_messages.PendingUpload.of(upload, done, loop.time() + self._deadline))
        return done

    async def commit(self, commit: commit_messages.Commit[VerdictT]) -> asyncio.Future[VerdictT]:
        """Submit a commit of any other form, and return the future of its verdict.

        For the rest, see `upload`.
        """
        check_offers("commit", commit, "request", "a Commit, which builds its request")
        await self._wait_for_space()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[VerdictT] = loop.create_future()
        request, expires = commit.request(self._node), loop.time() + self._deadline
        self._add(commit_messages.PendingCommit(request, commit.verdict, done, expires))
        return done

    async def upload_with_effects(self, asked: UploadWithEffects) -> asyncio.Future[EffectsVerdict]:
        """Submit an upload with values to put and streams to trim. See `upload`."""
        check_kind("asked", asked, UploadWithEffects, "an UploadWithEffects")
        return await self.commit(EffectsCommit(asked))

    async def close(self, deadline_s: float | None = None) -> None:
        """Wait until every submitted commit is answered or has failed, then stop.

        Commits without an answer after `deadline_s` seconds fail with `WriterClosedError`.
        """
        self._is_stopped = True
        self._core.close()
        self._space_freed.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while self._core.open:
                    self._space_freed.clear()
                    await self._space_freed.wait()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # -- submission

    async def _wait_for_space(self) -> None:
        # A loop: other callers may have taken the space before this one runs.
        while self._core.is_full and self._core.rejection is None:
            self._space_freed.clear()
            await self._space_freed.wait()
        if self._core.rejection is not None:
            raise self._core.rejection

    def _add(self, pending: commit_messages.Pending) -> None:
        pending.traceparent = tracing.current_traceparent()
        loop = asyncio.get_running_loop()
        pending.done.add_done_callback(partial(self._on_done, pending, loop.time()))
        self._core.submit(pending)
        self._work.set()
        if self._task is None:
            # The task outlives the caller whose commit starts it, so it is outside the caller's
            # trace.
            self._task = loop.create_task(self._run(), context=tracing.outside())

    def _on_done(
        self, pending: commit_messages.Pending, began: float, done: asyncio.Future[Any]
    ) -> None:
        if done.cancelled():
            # It has no verdict, and is not counted.
            self._core.cancel(pending)
            self._space_freed.set()
        else:
            verdict = _verdict_of(done)
            self._client.tally.count_commit(verdict, asyncio.get_running_loop().time() - began)

    def _deliver(self, outcomes: Iterable[commit_messages.Outcome]) -> None:
        for pending, outcome in outcomes:
            # The core does not know yet of a caller that was cancelled just now.
            if pending.done.done():
                continue
            if isinstance(outcome, Exception):
                pending.done.set_exception(outcome)
            else:
                pending.done.set_result(outcome)
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
            ended = error
        finally:
            self._unanswered = self._core.open
            self._deliver(self._core.end(ended))

    async def _serve(self) -> None:
        """Send to the leader until that fails, then wait as long as the search for it requires."""
        while self._core.is_idle:
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

        wait = self._search.record_failure(failure)
        if wait is None:
            self._deliver(self._core.reject(rejection(_METHOD, failure)))
            return
        if not self._core.is_idle:
            self._client.tally.count_failure(kind_of(failure))
        # Before the wait, which is only for commits that still have time.
        late_error = self._client.unavailable(_METHOD, self._deadline, self._search)
        self._deliver(self._core.expire(asyncio.get_running_loop().time(), late_error))
        if self._core.is_idle:
            self._search.restart()  # the next commit starts a new search
        else:
            await asyncio.sleep(wait)

    # -- one stream of messages

    async def _exchange(self, endpoint: str) -> None:
        """Send messages and process answers until the stream ends.

        Raises `TimeoutError` when an answer takes too long.
        """
        call: Any = self._client.channel(endpoint).stream_stream(_PATH)()
        loop = asyncio.get_running_loop()
        sender = asyncio.create_task(self._send(call))
        try:
            async with asyncio.timeout(None) as self._timeout:
                while (data := await call.read()) is not grpc.aio.EOF:
                    self._deliver(self._core.receive(data, loop.time()))
                    self._work.set()
                    self._set_timeout()
                    self._search.record_answer()
        finally:
            self._timeout = None
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            # After the sender: a write on a cancelled call raises.
            call.cancel()
            self._core.disconnect()

    async def _send(self, call: Any) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(
            grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError
        ):
            # The reader of the answers reports why the stream ended.
            while True:
                while (data := self._core.next_message(loop.time())) is None:
                    self._work.clear()
                    await self._work.wait()
                self._set_timeout()
                await call.write(data)

    def _set_timeout(self) -> None:
        timeout, due = self._timeout, self._core.answer_due
        if timeout is not None and timeout.when() != due:
            timeout.reschedule(due)


def _verdict_of(done: asyncio.Future[Any]) -> str:
    """Return the outcome of a commit, one of `tally.VERDICTS`."""
    error = done.exception()  # marks it as retrieved: the caller may have been cancelled
    if error is not None:
        is_open = isinstance(error, ControllerUnavailableError | WriterClosedError)
        return "unanswered" if is_open else "refused"
    seen = done.result()
    codes = seen.values() if isinstance(seen, Mapping) else (seen.error,)
    return "accepted" if all(code == ERROR_CODE_NONE for code in codes) else "refused"
