"""Reconciliation's questions to the controllers: objects, ends of streams, a snapshot, the cluster.

Waits out elections up to a deadline, and never turns a doubt into an answer: a reply that is not
complete and well-formed is a `ControllerError`. Usable in a driver and in an executor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import grpc

from streammeta.reconcile.vocabulary.errors import ControllerError
from streammeta.rpc import tracing
from streammeta.rpc.advice import advice
from streammeta.rpc.blocking_client import BlockingClient, LeaderCallError
from streammeta.tls.files import CallerFiles
from streammeta.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    metadata_pb2,
    metadata_pb2_grpc,
    objects_pb2,
    objects_pb2_grpc,
    streams_pb2,
    streams_pb2_grpc,
)

_CALL_TIMEOUT_S = 10.0
_STREAM_TIMEOUT_S = 600.0
_STREAM_ATTEMPTS = 5
_STREAMS_A_CALL = 1_000
_Answer = TypeVar("_Answer")


class LeaderClient(BlockingClient):
    """Reconciliation's calls to whichever controller leads.

    `endpoints` are HOST:PORT of controllers, `patience_s` how long to look for a leader before
    giving up, in seconds. Without `tls` it speaks plain text.
    """

    def __init__(
        self, endpoints: Sequence[str], patience_s: float, tls: CallerFiles | None = None
    ) -> None:
        super().__init__(endpoints, tls=tls)
        self.patience_s = patience_s

    def check_objects(
        self, object_ids: Sequence[int], *, deleting: bool = False
    ) -> objects_pb2.CheckObjectsResponse:
        """Return the state of each id (1..10000 of them) as the leader knows it; linearizable.

        The UUID in the answer is empty until the cluster has marked its bucket. With `deleting` the
        leader's audit log has the ids before the answer is given.

        Raises:
            ControllerError: no leader answered in time, or the answer does not fit the question.
        """
        request = objects_pb2.CheckObjectsRequest(object_ids=object_ids, deleting=deleting)

        def call(channel: grpc.Channel) -> objects_pb2.CheckObjectsResponse:
            stub = objects_pb2_grpc.ObjectServiceStub(channel)
            return stub.CheckObjects(
                request, timeout=_CALL_TIMEOUT_S, metadata=tracing.call_metadata()
            )

        answer = self.ask("ObjectService/CheckObjects", call)
        if len(answer.states) != len(object_ids):
            raise ControllerError(
                f"CheckObjects answered {len(answer.states)} states for {len(object_ids)} ids;"
                " check that controllers and this tool are of one version"
            )
        if not answer.cluster_id:
            raise ControllerError("CheckObjects answered without a cluster id; nothing is decided")
        return answer

    def stream_ends(self, stream_ids: Sequence[int]) -> dict[int, int]:
        """Return the end offset of each of these streams that exists; linearizable.

        Raises:
            ControllerError: no leader answered in time, or the answer does not fit the question.
        """
        ends: dict[int, int] = {}
        for first in range(0, len(stream_ids), _STREAMS_A_CALL):
            asked = stream_ids[first : first + _STREAMS_A_CALL]
            for page in self._described(asked):
                ends |= {one.stream_id: one.end_offset for one in page.streams}
        if not ends.keys() <= set(stream_ids):
            raise ControllerError(
                "DescribeStreams answered streams that it was not asked for; check that controllers"
                " and this tool are of one version"
            )
        return ends

    def _described(
        self, stream_ids: Sequence[int]
    ) -> Iterator[streams_pb2.DescribeStreamsResponse]:
        """Yield all pages of an answer."""
        token = ""
        while True:
            request = streams_pb2.DescribeStreamsRequest(
                stream_ids=stream_ids, page=common_pb2.PageRequest(page_token=token)
            )
            page = self.ask("StreamService/DescribeStreams", partial(_describe_streams, request))
            yield page
            if not page.next_page_token:
                return
            if page.next_page_token == token:
                raise ControllerError(
                    "DescribeStreams gave the same page twice; check that controllers and this tool"
                    " are of one version"
                )

            token = page.next_page_token

    def describe(self) -> dict[str, admin_pb2.DescribeClusterResponse]:
        """Return the cluster as controllers know it, by endpoint: the leader, then all that answer.

        Raises:
            ControllerError: no leader answered in time.
        """
        self.check_objects([0])  # any controller describes the cluster; this finds the leader
        leader = self.ask("AdminService/DescribeCluster", _describe_through)
        described = {self.leader or self.endpoints[0]: leader}
        for endpoint in self.endpoints:
            if endpoint not in described:
                with suppress(grpc.RpcError):  # a controller that is down says nothing wrong
                    described[endpoint] = _describe_through(self.channel(endpoint))
        return described

    def read_snapshot(
        self, take: Callable[[Iterator[metadata_pb2.GetSnapshotResponse]], _Answer]
    ) -> _Answer:
        """Call `take` with the chunks of a snapshot of the map as of now or later.

        `take` is called again, from the first chunk, when the leader is lost on the way; the time
        to look for another counts from the last chunk, a few times.

        Raises:
            ControllerError: no leader sent a whole snapshot in time.
        """
        request = metadata_pb2.GetSnapshotRequest()
        begun = 0

        def followed(
            chunks: Iterator[metadata_pb2.GetSnapshotResponse],
        ) -> Iterator[metadata_pb2.GetSnapshotResponse]:
            nonlocal begun
            for number, chunk in enumerate(chunks):
                begun += number == 0
                if begun <= _STREAM_ATTEMPTS:
                    self.heard()
                yield chunk

        def call(channel: grpc.Channel) -> _Answer:
            stub = metadata_pb2_grpc.MetadataServiceStub(channel)
            chunks = stub.GetSnapshot(
                request, timeout=_STREAM_TIMEOUT_S, metadata=tracing.call_metadata()
            )
            return take(followed(iter(chunks)))

        return self.ask("MetadataService/GetSnapshot", call)

    def ask(self, method: str, call: Callable[[grpc.Channel], _Answer]) -> _Answer:
        """Return what `call` returns of the leader's channel; `method` is SERVICE/NAME.

        Raises:
            ControllerError: no leader answered in time, or it refused.
        """
        name = method.partition("/")[2]
        try:
            with tracing.part(f"streammeta.v1.{method}", {"rpc.system": "grpc"}):
                return self.call_leader(lambda channel, _: call(channel), self.patience_s)
        except LeaderCallError as error:
            cure = advice(error.failure, over_tls=self.tls is not None)
            if error.is_final:
                raise ControllerError(
                    f"{name} was refused: {error}" + (f"; {cure}" if cure else "")
                ) from error

            cure = cure or "check that the controllers run and that --connect names them"
            raise ControllerError(
                f"{name}: no leader answered within {self.patience_s:g} s, last {error};"
                f" {cure} ({', '.join(self.endpoints)})"
            ) from error


def state_name(state: int) -> str:
    """Return the short name of an object state: "COMMITTED"."""
    known = {value.number: value.name for value in common_pb2.ObjectState.DESCRIPTOR.values}
    return known.get(state, f"state {state}").removeprefix("OBJECT_STATE_")


def _describe_through(channel: grpc.Channel) -> admin_pb2.DescribeClusterResponse:
    stub = admin_pb2_grpc.AdminServiceStub(channel)
    return stub.DescribeCluster(
        admin_pb2.DescribeClusterRequest(),
        timeout=_CALL_TIMEOUT_S,
        metadata=tracing.call_metadata(),
    )


def _describe_streams(
    request: streams_pb2.DescribeStreamsRequest, channel: grpc.Channel
) -> streams_pb2.DescribeStreamsResponse:
    stub = streams_pb2_grpc.StreamServiceStub(channel)
    return stub.DescribeStreams(request, timeout=_CALL_TIMEOUT_S, metadata=tracing.call_metadata())
