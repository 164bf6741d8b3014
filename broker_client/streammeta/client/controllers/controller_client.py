"""Client of the controllers: finds the leader, retries safe requests, fails at the deadline.

Owns the channels, the deadline of each call and the translation of gRPC statuses. Retries are
decided here and nowhere else. Every RPC of the contract is idempotent by request id, object id or
epoch, so a request without an answer is sent again, whether it took effect or not. A rejected
request is not. The router chooses the next endpoint.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

import grpc

from streammeta.client import errors, model
from streammeta.client.arguments import (
    INT32_MAX,
    check_endpoints,
    check_int,
    check_ints,
    check_kind,
    check_seconds,
    check_tags,
)
from streammeta.client.controllers import methods
from streammeta.client.controllers.channels import Channels, ControllerSpread
from streammeta.client.resources.bandwidth import Network
from streammeta.client.resources.fork_check import check_not_forked
from streammeta.client.resources.resources import ClosedAtExit, warn_unclosed
from streammeta.client.resources.tally import ClientTally
from streammeta.rpc import tracing
from streammeta.rpc.failures import Reason, RpcFailure, read_failure
from streammeta.rpc.leader_router import (
    ELECTION_BACKOFF,
    LeaderRouter,
    LeaderSearch,
    kind_of,
)
from streammeta.tls.files import TlsFiles
from streammeta.v1 import admin_pb2, common_pb2, nodes_pb2, objects_pb2, streams_pb2

DEFAULT_DEADLINE_S = 30.0
DEFAULT_ATTEMPT_TIMEOUT_S = 2.0

_GRACE_S = 10.0
"""Time that calls have left on a channel when its certificate is replaced, in seconds."""

LEARNED_FOR_S = 10.0
"""Validity of a list of all controllers, in seconds."""
_LEARNING_S = 1.0

_READ_AFTER_KEY = "streammeta-read-after"
_OFFSET_KEY = "streammeta-offset"

_PAGE_SIZE = 10_000
_ERRORS: dict[grpc.StatusCode | str, type[errors.RejectedError]] = {
    Reason.WRONG_BUCKET: errors.BucketRejectedError,
    Reason.SUPERSEDED: errors.BucketRejectedError,
    Reason.MAP_OLDER_THAN_BUCKET: errors.MetadataOlderThanBucketError,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidRequestError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.LimitExceededError,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDeniedError,
    grpc.StatusCode.UNAUTHENTICATED: errors.PermissionDeniedError,
    grpc.StatusCode.UNIMPLEMENTED: errors.UnsupportedError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.RejectedError,
}


class ControllerClient(ClosedAtExit):
    """Calls any of the controllers at `endpoints`, and finds the leader among them.

    Safe for many concurrent calls on one event loop. Use it as an async context manager or call
    `close`. `endpoints` are HOST:PORT. `attempt_timeout_s` limits one attempt, `deadline_s` a whole
    call without its own deadline. With `tls` connections are encrypted and authenticated by a
    certificate, whose files may be replaced at any time.

    All calls share `router`. `spread` chooses the controllers of watches and of reads at an offset.
    All parts over this client count in `tally` and share `network`: `network_rate` bytes per second
    of traffic with the store, 0: no limit. `rng` generates the jitter of waits. Raises `TypeError`
    or `ValueError` that names the wrong argument or file.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        attempt_timeout_s: float = DEFAULT_ATTEMPT_TIMEOUT_S,
        tls: TlsFiles | None = None,
        network_rate: float = 0.0,
        rng: random.Random | None = None,
        new_request_id: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        self._is_closed = False
        rng = rng or random.Random()
        self.router = LeaderRouter(check_endpoints("endpoints", endpoints), rng)
        self.spread = ControllerSpread(self.router.endpoints, rng)
        self.tally = ClientTally()
        self.network = Network(network_rate)
        self._learned_at = float("-inf")
        self._seen_offset = 0
        self.deadline_s = check_seconds("deadline_s", deadline_s)
        self.attempt_timeout_s = check_seconds("attempt_timeout_s", attempt_timeout_s)
        self._new_request_id = new_request_id
        if tls is not None:
            check_kind("tls", tls, TlsFiles, "TlsFiles(ca, certificate, key)")
        self._channels = Channels(tls, max(_GRACE_S, 2 * self.attempt_timeout_s))

    def __del__(self) -> None:
        if getattr(self, "_channels", None):
            warn_unclosed(
                self,
                f"{len(self._channels)} connections to controllers",
                "use `async with ControllerClient(...)` or `await client.close()`",
            )

    async def close(self) -> None:
        """Close all channels. Waiting and later calls fail with `ClientClosedError`."""
        self._is_closed = True
        await self._channels.close()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The configured endpoints, in order."""
        return self.router.endpoints

    @property
    def leader(self) -> str | None:
        """The endpoint of the presumed leader, None before an answer and after a failure."""
        return self.router.leader

    def channel(self, endpoint: str) -> grpc.aio.Channel:
        """Return the connection to `endpoint`, which is created on the first call.

        Raises `ClientClosedError` after `close`, and `ForkedProcessError` in a forked process.
        """
        check_not_forked(f"connection to {endpoint}")
        if self._is_closed:
            raise errors.ClientClosedError(f"connection to {endpoint}")
        return self._channels.get(endpoint)

    def failure(self, error: grpc.RpcError) -> RpcFailure:
        """Return the status of a failed call."""
        return read_failure(error, over_tls=self._channels.are_encrypted)

    def unavailable(
        self, method: str, deadline_s: float, search: LeaderSearch, *, is_read: bool = False
    ) -> errors.ControllerUnavailableError:
        """Return the error of a call whose deadline, `deadline_s` seconds, has passed."""
        return errors.ControllerUnavailableError(
            method,
            deadline_s,
            search.failures,
            search.refusal,
            is_read=is_read,
            over_tls=self._channels.are_encrypted,
        )

    def was_replaced(self) -> bool:
        """Return whether a cancelled call of the current task lost its channel to a new one."""
        task = asyncio.current_task()
        return not self._is_closed and task is not None and not task.cancelling()

    async def call(
        self,
        method: methods.Method[methods.RequestT, methods.ResponseT],
        request: methods.RequestT,
        deadline_s: float | None = None,
    ) -> methods.ResponseT:
        """Send `request` until a controller answers it, for at most `deadline_s` seconds.

        An empty `request_id` is filled in, and is the same in every attempt. Error codes inside
        the answer are left to the caller. If the leader rejects the request for now, because of a
        full disk or too many requests in flight, it is retried with growing waits. Raises
        `ControllerUnavailableError` when the deadline passes, and a `RejectedError` for a request
        that was rejected permanently.
        """
        check_kind("request", request, method.request, f"a {method.request.__name__}")
        seconds = self.deadline_s if deadline_s is None else check_seconds("deadline_s", deadline_s)
        fields: Any = request
        if "request_id" in request.DESCRIPTOR.fields_by_name and not fields.request_id:
            # Once per call: the id makes its attempts idempotent.
            fields.request_id = self._new_request_id()

        search = LeaderSearch(self.router, is_for_leader=method.leader_only)
        try:
            async with asyncio.timeout(seconds):
                return await self._until_answered(method, request, search)
        except TimeoutError:
            raise self.unavailable(method.name, seconds, search, is_read=method.is_read) from None

    @property
    def seen_offset(self) -> int:
        """The smallest log offset that covers every answer to this client."""
        return self._seen_offset

    async def read(
        self,
        method: methods.Method[methods.RequestT, methods.ResponseT],
        request: methods.RequestT,
        *,
        at_least: int | None = None,
        deadline_s: float | None = None,
    ) -> methods.ResponseT:
        """Ask any controller that has applied the log below `at_least`, by default `seen_offset`.

        Such a read observes everything that this client has read and written by `call` and `read`,
        and may observe nothing later. It costs the leader nothing while another controller serves
        it. Raises as `call`.
        """
        check_kind("request", request, method.request, f"a {method.request.__name__}")
        # The client's own offset makes it read its writes.
        after = self._seen_offset if at_least is None else check_int("at_least", at_least)
        seconds = self.deadline_s if deadline_s is None else check_seconds("deadline_s", deadline_s)

        tried: dict[str, str] = {}
        try:
            async with asyncio.timeout(seconds):
                await self.learn_controllers()
                # A round asks every controller once before it waits.
                for round_number in itertools.count():
                    for endpoint in self.spread.order(self.leader):
                        try:
                            return await self._send(endpoint, method, request, after)
                        except grpc.aio.AioRpcError as error:
                            tried[endpoint] = self._note_failure(endpoint, method.name, error)
                    await asyncio.sleep(ELECTION_BACKOFF.wait(round_number, random.random()))
        except TimeoutError:
            raise errors.ControllerUnavailableError(
                method.name, seconds, tried, is_read=True, over_tls=self._channels.are_encrypted
            ) from None
        raise AssertionError("rounds without end have ended")

    def _note_failure(self, endpoint: str, method: str, error: grpc.aio.AioRpcError) -> str:
        """Return why a controller failed, or raise if no other one can serve the read."""
        failure = self.failure(error)
        kind = kind_of(failure)
        if kind is None:
            raise rejection(method, failure) from error
        self.tally.count_failure(kind)
        self.spread.prefer_others(endpoint)
        return failure.text

    async def learn_controllers(self) -> None:
        """Request the list of all controllers, unless a recent one is known.

        Without an immediate answer nothing changes.
        """
        now = asyncio.get_running_loop().time()
        if now - self._learned_at < LEARNED_FOR_S:
            return
        # Also after a failure: the list is an optimization, and not worth a second wait.
        self._learned_at = now
        try:
            request = admin_pb2.DescribeClusterRequest()
            answer = await self.call(methods.DESCRIBE_CLUSTER, request, _LEARNING_S)
        except (errors.ControllerUnavailableError, errors.RejectedError):
            return
        self._learn_list(answer)

    def _learn_list(self, answer: admin_pb2.DescribeClusterResponse) -> None:
        listed = [controller.endpoint for controller in answer.controllers]
        self.spread.learn(listed, answer.leader_endpoint)
        self.router.learn(listed)

    async def describe_cluster(self) -> model.ClusterDescription:
        """Return the leader and the size of the metadata, as any one controller knows them."""
        answer = await self.call(methods.DESCRIBE_CLUSTER, admin_pb2.DescribeClusterRequest())
        self._learn_list(answer)
        return model.cluster_description(answer)

    async def object_namespace(self) -> str:
        """Return the namespace in the keys of this cluster's objects."""
        answer = await self.describe_cluster()
        if not answer.object_namespace:
            raise errors.ProtocolViolationError(
                "DescribeCluster", detail="object_namespace is empty"
            )
        return answer.object_namespace

    async def describe_streams(
        self,
        stream_ids: Sequence[int] = (),
        *,
        owner_node_id: int | None = None,
        include_ranges: bool = False,
    ) -> AsyncIterator[model.StreamDescription]:
        """List streams in id order: these ids without unknown ones, or all, page by page."""
        if owner_node_id is not None:
            check_int("owner_node_id", owner_node_id, 0, INT32_MAX)
        request = streams_pb2.DescribeStreamsRequest(
            stream_ids=check_ints("stream_ids", stream_ids, "a sequence of stream ids"),
            owner_node_id=owner_node_id,
            include_ranges=include_ranges,
        )
        async for answer in self.pages(methods.DESCRIBE_STREAMS, request):
            for description in answer.streams:
                yield model.stream_description(description)

    async def describe_nodes(self, node_ids: Sequence[int] = ()) -> list[model.NodeDescription]:
        """Return nodes in id order: these ids without unknown ones, or all."""
        request = nodes_pb2.GetNodesRequest(
            node_ids=check_ints("node_ids", node_ids, "a sequence of node ids", INT32_MAX)
        )
        return [
            model.node_description(node)
            async for answer in self.pages(methods.GET_NODES, request)
            for node in answer.nodes
        ]

    async def find_streams(
        self, tags: Mapping[str, str], *, owner: int | None = None
    ) -> AsyncIterator[model.StreamDescription]:
        """List the streams that have all of these tags, in id order, page by page.

        With `owner` only the streams whose last owner is that node are listed. Raises
        `UnsupportedError` if the leader is of a version without this look-up.
        """
        wanted = sorted(check_tags("tags", tags).items())
        request = streams_pb2.FindStreamsRequest(
            tags=[common_pb2.Tag(key=key, value=value) for key, value in wanted],
            owner_node_id=owner,
        )
        async for answer in self.pages(methods.FIND_STREAMS, request):
            for description in answer.streams:
                # A leader of an older version ignores the owner.
                if owner is None or description.node_id == owner:
                    yield model.stream_description(description)

    async def list_stream_objects(
        self, stream_id: int, start_offset: int = 0, end_offset: int | None = None
    ) -> AsyncIterator[model.StreamObject]:
        """List a stream's objects that overlap a range of offsets, by end offset, page by page.

        Raises `StreamNotFoundError` for an unknown stream, and `UnsupportedError` if the leader is
        of a version without this listing.
        """
        request = objects_pb2.ListStreamObjectsRequest(
            stream_id=stream_id, start_offset=start_offset, end_offset=end_offset
        )
        async for answer in self.pages(methods.LIST_STREAM_OBJECTS, request):
            if answer.error != common_pb2.ERROR_CODE_NONE:
                raise errors.rejection(answer.error, f"listing the objects of stream {stream_id}")
            for object_ in answer.objects:
                yield model.stream_object(object_)

    async def list_stream_set_objects(
        self, node_id: int, *, include_ranges: bool = False
    ) -> AsyncIterator[model.StreamSetObject]:
        """List a node's stream set objects in id order, page by page.

        Raises `NodeNotRegisteredError` for an unknown node.
        """
        request = nodes_pb2.ListStreamSetObjectsRequest(
            node_id=node_id, include_ranges=include_ranges
        )
        async for answer in self.pages(methods.LIST_STREAM_SET_OBJECTS, request):
            if answer.error != common_pb2.ERROR_CODE_NONE:
                raise errors.rejection(answer.error, f"listing the objects of node {node_id}")
            for object_ in answer.objects:
                yield model.stream_set_object(object_)

    async def pages(
        self, method: methods.Method[methods.RequestT, methods.ResponseT], request: methods.RequestT
    ) -> AsyncIterator[methods.ResponseT]:
        """Yield the answers of `method` page by page. The request may have a page size."""
        page: common_pb2.PageRequest = request.page  # type: ignore[attr-defined]
        page.page_size = page.page_size or _PAGE_SIZE
        while True:
            answer: Any = await self.call(method, request)
            yield answer
            if not answer.next_page_token:
                return
            page.page_token = answer.next_page_token

    async def _send(
        self,
        endpoint: str,
        method: methods.Method[methods.RequestT, methods.ResponseT],
        request: methods.RequestT,
        read_after: int | None = None,
    ) -> methods.ResponseT:
        """Make one attempt. With an offset it is a read at that offset."""
        send = self.channel(endpoint).unary_unary(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        metadata = None if read_after is None else ((_READ_AFTER_KEY, str(read_after)),)
        # Heartbeats belong to no caller's trace: they are sent for as long as the session lasts.
        if method is not methods.HEARTBEAT and tracing.is_traced():
            return await self._send_traced(send, method, request, metadata)
        sent = send(request, timeout=self.attempt_timeout_s, metadata=metadata)
        answer: methods.ResponseT = await self._receive(sent)
        return answer

    async def _send_traced(
        self,
        send: Any,
        method: methods.Method[methods.RequestT, methods.ResponseT],
        request: methods.RequestT,
        metadata: tuple[tuple[str, str], ...] | None,
    ) -> methods.ResponseT:
        with tracing.span(method.path[1:], {"rpc.system": "grpc"}):
            joined = (*(metadata or ()), *tracing.call_metadata())
            answer: methods.ResponseT = await self._receive(
                send(request, timeout=self.attempt_timeout_s, metadata=joined)
            )
            return answer

    async def _receive(self, sent: Any) -> Any:
        answer = await sent
        # Answers may overtake each other, so the offset only grows.
        self._seen_offset = max(self._seen_offset, _offset_in(await sent.trailing_metadata() or ()))
        return answer

    async def _until_answered(
        self,
        method: methods.Method[methods.RequestT, methods.ResponseT],
        request: methods.RequestT,
        search: LeaderSearch,
    ) -> methods.ResponseT:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                answer = await self._send(search.endpoint, method, request)
            except asyncio.CancelledError:
                # The router learns how long the endpoint was silent, even without an answer.
                search.record_timeout(loop.time() - began)
                task = asyncio.current_task()
                if self._is_closed and task is not None and not task.cancelling():
                    raise errors.ClientClosedError(method.name) from None
                raise

            except grpc.aio.AioRpcError as error:
                failure = self.failure(error)
                wait = search.record_failure(failure)
                if wait is None:
                    raise rejection(method.name, failure) from error
                self.tally.count_failure(kind_of(failure))
            else:
                if method.leader_only:
                    search.record_answer()
                return answer
            await asyncio.sleep(wait)


def _offset_in(metadata: Iterable[tuple[str, str | bytes]]) -> int:
    """Return the log offset of an answer, 0 if it has none."""
    text = next((str(value) for key, value in metadata if key == _OFFSET_KEY), "")
    # A wrong offset only costs freshness, so it is not an error.
    return int(text) if text.isascii() and text.isdecimal() else 0


def rejection(method: str, failure: RpcFailure) -> errors.RejectedError:
    """Return the error of a permanently rejected call."""
    kind = _ERRORS.get(failure.reason) or _ERRORS.get(failure.code, errors.ControllerDefectError)
    return kind(method, detail=failure.text)
