"""The gRPC face of the quorum: hands peers' requests to the driver and its answers back."""

# ruff: noqa: N802 (methods are named as in the contract)

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc

from controller.errors import InvalidRequestError, NotLeaderError
from controller.ids import ClusterId
from controller.loop.quorum_describe import ReplicaDescription
from controller.loop.quorum_driver import QuorumDriver
from controller.quorum.messages import (
    BeginQuorumEpochResponse,
    EndQuorumEpochResponse,
    FetchResponse,
    Request,
    Response,
    VoteResponse,
)
from controller.rpc import quorum_wire as wire
from controller.rpc.status import abort, abort_unimplemented
from proto import quorum_pb2 as pb
from proto import quorum_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class QuorumServicer(quorum_pb2_grpc.QuorumServiceServicer):
    """Serves one replica of the quorum."""

    def __init__(self, driver: QuorumDriver, cluster_id: ClusterId) -> None:
        self._driver = driver
        self._cluster_id = cluster_id

    async def Vote(self, request: pb.VoteRequest, context: Context) -> pb.VoteResponse:
        """Judge a candidate."""
        try:
            message = wire.vote_request_from_pb(request)
        except wire.BadMessageError as error:
            await _abort_bad(context, error)
        response = await self._handle(message, context)
        assert isinstance(response, VoteResponse)
        return wire.vote_response_to_pb(response, self._endpoint())

    async def BeginQuorumEpoch(
        self, request: pb.BeginQuorumEpochRequest, context: Context
    ) -> pb.BeginQuorumEpochResponse:
        """Hear who leads."""
        try:
            message = wire.begin_request_from_pb(request)
        except wire.BadMessageError as error:
            await _abort_bad(context, error)
        response = await self._handle(message, context)
        assert isinstance(response, BeginQuorumEpochResponse)
        return wire.begin_response_to_pb(response, self._endpoint())

    async def EndQuorumEpoch(
        self, request: pb.EndQuorumEpochRequest, context: Context
    ) -> pb.EndQuorumEpochResponse:
        """Hear who leads no more."""
        try:
            message = wire.end_request_from_pb(request)
        except wire.BadMessageError as error:
            await _abort_bad(context, error)
        response = await self._handle(message, context)
        assert isinstance(response, EndQuorumEpochResponse)
        return wire.end_response_to_pb(response, self._endpoint())

    async def Fetch(self, request: pb.FetchRequest, context: Context) -> pb.FetchResponse:
        """Serve the log; may wait for batches."""
        try:
            message = wire.fetch_request_from_pb(request)
        except wire.BadMessageError as error:
            await _abort_bad(context, error)
        response = await self._handle(message, context)
        assert isinstance(response, FetchResponse)
        return wire.fetch_response_to_pb(response, self._endpoint())

    async def FetchSnapshot(
        self, request: pb.FetchSnapshotRequest, context: Context
    ) -> AsyncIterator[pb.FetchSnapshotChunk]:
        """Refuse: snapshots are not served by this release."""
        del request
        await abort_unimplemented(context, "FetchSnapshot")
        yield pb.FetchSnapshotChunk()  # makes this an async generator; never reached

    async def AddVoter(self, request: pb.AddVoterRequest, context: Context) -> NoReturn:
        """Refuse: the voters are those of the configuration."""
        del request
        await abort_unimplemented(context, "AddVoter")

    async def RemoveVoter(self, request: pb.RemoveVoterRequest, context: Context) -> NoReturn:
        """Refuse: the voters are those of the configuration."""
        del request
        await abort_unimplemented(context, "RemoveVoter")

    async def UpdateVoter(self, request: pb.UpdateVoterRequest, context: Context) -> NoReturn:
        """Refuse: the voters are those of the configuration."""
        del request
        await abort_unimplemented(context, "UpdateVoter")

    async def DescribeQuorum(
        self, request: pb.DescribeQuorumRequest, context: Context
    ) -> pb.DescribeQuorumResponse:
        """Tell how this node sees the quorum."""
        del request, context
        seen = self._driver.describe()
        return pb.DescribeQuorumResponse(
            cluster_id=self._cluster_id,
            node_id=seen.node_id,
            role=seen.role,
            leader_id=-1 if seen.leader_id is None else seen.leader_id,
            epoch=seen.epoch,
            high_watermark=seen.high_watermark,
            end_offset=seen.end_offset,
            flushed_end=seen.flushed_end,
            voters=map(_replica_to_pb, seen.voters),
            observers=map(_replica_to_pb, seen.observers),
        )

    async def _handle(self, request: Request, context: Context) -> Response:
        try:
            return await self._driver.handle(request)
        except NotLeaderError as error:
            await abort(context, error)

    def _endpoint(self) -> str:
        leader = self._driver.leader
        return leader[1] if leader else ""


async def _abort_bad(context: Context, error: wire.BadMessageError) -> NoReturn:
    await abort(context, InvalidRequestError("request", str(error)))


def _replica_to_pb(replica: ReplicaDescription) -> pb.ReplicaStatus:
    return pb.ReplicaStatus(
        key=pb.ReplicaKey(node_id=replica.key.node_id, directory_id=replica.key.directory_id or ""),
        endpoint=replica.endpoint,
        end_offset=_or_none(replica.end_offset),
        last_fetch_age_ms=_or_none(replica.last_fetch_age_ms),
        last_caught_up_age_ms=_or_none(replica.last_caught_up_age_ms),
    )


def _or_none(value: int | None) -> int:
    return -1 if value is None else value
