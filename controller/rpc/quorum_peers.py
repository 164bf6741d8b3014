"""Carries the quorum's requests to the other controllers over gRPC.

Owns one channel for each peer and tells the driver what became of every request. A refused or
reset connection is reported apart from a mere timeout: the peer's process is probably gone.
"""

from __future__ import annotations

import asyncio

import grpc
import structlog

from controller.ids import NodeId
from controller.loop.quorum_transport import PeerListener
from controller.quorum.config import QuorumConfig
from controller.quorum.messages import (
    BeginQuorumEpochRequest,
    EndQuorumEpochRequest,
    FetchRequest,
    Request,
    Response,
    VoteRequest,
)
from controller.rpc import quorum_wire as wire
from proto import quorum_pb2_grpc

_CHANNEL_OPTIONS = (
    *wire.MESSAGE_OPTIONS,
    # A peer that restarts must be found again well within an election timeout.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_retries", 0),
)

_log = structlog.get_logger(component="quorum")


class GrpcPeerTransport:
    """Implements `PeerTransport`; to be made on the event loop that uses it."""

    def __init__(self, config: QuorumConfig) -> None:
        self._timeout_s = config.timings.request_timeout_ms / 1000
        self._channels: dict[NodeId, grpc.aio.Channel] = {}
        self._stubs: dict[NodeId, quorum_pb2_grpc.QuorumServiceAsyncStub] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: PeerListener | None = None
        for voter in config.voters.others(config.local.node_id):
            channel = grpc.aio.insecure_channel(voter.endpoint, options=_CHANNEL_OPTIONS)
            self._channels[voter.key.node_id] = channel
            self._stubs[voter.key.node_id] = quorum_pb2_grpc.QuorumServiceStub(channel)

    def bind(self, listener: PeerListener) -> None:
        """Connect the listener; once, before the first `send`."""
        self._listener = listener

    def send(self, request: Request) -> None:
        """Start sending to the request's receiver; never blocks, never raises."""
        task = asyncio.get_running_loop().create_task(self._exchange(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give up what is in flight and release connections."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close()

    async def _exchange(self, request: Request) -> None:
        assert self._listener is not None
        peer, request_id = request.header.receiver.node_id, request.header.request_id
        stub = self._stubs.get(peer)
        try:
            if stub is None:
                raise wire.BadMessageError(f"node {peer} is not a voter")
            response = await self._call(stub, request)
        except grpc.aio.AioRpcError as error:
            self._listener.on_request_failed(peer, request_id)
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._listener.on_connection_lost(peer)
        except wire.BadMessageError as error:
            _log.error("bad_quorum_answer", peer=peer, error=str(error))
            self._listener.on_request_failed(peer, request_id)
        else:
            self._listener.on_response(response)

    async def _call(
        self, stub: quorum_pb2_grpc.QuorumServiceAsyncStub, request: Request
    ) -> Response:
        match request:
            case FetchRequest():
                fetched = await stub.Fetch(
                    wire.fetch_request_to_pb(request), timeout=self._timeout_s
                )
                return wire.fetch_response_from_pb(fetched)
            case VoteRequest():
                voted = await stub.Vote(wire.vote_request_to_pb(request), timeout=self._timeout_s)
                return wire.vote_response_from_pb(voted)
            case BeginQuorumEpochRequest():
                begun = await stub.BeginQuorumEpoch(
                    wire.begin_request_to_pb(request), timeout=self._timeout_s
                )
                return wire.begin_response_from_pb(begun)
            case EndQuorumEpochRequest():
                ended = await stub.EndQuorumEpoch(
                    wire.end_request_to_pb(request), timeout=self._timeout_s
                )
                return wire.end_response_from_pb(ended)
