"""Handlers of services, except metadata routes, CommitPipeline, Watch and the quorum.

They translate and wait. All decisions are made elsewhere. Health and reflection, gRPC's own
services, are in the same call pipeline.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from streammeta.controller.config import ControllerConfig, check_controller_id
from streammeta.controller.errors import InvalidRequestError, SlowReaderError
from streammeta.controller.features import Software
from streammeta.controller.ids import NodeId
from streammeta.controller.lifecycle.bucket_claim import BucketClaims
from streammeta.controller.lifecycle.failover import HeartbeatAnswer, Heartbeats
from streammeta.controller.metadata.api import answers
from streammeta.controller.metadata.api.requests import FinishRestore, HoldDeletions
from streammeta.controller.metadata.tables.values import NodeIdentity
from streammeta.controller.rpc.calls import error_mapping
from streammeta.controller.rpc.calls.caller_addresses import described, leader_endpoint
from streammeta.controller.rpc.calls.error_mapping import Context
from streammeta.controller.rpc.calls.interceptors import CallPipeline
from streammeta.controller.rpc.codec.conversion import checked
from streammeta.controller.rpc.codec.wire_columns import adoption_in, adoption_out, parse_commit
from streammeta.controller.rpc.services.routes import PLAIN
from streammeta.controller.rpc.services.snapshot_spool import SnapshotSpool, SpoolFile
from streammeta.controller.rpc.watch.service import WatchHandler
from streammeta.controller.runtime.load.admission import Gate
from streammeta.controller.runtime.replication import operations
from streammeta.controller.runtime.replication.peer_versions import PeerVersions
from streammeta.controller.runtime.replication.quorum_driver import QuorumDriver
from streammeta.controller.runtime.writer.controller import MetadataController
from streammeta.controller.runtime.writer.feature_updates import FeatureUpdates
from streammeta.controller.trust.audit.auditor import note_offset
from streammeta.controller.trust.authenticator import current_caller, current_holder, current_quota
from streammeta.controller.trust.namespaces import require_fields
from streammeta.controller.trust.node_binding import require_own_node
from streammeta.controller.trust.rates import Places
from streammeta.rpc.contract import SERVICES
from streammeta.rpc.method_facts import RequestClass
from streammeta.rpc.methods import facts_of
from streammeta.v1 import admin_pb2, common_pb2, metadata_pb2, nodes_pb2

PipelineHandler = Callable[[AsyncIterator[bytes], error_mapping.Context], Awaitable[None]]
"""Handler of messages as bytes that answers by `context.write`, also in bytes."""


# This method is parsed into columns, since its messages may have thousands of rows.
_PARSERS: Mapping[str, Callable[[bytes], Message]] = {
    "streammeta.v1.ObjectService.CommitStreamSetObject": parse_commit
}


def service_handler(
    service: ServiceDescriptor,
    entrance: CallPipeline,
    unary: Mapping[str, error_mapping.UnaryHandler],
    streams: Mapping[str, error_mapping.StreamHandler] | None = None,
    pipelines: Mapping[str, PipelineHandler] | None = None,
    *,
    unserved: Collection[str] = (),
) -> grpc.GenericRpcHandler:
    """Return a handler for a service. `unary`, `streams` and `pipelines` are by method name.

    Every call passes the `entrance` before its request is parsed. Calls of the methods `unserved`
    end with UNIMPLEMENTED.

    Raises:
        ValueError: a method of the service has no handler and is not named in `unserved`.
    """
    streams, pipelines = streams or {}, pipelines or {}
    names = {method.name for method in service.methods}
    # A forgotten handler fails here, at the start, and not only when the method is called.
    if missing := names - {*unary, *streams, *pipelines, *unserved}:
        raise ValueError(
            f"methods of {service.full_name} without a handler: {', '.join(sorted(missing))}"
        )

    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in service.methods:
        request_class = message_factory.GetMessageClass(method.input_type)
        parse = _PARSERS.get(method.full_name, request_class.FromString)
        if (call := unary.get(method.name)) is not None:
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(
                entrance.wrap(method.full_name, error_mapping.parsed(call, parse)),
                response_serializer=_serialized,
            )
        elif (stream := streams.get(method.name)) is not None:
            handlers[method.name] = grpc.unary_stream_rpc_method_handler(
                entrance.wrap(method.full_name, error_mapping.parsed(stream, parse), lasts=True),
                response_serializer=_serialized,
            )
        elif (pipeline := pipelines.get(method.name)) is not None:
            handlers[method.name] = grpc.stream_stream_rpc_method_handler(
                entrance.wrap(method.full_name, pipeline, lasts=True)
            )

    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _serialized(message: Message | bytes) -> bytes:
    """Return the bytes of a message. Messages for many watches are already encoded."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def _class_of(method: str) -> RequestClass:
    """Return the admission class of a method whose requests all cost the same."""
    work = facts_of(method).work
    assert work is not None, f"{method} is not admitted"
    return work.kind


OBSERVER_PRESENT_MS = 10_000
"""Maximum time since an observer's last fetch for it to be listed, in milliseconds."""

TRANSFER_TIMEOUT_MS = 30_000
"""Maximum time of a transfer, in milliseconds. The driver abandons a slow successor earlier."""


@dataclass(eq=False)
class AdminHandlers:
    """AdminService, answered from this controller's own state.

    Only the leader transfers leadership.
    """

    _config: ControllerConfig
    _driver: QuorumDriver
    _controller: MetadataController
    _bucket: BucketClaims
    _features: FeatureUpdates

    def unary(self) -> Mapping[str, error_mapping.UnaryHandler]:
        """Return the handlers by method name."""
        return {
            "DescribeCluster": error_mapping.guarded(self._describe_cluster),
            "StateHash": error_mapping.guarded(self._state_hash),
            "TakeSnapshot": error_mapping.guarded(self._take_snapshot),
            "TransferLeadership": error_mapping.guarded(self._transfer_leadership),
            "UpdateFeatureLevel": error_mapping.guarded(self._update_feature_level),
            "AdoptObjects": error_mapping.guarded(self._adopt_objects),
            "FinishRestore": error_mapping.guarded(self._finish_restore),
        }

    async def _describe_cluster(
        self, _: Any, __: error_mapping.Context
    ) -> admin_pb2.DescribeClusterResponse:
        leader = self._driver.leader
        seen = described(self._driver)
        return admin_pb2.DescribeClusterResponse(
            cluster_id=self._config.cluster_id,
            leader_id=None if leader is None else leader[0],
            leader_endpoint=leader_endpoint(self._driver),
            epoch=self._driver.epoch,
            high_watermark=self._driver.high_watermark,
            answered_by=self._config.node_id,
            controllers=_controllers(seen, self._features.versions),
            size=_write_size(self._controller.cluster_metadata.size()),
            object_namespace=self._config.namespace,
            cluster_uuid=self._bucket.cluster_uuid,
            bucket_problem=self._bucket.problem,
            feature_level=self._features.level,
            undecided=_undecided(self._controller.cluster_metadata.undecided),
        )

    async def _state_hash(
        self, request: admin_pb2.StateHashRequest, _: error_mapping.Context
    ) -> admin_pb2.StateHashResponse:
        seen = await self._controller.state_hash(
            request.at_offset if request.HasField("at_offset") else None
        )
        return admin_pb2.StateHashResponse(
            offset=seen.offset,
            hash=seen.digest,
            answered_by=self._config.node_id,
            log_hash=seen.log_hash,
        )

    async def _take_snapshot(
        self, _: admin_pb2.TakeSnapshotRequest, __: error_mapping.Context
    ) -> admin_pb2.TakeSnapshotResponse:
        taken = await self._driver.take_snapshot()
        return admin_pb2.TakeSnapshotResponse(
            end_offset=taken.end_offset, epoch=taken.epoch, answered_by=self._config.node_id
        )

    async def _transfer_leadership(
        self, request: admin_pb2.TransferLeadershipRequest, context: error_mapping.Context
    ) -> admin_pb2.TransferLeadershipResponse:
        successor = None
        # 0 is a valid id, so a missing field is what leaves the choice to the leader.
        if request.HasField("to_node_id"):
            successor = NodeId(checked(check_controller_id, request.to_node_id, "to_node_id"))
        await self._driver.transfer_leadership(successor, TRANSFER_TIMEOUT_MS)
        return admin_pb2.TransferLeadershipResponse()

    async def _update_feature_level(
        self, request: admin_pb2.UpdateFeatureLevelRequest, context: error_mapping.Context
    ) -> admin_pb2.UpdateFeatureLevelResponse:
        answered = await self._features.update(
            request.level, is_lower=request.lower, dry_run=request.dry_run
        )
        error_mapping.quote_offset(context, answered.offset)
        return cast(admin_pb2.UpdateFeatureLevelResponse, _write_level(answered.answer))

    async def _adopt_objects(
        self, request: admin_pb2.AdoptObjectsRequest, context: error_mapping.Context
    ) -> admin_pb2.AdoptObjectsResponse:
        asked = adoption_in(request)
        async with self._controller.gate.admitted(
            _class_of("AdminService.AdoptObjects"), context.time_remaining()
        ):
            answered = await self._controller.write(asked)
        error_mapping.quote_offset(context, answered.offset)
        return adoption_out(cast(answers.AdoptObjectsAnswer, answered.answer), asked.range_count)

    async def _finish_restore(
        self, _: admin_pb2.FinishRestoreRequest, context: error_mapping.Context
    ) -> admin_pb2.FinishRestoreResponse:
        # Replicated, because all later leaders must leave the recovery mode too.
        answered = await self._controller.write(FinishRestore())
        error_mapping.quote_offset(context, answered.offset)
        answer = cast(answers.FinishRestoreAnswer, answered.answer)
        return admin_pb2.FinishRestoreResponse(was_recovering=answer.was_recovering)


def _undecided(bounds: tuple[int, int] | None) -> admin_pb2.UndecidedIds | None:
    return None if bounds is None else admin_pb2.UndecidedIds(first=bounds[0], below=bounds[1])


def _controllers(
    seen: operations.QuorumDescription, versions: PeerVersions
) -> list[admin_pb2.Controller]:
    """Return voters, and observers that fetch.

    A leader remembers departed observers for a while.
    """
    present = [(voter, True) for voter in seen.voters]
    present += [
        (observer, False)
        for observer in seen.observers
        if observer.last_fetch_age_ms is not None
        and observer.last_fetch_age_ms < OBSERVER_PRESENT_MS
    ]
    return [
        _controller(replica, versions.of(replica.key.node_id), is_voter=is_voter)
        for replica, is_voter in sorted(present, key=lambda item: item[0].key.node_id)
    ]


def _controller(
    replica: operations.ReplicaDescription, software: Software | None, *, is_voter: bool
) -> admin_pb2.Controller:
    return admin_pb2.Controller(
        node_id=replica.key.node_id,
        endpoint=replica.endpoint,
        voter=is_voter,
        version="" if software is None else software.version,
        lowest_level=None if software is None else software.levels.lowest,
        highest_level=None if software is None else software.levels.highest,
    )


class NodeHandlers:
    """NodeService.Heartbeat: passes heartbeats to the leader's sessions."""

    def __init__(self, heartbeats: Heartbeats, gate: Gate) -> None:
        self._heartbeats = heartbeats
        self._gate = gate

    def unary(self) -> Mapping[str, error_mapping.UnaryHandler]:
        """Return the handlers by method name."""
        return {"Heartbeat": error_mapping.guarded(self._heartbeat)}

    async def _heartbeat(
        self, request: nodes_pb2.HeartbeatRequest, context: error_mapping.Context
    ) -> nodes_pb2.HeartbeatResponse:
        async with self._gate.admitted(
            _class_of("NodeService.Heartbeat"), context.time_remaining()
        ):
            node = _read_node(request.node, "node")
            # A heartbeat for another node would keep a dead broker alive.
            if (held_to := current_caller().held_to) is not None:
                require_own_node(held_to, node.node_id)
            # 0 is the default of the field and means the configured timeout.
            if request.session_timeout_ms < 0:
                raise InvalidRequestError(
                    "session_timeout_ms", f"{request.session_timeout_ms}, must not be negative"
                )
            answer = await self._heartbeats.heartbeat(
                node,
                wants_shutdown=request.wants_shutdown,
                closes=request.closes,
                session_timeout_ms=request.session_timeout_ms,
            )

        return cast(nodes_pb2.HeartbeatResponse, _write_heartbeat(answer))


_write_size = PLAIN.writer(answers.MetadataSize, admin_pb2.MapSize)
_write_level = PLAIN.writer(answers.SetFeatureLevelAnswer, admin_pb2.UpdateFeatureLevelResponse)
_read_node = PLAIN.reader(NodeIdentity, common_pb2.NodeIdentity)
_write_heartbeat = PLAIN.writer(HeartbeatAnswer, nodes_pb2.HeartbeatResponse)


HOLD_MS_MAX = 604_800_000
"""Maximum time that a reader may hold deletions for its snapshot, in milliseconds: a week."""

CHUNK_BYTES_MAX = 1 << 20


SNAPSHOTS_PER_PRINCIPAL = 1
SNAPSHOTS_MAX = 8
"""Snapshots on their way from one controller."""

_SNAPSHOT_RETRY_MS = 5_000

SNAPSHOT_S_MIN = 60.0
SNAPSHOT_BYTES_PER_S_MIN = 256 << 10
"""A snapshot must be read at this pace, on the whole, after `SNAPSHOT_S_MIN` seconds."""

_ABORT_PATIENCE_S = 5.0
"""Maximum time to send the status that cuts off a slow reader, in seconds."""


@dataclass(eq=False)
class MetadataHandlers:
    """MetadataService: snapshots, spooled to the disk by a thread, and watches."""

    _controller: MetadataController
    _spool: SnapshotSpool
    _on_copied: Callable[[], None] = lambda: None
    """Called after each snapshot made for a caller."""

    def __post_init__(self) -> None:
        self._watch = WatchHandler(self._controller.changes)
        self._places = Places("snapshots", _SNAPSHOT_RETRY_MS)

    def streams(self) -> Mapping[str, error_mapping.StreamHandler]:
        """Return the handlers by method name."""
        return {"GetSnapshot": self._get_snapshot, "Watch": self._watch.watch}

    async def _get_snapshot(
        self, request: metadata_pb2.GetSnapshotRequest, context: error_mapping.Context
    ) -> None:
        given = current_quota().snapshots
        try:
            with (
                self._places.taken(
                    current_holder(),
                    per_holder=SNAPSHOTS_PER_PRINCIPAL if given is None else given,
                    in_all=SNAPSHOTS_MAX,
                ),
                self._spool.file() as file,
            ):
                await self._serve_snapshot(request, context, file)
        except SlowReaderError as error:
            # A message that is stuck permanently delays the status after it.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(error_mapping.abort(context, error), _ABORT_PATIENCE_S)
        except Exception as error:  # noqa: BLE001 - every failure of a call is a status
            await error_mapping.abort(context, error)

    async def _serve_snapshot(
        self,
        request: metadata_pb2.GetSnapshotRequest,
        context: error_mapping.Context,
        file: SpoolFile,
    ) -> None:
        # Few snapshots are written at a time; a slow reader holds up no other.
        gate = self._controller.gate
        async with gate.admitted(
            _class_of("MetadataService.GetSnapshot"), context.time_remaining()
        ):
            # Before the hold: a rejected call must not add anything to the log.
            await self._require_offset(request.not_before_offset)
            await self._hold_deletions(request)
            # After the hold, so that its entry is part of the snapshot.
            frozen = await self._controller.frozen()
            note_offset(frozen.id.end_offset)
            # A copy outlives this controller, so ids issued from now on must be claimed soon.
            self._on_copied()
            # To the disk first: a slow reader must not keep the frozen view in memory.
            total = await asyncio.to_thread(frozen.write, file)

        # Grows with the size, so that a large cluster is not cut off on a slow link.
        patience_s = SNAPSHOT_S_MIN + total / SNAPSHOT_BYTES_PER_S_MIN
        try:
            async with asyncio.timeout(patience_s):
                for position in range(0, total, CHUNK_BYTES_MAX):
                    chunk = metadata_pb2.GetSnapshotResponse(
                        end_offset=frozen.id.end_offset,
                        epoch=frozen.id.epoch,
                        total_bytes=total,
                        position=position,
                        data=await asyncio.to_thread(file.read_at, position, CHUNK_BYTES_MAX),
                    )
                    await context.write(chunk)
        except TimeoutError:
            raise SlowReaderError(
                f"{total} bytes of a snapshot were not read in {patience_s:.0f} s, read faster"
            ) from None

    async def _require_offset(self, wanted: int) -> None:
        """Validate the offset first, so that a rejected call leaves no hold."""
        # Known here already, which saves the round trip to a majority.
        if wanted <= self._controller.committed_end:
            return
        end_offset = (await self._controller.frozen()).id.end_offset  # the newest, by a majority
        if wanted > end_offset:
            raise InvalidRequestError(
                "not_before_offset", f"{wanted}, but the log is committed up to {end_offset} only"
            )

    async def _hold_deletions(self, request: metadata_pb2.GetSnapshotRequest) -> None:
        """Hold deletions before the snapshot, so that no object in it loses its bytes."""
        hold_ms = request.hold_ms
        if not 0 <= hold_ms <= HOLD_MS_MAX:
            raise InvalidRequestError("hold_ms", f"{hold_ms}, must be 0 to {HOLD_MS_MAX}, a week")
        require_fields(current_caller(), "MetadataService.GetSnapshot", request)
        if hold_ms:
            await self._controller.write(HoldDeletions(hold_ms=hold_ms))


_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
_REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]


def health_handler(
    servicer: health.aio.HealthServicer, entrance: CallPipeline
) -> grpc.GenericRpcHandler:
    """Return a handler for the states that are set on `servicer`."""
    # Probes ask for one service by Check. No tool of ours lists them.
    return service_handler(
        _HEALTH,
        entrance,
        {"Check": servicer.Check},
        {"Watch": servicer.Watch},
        unserved=("List",),
    )


def reflection_handler(entrance: CallPipeline) -> grpc.GenericRpcHandler:
    """Return a handler that describes the services of the contract, health and itself."""
    contract = (service.full_name for service in SERVICES.values())
    # Without their names the tool could not find health and reflection themselves.
    names = (*contract, health.SERVICE_NAME, reflection.SERVICE_NAME)
    servicer = reflection.aio.ReflectionServicer(names)

    async def answer(messages: AsyncIterator[bytes], context: Context) -> None:
        # The pipeline passes bytes, because callers are authenticated before anything is parsed.
        requests = _parsed(messages)
        async for response in servicer.ServerReflectionInfo(requests, context):
            await context.write(response.SerializeToString())

    return service_handler(_REFLECTION, entrance, {}, {}, {"ServerReflectionInfo": answer})


async def _parsed(
    messages: AsyncIterator[bytes],
) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
    async for data in messages:
        yield reflection_pb2.ServerReflectionRequest.FromString(data)
