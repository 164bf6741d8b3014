"""Client of the controllers: object states, ends of streams, snapshots, cluster identity.

Waits for the end of elections up to a deadline. An incomplete or malformed answer is a
`ControllerError`. The client works in a driver and in an executor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

import grpc

from streammeta.reconcile.vocabulary.errors import ControllerError
from streammeta.rpc import blocking_client, tracing
from streammeta.rpc.advice import advice
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


class LeaderClient(blocking_client.BlockingClient):
    """Reconciliation's calls to the leader.

    `endpoints` are controllers as HOST:PORT. `patience_s` is how long to look for a leader, in
    seconds. Without `tls`, calls are in plain text.
    """

    def __init__(
        self, endpoints: Sequence[str], patience_s: float, tls: CallerFiles | None = None
    ) -> None:
        super().__init__(endpoints, tls=tls)
        self.patience_s = patience_s

    def check_objects(
        self, object_ids: Sequence[int], *, deleting: bool = False
    ) -> objects_pb2.CheckObjectsResponse:
        """Return the leader's state of each id (1..10000 of them). The read is linearizable.

        The UUID in the answer is empty until the cluster has marked its bucket. With `deleting`,
        the leader's audit log records the ids before it answers.

        Raises:
            ControllerError: no leader answered in time, or the answer does not match the request.
        """
        answer = self.call(
            "ObjectService/CheckObjects",
            lambda channel: objects_pb2_grpc.ObjectServiceStub(channel).CheckObjects,
            objects_pb2.CheckObjectsRequest(object_ids=object_ids, deleting=deleting),
        )
        if len(answer.states) != len(object_ids):
            raise ControllerError(
                f"CheckObjects returned {len(answer.states)} states for {len(object_ids)} ids."
                " Check that controllers and this tool have the same version"
            )
        if not answer.cluster_id:
            raise ControllerError(
                "CheckObjects returned no cluster id. Check that controllers and this tool have the"
                " same version"
            )
        return answer

    def stream_ends(self, stream_ids: Sequence[int]) -> dict[int, int]:
        """Return the end offsets of the existing streams among `stream_ids`. Linearizable.

        Raises:
            ControllerError: no leader answered in time, or the answer does not match the request.
        """
        ends: dict[int, int] = {}
        for first in range(0, len(stream_ids), _STREAMS_A_CALL):
            asked = stream_ids[first : first + _STREAMS_A_CALL]
            for page in self._describe_streams(asked):
                ends |= {stream.stream_id: stream.end_offset for stream in page.streams}
        if not ends.keys() <= set(stream_ids):
            raise ControllerError(
                "DescribeStreams returned streams that were not requested. Check that controllers"
                " and this tool have the same version"
            )
        return ends

    def _describe_streams(
        self, stream_ids: Sequence[int]
    ) -> Iterator[streams_pb2.DescribeStreamsResponse]:
        """Yield all pages of an answer."""
        token = ""
        while True:
            page = self.call(
                "StreamService/DescribeStreams",
                lambda channel: streams_pb2_grpc.StreamServiceStub(channel).DescribeStreams,
                streams_pb2.DescribeStreamsRequest(
                    stream_ids=stream_ids, page=common_pb2.PageRequest(page_token=token)
                ),
            )
            yield page
            if not page.next_page_token:
                return
            if page.next_page_token == token:
                raise ControllerError(
                    "DescribeStreams returned the same page twice. Check that controllers and this"
                    " tool have the same version"
                )

            token = page.next_page_token

    def describe(self) -> dict[str, admin_pb2.DescribeClusterResponse]:
        """Return the controllers' descriptions of the cluster, by endpoint, the leader's first.

        Raises:
            ControllerError: no leader answered in time.
        """
        self.check_objects([0])  # finds the leader, while any controller describes the cluster
        leader = self.ask("AdminService/DescribeCluster", _describe_cluster)
        described = {self.leader or self.endpoints[0]: leader}
        for endpoint in self.endpoints:
            if endpoint not in described:
                with suppress(grpc.RpcError):  # an unreachable controller contradicts nothing
                    described[endpoint] = _describe_cluster(self.channel(endpoint))
        return described

    def read_snapshot(
        self, take: Callable[[Iterator[metadata_pb2.GetSnapshotResponse]], _Answer]
    ) -> _Answer:
        """Call `take` with the chunks of a snapshot of the metadata as of now or later.

        If the leader is lost, `take` is called again from the first chunk. The time to look for
        another leader counts from the last chunk, for a limited number of attempts.

        Raises:
            ControllerError: no leader sent a whole snapshot in time.
        """
        request = metadata_pb2.GetSnapshotRequest()
        begun = 0

        def watch_chunks(
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
            return take(watch_chunks(iter(chunks)))

        return self.ask("MetadataService/GetSnapshot", call)

    def call(
        self,
        name: str,
        method: blocking_client.UnaryMethod[blocking_client.Request, blocking_client.Response],
        request: blocking_client.Request,
        timeout_s: float = _CALL_TIMEOUT_S,
    ) -> blocking_client.Response:
        """Return the leader's answer to a request. `name` is SERVICE/NAME, for messages and spans.

        Raises:
            ControllerError: no leader answered in time.
        """
        return self.ask(name, lambda channel: _send(method(channel), request, timeout_s))

    def ask(self, method: str, call: Callable[[grpc.Channel], _Answer]) -> _Answer:
        """Return the result of `call` on the leader's channel. `method` is SERVICE/NAME.

        Raises:
            ControllerError: no leader answered in time, or it rejected the call.
        """
        name = method.partition("/")[2]
        try:
            with tracing.part(f"streammeta.v1.{method}", {"rpc.system": "grpc"}):
                return self.call_leader(lambda channel, _: call(channel), self.patience_s)
        except blocking_client.LeaderCallError as error:
            cure = advice(error.failure, over_tls=self.tls is not None)
            if error.is_final:
                raise ControllerError(
                    f"controller rejected {name}: {error}" + (f"; {cure}" if cure else "")
                ) from error

            cure = cure or "check that the controllers run and that --connect names them"
            raise ControllerError(
                f"no leader answered {name} within {self.patience_s:g} s, last error: {error};"
                f" {cure} ({', '.join(self.endpoints)})"
            ) from error


def state_name(state: int) -> str:
    """Return the short name of an object state: "COMMITTED"."""
    known = {value.number: value.name for value in common_pb2.ObjectState.DESCRIPTOR.values}
    return known.get(state, f"state {state}").removeprefix("OBJECT_STATE_")


def _describe_cluster(channel: grpc.Channel) -> admin_pb2.DescribeClusterResponse:
    method = admin_pb2_grpc.AdminServiceStub(channel).DescribeCluster
    return _send(method, admin_pb2.DescribeClusterRequest())


def _send(
    method: grpc.UnaryUnaryMultiCallable[blocking_client.Request, blocking_client.Response],
    request: blocking_client.Request,
    timeout_s: float = _CALL_TIMEOUT_S,
) -> blocking_client.Response:
    return method(request, timeout=timeout_s, metadata=tracing.call_metadata())
