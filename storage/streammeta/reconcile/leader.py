"""Questions to the controllers: may these objects be deleted, what is in the map, whose map is it.

Follows redirects to the leader, waits out elections up to a deadline, and never turns a doubt into
an answer: whatever is not a full and well-formed reply is a `ControllerError`. Usable in a driver
and in an executor; a client belongs to the process that made it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc

from streammeta.reconcile.errors import ControllerError
from streammeta.rpc.connections import operator_channel
from streammeta.rpc.failures import Reason, read_failure
from streammeta.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    metadata_pb2,
    metadata_pb2_grpc,
    objects_pb2,
    objects_pb2_grpc,
)

_CALL_TIMEOUT_S = 10.0
_STREAM_TIMEOUT_S = 600.0
_PAUSE_S = 0.2
_STREAM_ATTEMPTS = 5
_PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Standing:
    """The leader's word on some ids: one state per id, and whose map it speaks for.

    Ids below `next_object_id` have been issued; `issued_below` is the bound that the cluster claims
    in its bucket. `cluster_uuid` is empty until the cluster has marked its bucket.
    """

    states: tuple[int, ...]
    next_object_id: int
    cluster_id: str
    cluster_uuid: str
    issued_below: int


@dataclass(frozen=True, slots=True)
class Description:
    """The cluster as the controller at `endpoint` knows it; empty strings where it knows nothing.

    `bucket_problem` is why it does not trust its bucket.
    """

    endpoint: str
    cluster_id: str
    cluster_uuid: str
    namespace: str
    bucket_problem: str


class LeaderClient:
    """Blocking calls to whichever controller leads.

    `endpoints` are HOST:PORT of controllers, `patience_s` how long to look for a leader before
    giving up. Use it as a context manager or call `close`.
    """

    def __init__(self, endpoints: Sequence[str], patience_s: float) -> None:
        self._endpoints = tuple(endpoints)
        self._patience_s = patience_s
        self._preferred = self._endpoints[0]
        self._channels: dict[str, grpc.Channel] = {}
        self._silent_since = 0.0

    @property
    def patience_s(self) -> float:
        """Time for which a leader is looked for."""
        return self._patience_s

    def __enter__(self) -> LeaderClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def check_objects(self, object_ids: Sequence[int]) -> Standing:
        """Ask for the state of each id (1..10000 of them) as the leader knows it; linearizable.

        Raises:
            ControllerError: no leader answered in time, or the answer does not fit the question.
        """
        request = objects_pb2.CheckObjectsRequest(object_ids=object_ids)

        def call(channel: grpc.Channel) -> objects_pb2.CheckObjectsResponse:
            stub = objects_pb2_grpc.ObjectServiceStub(channel)
            return stub.CheckObjects(request, timeout=_CALL_TIMEOUT_S)

        answer = self._ask("CheckObjects", call)
        if len(answer.states) != len(object_ids):
            raise ControllerError(
                f"CheckObjects answered {len(answer.states)} states for {len(object_ids)} ids;"
                " check that controllers and this tool are of one version"
            )
        if not answer.cluster_id:
            raise ControllerError("CheckObjects answered without a cluster id; nothing is decided")
        return Standing(
            states=tuple(answer.states),
            next_object_id=answer.next_object_id,
            cluster_id=answer.cluster_id,
            cluster_uuid=answer.cluster_uuid,
            issued_below=answer.issued_below,
        )

    def describe(self) -> tuple[Description, ...]:
        """The cluster as its controllers know it: the leader, then those given that answer.

        Raises:
            ControllerError: no leader answered in time.
        """
        self.check_objects([0])  # any controller describes the cluster; this finds the leader
        leader = self._ask("DescribeCluster", _describe_through)
        described = [_description(self._preferred, leader)]
        for endpoint in self._endpoints:
            if endpoint == described[0].endpoint:
                continue
            try:
                answer = _describe_through(self._channel(endpoint))
            except grpc.RpcError:
                continue  # a controller that is down says nothing wrong
            described.append(_description(endpoint, answer))
        return tuple(described)

    def read_snapshot(
        self, take: Callable[[Iterator[metadata_pb2.GetSnapshotResponse]], _Answer]
    ) -> _Answer:
        """Call `take` with the chunks of a copy of the map as of now or later.

        `take` is called again, from the first chunk, when the leader is lost on the way; the time
        to look for another counts from the last chunk, a few times.

        Raises:
            ControllerError: no leader sent a whole copy in time.
        """
        request = metadata_pb2.GetSnapshotRequest()
        begun = 0

        def heard(
            chunks: Iterator[metadata_pb2.GetSnapshotResponse],
        ) -> Iterator[metadata_pb2.GetSnapshotResponse]:
            nonlocal begun
            for number, chunk in enumerate(chunks):
                begun += number == 0
                if begun <= _STREAM_ATTEMPTS:
                    self._silent_since = time.monotonic()
                yield chunk

        def call(channel: grpc.Channel) -> _Answer:
            stub = metadata_pb2_grpc.MetadataServiceStub(channel)
            return take(heard(iter(stub.GetSnapshot(request, timeout=_STREAM_TIMEOUT_S))))

        return self._ask("GetSnapshot", call)

    def _ask(self, name: str, call: Callable[[grpc.Channel], _Answer]) -> _Answer:
        """Try the preferred endpoint, then where it points, then the others in turn."""
        self._silent_since = time.monotonic()
        turn = 0
        while True:
            endpoint = self._preferred
            try:
                return call(self._channel(endpoint))
            except grpc.RpcError as error:
                last = _describe(endpoint, error)
                if not _may_pass(error):
                    raise ControllerError(f"{name} was refused: {last}") from error
                redirect = _leader_named_by(error)
                turn += 1
                others = self._endpoints[turn % len(self._endpoints)]
                self._preferred = redirect if redirect not in ("", endpoint) else others
                if time.monotonic() - self._silent_since >= self._patience_s:
                    raise ControllerError(
                        f"{name}: no leader answered within {self._patience_s:g} s, last {last};"
                        f" check that the controllers run and that --connect names them"
                        f" ({', '.join(self._endpoints)})"
                    ) from error
            time.sleep(_PAUSE_S)

    def _channel(self, endpoint: str) -> grpc.Channel:
        if endpoint not in self._channels:
            self._channels[endpoint] = operator_channel(endpoint)
        return self._channels[endpoint]


def removed(state: int) -> bool:
    """Whether the map says of an object that it existed once and is forgotten: free to delete."""
    return state == common_pb2.OBJECT_STATE_REMOVED


def state_name(state: int) -> str:
    """Name an object state as the contract does, in short: "COMMITTED"."""
    known = {value.number: value.name for value in common_pb2.ObjectState.DESCRIPTOR.values}
    return known.get(state, f"state {state}").removeprefix("OBJECT_STATE_")


def _describe_through(channel: grpc.Channel) -> admin_pb2.DescribeClusterResponse:
    stub = admin_pb2_grpc.AdminServiceStub(channel)
    return stub.DescribeCluster(admin_pb2.DescribeClusterRequest(), timeout=_CALL_TIMEOUT_S)


def _description(endpoint: str, answer: admin_pb2.DescribeClusterResponse) -> Description:
    return Description(
        endpoint=endpoint,
        cluster_id=answer.cluster_id,
        cluster_uuid=answer.cluster_uuid,
        namespace=answer.object_namespace,
        bucket_problem=answer.bucket_problem,
    )


def _may_pass(error: grpc.RpcError) -> bool:
    return isinstance(error, grpc.Call) and error.code() in _PASSING


def _describe(endpoint: str, error: grpc.RpcError) -> str:
    if not isinstance(error, grpc.Call):
        return f"{endpoint} said {error}"
    return f"{endpoint} said {error.code().name}: {error.details()}"


def _leader_named_by(error: grpc.RpcError) -> str:
    """Read the leader's HOST:PORT out of a refusal; the empty string if it names none."""
    if not isinstance(error, grpc.Call):
        return ""
    failure = read_failure(error)
    return (
        failure.metadata.get("leader_endpoint", "") if failure.reason == Reason.NOT_LEADER else ""
    )
