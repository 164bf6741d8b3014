"""QuorumService: passes requests to the quorum driver and returns its answers.

Its RPCs are served apart: those of operators to clients, those of peers to the other controllers,
whose requests the core answers. The number in flight is bounded for each kind, so that a flood of
one kind leaves room for the others.
"""

# ruff: noqa: N802 (methods are named as in the contract)

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import grpc

from streammeta.controller.errors import BusyError, InvalidRequestError
from streammeta.controller.ids import ClusterId
from streammeta.controller.quorum import messages
from streammeta.controller.quorum.voters import ReplicaKey, Voter
from streammeta.controller.rpc.quorum_wire import (
    EXCHANGES,
    MESSAGES,
)
from streammeta.controller.rpc.request_guard import UnaryHandler, abort
from streammeta.controller.runtime.interfaces import Endpoints
from streammeta.controller.runtime.operations import QuorumDescription
from streammeta.controller.runtime.quorum_driver import QuorumDriver
from streammeta.v1 import quorum_pb2 as pb

Context = grpc.aio.ServicerContext[Any, Any]

CHANGE_TIMEOUT_MS_DEFAULT = 30_000
"""Time limit of a voter change without one of its own, in milliseconds."""

CHANGE_TIMEOUT_MS_MAX = 600_000
"""Maximum time limit of a voter change, in milliseconds: a new voter catches up first."""


class _Room:
    """Bound on the number of requests of one kind in flight."""

    def __init__(self, what: str, limit: int) -> None:
        self._what = what
        self._limit = limit
        self._taken = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Take one place while the block runs; raises BusyError if there is none."""
        if self._taken >= self._limit:
            raise BusyError(
                f"{self._taken} {self._what} are under way, as many as may be; try again later"
            )
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1


class PeerServicer:
    """Serves one replica of the quorum to the others."""

    def __init__(self, driver: QuorumDriver) -> None:
        self._driver = driver
        control = _Room("votes and announcements", 128)
        self._room: dict[type[messages.Request], _Room] = {
            messages.VoteRequest: control,
            messages.BeginQuorumEpochRequest: control,
            messages.EndQuorumEpochRequest: control,
            messages.UpdateVoterRequest: control,
            messages.FetchRequest: _Room("fetches", 256),
            messages.FetchSnapshotRequest: _Room("reads of snapshots", 32),
        }

    def unary(self) -> Mapping[str, UnaryHandler]:
        """Return the handlers by method name."""
        return {exchange.method: getattr(self, exchange.method) for exchange in EXCHANGES.values()}

    async def Vote(self, request: pb.VoteRequest, context: Context) -> Any:
        """Vote on a candidate."""
        return await self._handle(messages.VoteRequest, request, context)

    async def BeginQuorumEpoch(self, request: pb.BeginQuorumEpochRequest, context: Context) -> Any:
        """Note the leader of an epoch."""
        return await self._handle(messages.BeginQuorumEpochRequest, request, context)

    async def EndQuorumEpoch(self, request: pb.EndQuorumEpochRequest, context: Context) -> Any:
        """Note that a leader has resigned."""
        return await self._handle(messages.EndQuorumEpochRequest, request, context)

    async def Fetch(self, request: pb.FetchRequest, context: Context) -> Any:
        """Return batches of the log; may wait for them."""
        return await self._handle(messages.FetchRequest, request, context)

    async def FetchSnapshot(self, request: pb.FetchSnapshotRequest, context: Context) -> Any:
        """Return bytes of a snapshot."""
        return await self._handle(messages.FetchSnapshotRequest, request, context)

    async def UpdateVoter(self, request: pb.UpdateVoterRequest, context: Context) -> Any:
        """Note a voter's addresses and disk."""
        return await self._handle(messages.UpdateVoterRequest, request, context)

    async def _handle(self, kind: type[messages.Request], message: Any, context: Context) -> Any:
        exchange = EXCHANGES[kind]
        try:
            with self._room[kind].one():
                request = exchange.request_from_pb(message)
                response = await self._driver.handle(request)
        except Exception as error:  # noqa: BLE001 (every failure of a call is a status)
            await abort(context, error)
        leader_id = response.header.leader_id
        leader = Endpoints() if leader_id is None else self._driver.endpoints(leader_id)
        return exchange.response_to_pb(response, leader)


class QuorumServicer:
    """Serves the quorum to operators: its description, and changes of its voters."""

    def __init__(self, driver: QuorumDriver, cluster_id: ClusterId) -> None:
        self._driver = driver
        self._cluster_id = cluster_id
        self._operators = _Room("requests of operators", 32)

    def unary(self) -> Mapping[str, UnaryHandler]:
        """Return the handlers by method name."""
        return {
            "AddVoter": self.AddVoter,
            "RemoveVoter": self.RemoveVoter,
            "DescribeQuorum": self.DescribeQuorum,
        }

    async def AddVoter(self, request: pb.AddVoterRequest, context: Context) -> pb.AddVoterResponse:
        """Make an observer a voter, and wait until that is committed."""
        try:
            with self._operators.one():
                self._require_cluster(request.cluster_id)
                voter = _read_voter(request.voter, "voter")
                if voter.key.directory_id is None:
                    raise InvalidRequestError(
                        "voter.key.directory_id",
                        "empty; a new voter is named with its disk, see DescribeQuorum's observers",
                    )
                timeout_ms = _change_timeout_ms(request.timeout_ms, context)
                end_offset = await self._driver.add_voter(voter, timeout_ms)
        except Exception as error:  # noqa: BLE001 (every failure of a call is a status)
            await abort(context, error)
        return pb.AddVoterResponse(end_offset=end_offset)

    async def RemoveVoter(
        self, request: pb.RemoveVoterRequest, context: Context
    ) -> pb.RemoveVoterResponse:
        """Make a voter an observer, and wait until that is committed."""
        try:
            with self._operators.one():
                self._require_cluster(request.cluster_id)
                key = _read_key(request.key, "key")
                timeout_ms = _change_timeout_ms(request.timeout_ms, context)
                end_offset = await self._driver.remove_voter(key, timeout_ms)
        except Exception as error:  # noqa: BLE001 (every failure of a call is a status)
            await abort(context, error)
        return pb.RemoveVoterResponse(end_offset=end_offset)

    async def DescribeQuorum(
        self, request: pb.DescribeQuorumRequest, context: Context
    ) -> pb.DescribeQuorumResponse:
        """Return the quorum as this node knows it."""
        if request.leader_only and not self._driver.is_leader:
            await abort(context, self._driver.leader_hint())
        seen = self._driver.describe()
        description: pb.DescribeQuorumResponse = _write_description(
            seen,
            cluster_id=self._cluster_id,
            repairing=seen.is_repairing,
            disk_full=seen.is_disk_full,
        )
        return description

    def _require_cluster(self, cluster_id: str) -> None:
        if cluster_id != self._cluster_id:
            raise InvalidRequestError(
                "cluster_id", f"{cluster_id!r}; this controller is of cluster {self._cluster_id!r}"
            )


def _change_timeout_ms(asked: int, context: Context) -> int:
    """Return the time limit of a change, at most the caller's deadline, in milliseconds."""
    if not 0 <= asked <= CHANGE_TIMEOUT_MS_MAX:
        raise InvalidRequestError("timeout_ms", f"{asked}; must be 0 to {CHANGE_TIMEOUT_MS_MAX}")
    timeout_ms = asked or CHANGE_TIMEOUT_MS_DEFAULT
    remaining_s = context.time_remaining()
    return timeout_ms if remaining_s is None else min(timeout_ms, int(remaining_s * 1000))


_read_voter = MESSAGES.reader(Voter, pb.Voter)
_read_key = MESSAGES.reader(ReplicaKey, pb.ReplicaKey)
_write_description = MESSAGES.writer(
    QuorumDescription, pb.DescribeQuorumResponse, "cluster_id", "repairing", "disk_full"
)
