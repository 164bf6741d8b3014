"""Random bytes and random messages for every RPC: a controller refuses them or answers them.

Whatever is refused changes nothing; nothing is answered as a defect of ours, logged as an error,
ends the leader's epoch or the process. `STREAMMETA_FUZZ_SEEDS=100:200` runs those seeds instead of
CI's, `STREAMMETA_FUZZ_CALLS` sets the calls of each; a failure names its seed.
"""

import os
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.rpc.connections import operator_channel
from streammeta.rpc.contract import SERVICES
from streammeta.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    nodes_pb2,
    objects_pb2,
    objects_pb2_grpc,
    streams_pb2,
)
from tests.kit.real_cluster import running_cluster
from tests.kit.seeds import seeds
from tests.kit.waiting import wait_until
from tests.server.fuzz_messages import RandomMessages, SensibleCalls

pytestmark = pytest.mark.process

_CALLS = int(os.environ.get("STREAMMETA_FUZZ_CALLS", "700"))
_METHODS: list[MethodDescriptor] = [
    method for service in SERVICES.values() for method in service.methods
]
_DEFECTS = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.DATA_LOSS,
)
_SENSIBLE_SHARE = 0.4
# They may wait for something that never comes.
_PATIENT = ("AddVoter", "RemoveVoter", "Watch", "GetSnapshot", "StateHash", "TransferLeadership")
_QUIET = (
    *("--election-timeout-ms", "400", "--fetch-timeout-ms", "1000"),
    # The controller's own work would change the map between two looks at it.
    *("--lifecycle-interval-ms", "3600000", "--sweep-interval-ms", "3600000"),
    *("--session-timeout-ms", "3600000"),
)


class _Look(NamedTuple):
    """The bound of object ids and then the hash of a map."""

    issued_below: int
    hash: bytes


class _Fuzz:
    """Makes calls of one seed at one controller."""

    def __init__(self, channel: grpc.Channel, seed: int) -> None:
        self._channel = channel
        self._rng = Random(seed)
        self._messages = RandomMessages(self._rng, ("other", ""))
        self._sensible = SensibleCalls(channel, self._rng)
        self._admin = admin_pb2_grpc.AdminServiceStub(channel)
        self._objects = objects_pb2_grpc.ObjectServiceStub(channel)
        self.seed = seed
        self.changed: Counter[str] = Counter()
        """How often a call of each method changed the map."""

    def look(self) -> _Look:
        """The map as it is."""
        issued_below = self._issued_below()
        answer = self._admin.StateHash(admin_pb2.StateHashRequest(), timeout=60)
        return _Look(issued_below, answer.hash)

    def _issued_below(self) -> int:
        request = objects_pb2.CheckObjectsRequest(object_ids=[0])
        return int(self._objects.CheckObjects(request, timeout=60).issued_below)

    def _is_as_before(self, before: _Look, after: _Look) -> bool:
        """Whether a call changed nothing; the leader claims ids by itself, behind a snapshot."""
        return after.hash == before.hash or self._issued_below() != before.issued_below

    def has_leader(self) -> bool:
        """Whether the controller leads and serves by now: an elected one first replays its log."""
        get_nodes = next(method for method in _METHODS if method.name == "GetNodes")
        answer, _ = self._send(get_nodes, b"")
        return answer is not None

    def epoch(self) -> int:
        """The epoch of the leader, which there must be."""
        answer = self._admin.DescribeCluster(admin_pb2.DescribeClusterRequest(), timeout=60)
        assert answer.leader_id == 1, f"seed {self.seed}: leader {answer.leader_id}"
        return int(answer.epoch)

    def prepare(self) -> None:
        """Make nodes, streams and objects for later calls to name."""
        for node_id in (7, 1_000):
            node = common_pb2.NodeIdentity(node_id=node_id, node_epoch=1)
            for name, request in _first_calls(node):
                found = [method for method in _METHODS if method.name == name]
                answer, error = self._send(found[0], request.SerializeToString())
                assert answer is not None, f"{name}: {error}"

    def call(self, before: _Look) -> _Look:
        """Make one call; return the map after it."""
        if self._rng.random() < _SENSIBLE_SHARE:
            name, message = self._sensible.draw()
            (method,) = (method for method in _METHODS if method.name == name)
        else:
            method = self._rng.choice(_METHODS)
            if method.name in _PATIENT and self._rng.random() < 0.8:
                return before
            message = self._messages.make(method.input_type)
        payload = message.SerializeToString()
        if self._rng.random() < 0.25:
            payload = self._messages.spoil(payload)
        answer, error = self._send(method, payload)
        after = self.look()
        self.changed[method.name] += after.hash != before.hash
        where = f"seed {self.seed}: {method.full_name} {_shown(method, payload)}"
        if error is not None:
            assert error.code() not in _DEFECTS, f"{where}: {error.code()} {error.details()}"
            assert self._is_as_before(before, after), (
                f"{where}: refused with {error.code()}, but the map changed"
            )
        elif answer is not None and _is_refused(answer):
            assert self._is_as_before(before, after), (
                f"{where}: answered {answer}, but the map changed"
            )
        return after

    def _send(self, method: MethodDescriptor, payload: bytes) -> tuple[Message | None, Any | None]:
        path = f"/{method.containing_service.full_name}/{method.name}"
        read = GetMessageClass(method.output_type).FromString
        timeout = 1.5 if method.name in _PATIENT else 10
        answered = 0
        try:
            if method.client_streaming:
                # One message, read to its end: a second would be judged with it, or after it.
                pipeline = self._channel.stream_stream(path, _as_it_is, read)
                for _ in pipeline(iter([payload]), timeout=timeout):
                    answered += 1
            elif method.server_streaming:
                answers = self._channel.unary_stream(path, _as_it_is, read)(
                    payload, timeout=timeout
                )
                next(iter(answers), None)
                answers.cancel()
            else:
                unary = self._channel.unary_unary(path, _as_it_is, read)
                return unary(payload, timeout=timeout), None
        except grpc.RpcError as error:
            failed: Any = error
            waited = method.name in _PATIENT and failed.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return None, None if waited or answered else failed
        # Only unary answers say what became of the call.
        return None, None


def _is_refused(answer: Message) -> bool:
    refused: Any = answer
    return "error" in answer.DESCRIPTOR.fields_by_name and refused.error != 0


def _as_it_is(payload: bytes) -> bytes:
    return payload


def _shown(method: MethodDescriptor, payload: bytes) -> str:
    try:
        message = GetMessageClass(method.input_type).FromString(payload)
    except DecodeError:
        return payload.hex()
    return str(message).replace("\n", " ")[:2_000]


def _first_calls(node: common_pb2.NodeIdentity) -> Iterator[tuple[str, Message]]:
    new = [streams_pb2.NewStream() for _ in range(6)]
    first = 0 if node.node_id == 7 else 6
    opened = [
        streams_pb2.StreamToOpen(stream_id=stream_id, stream_epoch=1)
        for stream_id in range(first, first + 4)
    ]
    yield "RegisterNode", nodes_pb2.RegisterNodeRequest(node=node)
    yield (
        "CreateStreams",
        streams_pb2.CreateStreamsRequest(request_id="first", node=node, streams=new),
    )
    yield "OpenStreams", streams_pb2.OpenStreamsRequest(node=node, streams=opened)
    yield (
        "PrepareObjects",
        objects_pb2.PrepareObjectsRequest(
            request_id="first", node=node, count=12, ttl_ms=3_600_000
        ),
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with running_cluster(tmp_path_factory.mktemp("fuzz"), 1, _QUIET) as started:
        yield started


@pytest.mark.parametrize("seed", seeds(2, variable="STREAMMETA_FUZZ_SEEDS"))
def test_no_call_hurts_a_controller(cluster: LocalCluster, seed: int) -> None:
    with (
        operator_channel(cluster.endpoints[0]) as channel,
    ):
        fuzz = _Fuzz(channel, seed)
        wait_until(fuzz.has_leader, "the controller leads")
        fuzz.prepare()
        epoch, seen = fuzz.epoch(), fuzz.look()
        for _ in range(_CALLS):
            seen = fuzz.call(seen)
            assert cluster.children[1].is_running, f"seed {seed}: {cluster.children[1].log_tail()}"
        assert len(+fuzz.changed) > 8, (
            f"seed {seed}: hardly anything changed the map: {+fuzz.changed}"
        )
        assert fuzz.epoch() == epoch, f"seed {seed}: the leader was deposed"
    text = cluster.children[1].log_path.read_text()
    for word in ("Traceback", '"level": "error"', "[error", "[critical", "InvariantError"):
        assert word not in text, f"seed {seed}: {text[max(0, text.index(word) - 400) :][:3_000]}"
