"""Composition root of one controller process: builds each part once, closes them in reverse.

Holds no rule. It builds the journal on disk, the quorum driver over it, the metadata and its
single-writer loop, the gRPC server with every service of the contract, the listeners for the other
controllers and for HTTP, and the lifecycle tasks, which work only while this node leads.
"""

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from importlib import metadata
from typing import Any, Protocol

import grpc
import structlog
import uvloop
from grpc_health.v1 import health, health_pb2

from streammeta.controller.backup.uploader import Backup
from streammeta.controller.config import ConfigError, ControllerConfig
from streammeta.controller.features import SUPPORTED, Software
from streammeta.controller.grpc_server.limits import CONNECTIONS_MAX
from streammeta.controller.grpc_server.server import new_server
from streammeta.controller.journal.directory import check_identity, read_identity
from streammeta.controller.journal.journal import Journal
from streammeta.controller.lifecycle import sweeps
from streammeta.controller.lifecycle.broker_sessions import Sessions
from streammeta.controller.lifecycle.bucket_claim import BucketClaims
from streammeta.controller.lifecycle.deletion import Deletion
from streammeta.controller.lifecycle.failover import Failover, Heartbeats
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.registries.limits import QUOTAS, MetadataLimits
from streammeta.controller.monitoring.http.probes import Phase
from streammeta.controller.peers.addresses import PeerAddresses
from streammeta.controller.peers.dialled import Identity
from streammeta.controller.peers.server import PeerServer
from streammeta.controller.peers.transport import TcpPeerTransport
from streammeta.controller.process import operating_system
from streammeta.controller.process.audit_log import Auditing, check_audit_log
from streammeta.controller.quorum.config import QuorumConfig, QuorumTimings
from streammeta.controller.quorum.voters import ReplicaKey
from streammeta.controller.rpc.calls.interceptors import CallPipeline
from streammeta.controller.rpc.calls.memory_budget import MemoryBudget, MemoryGuard
from streammeta.controller.rpc.calls.tally import RequestTally, UncalledConnections
from streammeta.controller.rpc.services import contract
from streammeta.controller.rpc.services.commit_pipeline import CommitPipeline
from streammeta.controller.rpc.services.quorum import QuorumServicer
from streammeta.controller.rpc.services.routes import MAP_SERVICES, LeaderView, routed, routes
from streammeta.controller.rpc.services.snapshot_spool import SnapshotSpool
from streammeta.controller.runtime.clock import Clock, SystemClock, lease_clock_ms
from streammeta.controller.runtime.interfaces import Endpoints
from streammeta.controller.runtime.load.process_memory import ProcessMemory, default_limit
from streammeta.controller.runtime.persistence.checkpointer import CheckpointLimits
from streammeta.controller.runtime.persistence.metadata_checkpoint import (
    EarlyReading,
    snapshot_check,
)
from streammeta.controller.runtime.replication.feature_check import check_levels
from streammeta.controller.runtime.replication.log_source import LogSource
from streammeta.controller.runtime.replication.quorum_driver import QuorumDriver
from streammeta.controller.runtime.writer.bucket_permits import MarkerLease, ObjectIdGate
from streammeta.controller.runtime.writer.controller import MetadataController
from streammeta.controller.runtime.writer.feature_updates import FeatureUpdates
from streammeta.controller.tls.manager import TlsManager, check_advertised, warn_of_advertised
from streammeta.controller.trust.policy import Policy
from streammeta.controller.trust.rates import Rates
from streammeta.controller.trust.setup import http_authenticator, read_policy, rpc_authenticator
from streammeta.rpc.contract import SERVICES
from streammeta.storage.durable_files import PosixFileSystem
from streammeta.storage.installation import DISTRIBUTION
from streammeta.storage.object_store.opening import open_object_store
from streammeta.storage.object_store.protocol.base import ObjectStore

_log = structlog.get_logger(component="server")

_PRIORITY = ("/streammeta.v1.NodeService/Heartbeat", "/grpc.health.v1.Health/Check")
"""Calls that overload must not hold up: brokers whose are not heard are fenced, and controllers
that do not answer probes are ended."""

STOP_GRACE_S = 1.0
"""Grace period of calls in flight when the server stops, in seconds."""

SWITCH_INTERVAL_S = 0.0005
"""Time after which a busy thread lets another one have the interpreter, in seconds.

Python's own is 5 ms: an acknowledgement that waits for the disk's thread would wait as long.
"""

COLLECTED_EVERY = 10_000
"""New objects between two collections. A few calls create Python's default of 700."""


class PortInUseError(OSError):
    """An address to listen on is taken."""


def run(config: ControllerConfig) -> None:
    """Run a controller until SIGINT or SIGTERM.

    Raises:
        ConfigError: the store's URI does not parse, or a file for TLS can't be used.
        PortInUseError: an address is taken.
        JournalError: the data directory is not formatted, damaged, locked or another node's.
        StorageError: the bucket can't be used.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    uvloop.run(_serve(config))


def check(config: ControllerConfig) -> None:
    """Check files, stores and the data directory as a start would; change nothing.

    The directory may be in use: its identity is read without its lock.

    Raises:
        ConfigError: a store's URI, or a file for TLS, policy, tokens or audit is invalid.
        JournalError: the data directory is missing, not formatted, damaged or another node's.
        StorageError: the bucket can't be used.
    """
    TlsManager(config)
    check_advertised(config)
    rpc_authenticator(config, read_policy(config))
    check_audit_log(config)
    identity = read_identity(config.data_dir, PosixFileSystem(read_only=True))
    check_identity(identity, config.data_dir, config.cluster_id, config.node_id)
    check_levels(config.data_dir)
    for store in (_open_store("store", config.store_uri), _backup_store(config)):
        if store is not None:
            with contextlib.closing(store):
                store.check()


async def _serve(config: ControllerConfig) -> None:
    signals = operating_system.StopSignals()
    manager = operating_system.ServiceManager(os.environ)
    telling = asyncio.create_task(manager.run())
    try:
        await _serve_watched(config, manager, signals)
    finally:
        telling.cancel()


async def _serve_watched(
    config: ControllerConfig,
    manager: operating_system.ServiceManager,
    signals: operating_system.StopSignals,
) -> None:
    operating_system.log_start(config)
    warn_of_advertised(config)
    store = _open_store("store", config.store_uri)
    backup_store = _backup_store(config)  # which may be away
    await asyncio.to_thread(store.check)
    if signals.are_there:
        _log.info("controller_stopped", node_id=config.node_id)
        return
    with EarlyReading(config.data_dir) as early:
        check_levels(config.data_dir)
        journal = Journal.open(
            config.data_dir,
            cluster_id=config.cluster_id,
            node_id=config.node_id,
            read_snapshot_voters=snapshot_check(config.cluster_id),
        )
        try:
            kept = journal.snapshots.kept
            early.settle(kept[-1] if kept else None)
            if not signals.are_there:
                controller_node = ControllerNode(config, journal, store, backup_store, early)
                await controller_node.run(manager, signals)
        finally:
            journal.close()
            _log.info("controller_stopped", node_id=config.node_id)


def _open_store(option: str, uri: str) -> ObjectStore:
    try:
        return open_object_store(uri)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error


def _backup_store(config: ControllerConfig) -> ObjectStore | None:
    uri = config.backup_store
    return None if uri is None else _open_store("backup-store", uri)


def _spare_collector() -> None:
    """Keep the garbage collector from what lives as long as the process.

    A full collection walks all objects while nothing else runs: some 70,000 of modules and classes,
    25 ms of each, with a few hundred calls between two.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECTED_EVERY)


class LifecycleTask(Protocol):
    """A task that works while this node leads, and idles otherwise."""

    async def run(self) -> None:
        """Run until cancelled."""
        ...


class ControllerNode:
    """The parts of one controller, wired."""

    def __init__(
        self,
        config: ControllerConfig,
        journal: Journal,
        store: ObjectStore,
        backup_store: ObjectStore | None,
        early: EarlyReading,
    ) -> None:
        self._config, self._journal, self._store = config, journal, store
        self._requests = RequestTally()
        clock = SystemClock()
        object_ids = ObjectIdGate()
        self._controller = _new_controller(config, clock, object_ids, early)
        quorum = _quorum_config(config, journal)
        addresses = _peer_addresses(config)
        identity = _identity(config)
        self._tls = TlsManager(config)
        self._uncalled = UncalledConnections(lambda: self._tls.handshakes)
        self._reloading = operating_system.Reloading(config.tls_reload_ms, [self._tls.look])
        self._transport = TcpPeerTransport(
            addresses, identity, quorum.timings.request_timeout_ms, self._tls.peers
        )
        self._driver = QuorumDriver(
            config=quorum,
            journal=journal,
            transport=self._transport,
            state_machine=self._controller,
            clock=clock,
            checkpoints=_checkpoint_limits(config),
        )
        self._peers = PeerServer(self._driver, identity, self._tls.peers, addresses)
        self._controller.bind(self._driver)
        self._health = health.aio.HealthServicer()
        self._sessions = sessions = Sessions(config.session_timeout_ms)
        self._heartbeats = Heartbeats(self._controller, sessions, clock)
        self._view = LeaderView(sessions.state, self._heartbeats.compacted_by, sessions.heard)
        self._bucket = BucketClaims(
            self._controller,
            store,
            object_ids,
            clock,
            cluster_id=config.cluster_id,
            node_id=config.node_id,
            namespace=config.namespace,
            interval_ms=config.lifecycle_interval_ms,
        )
        self._backup = self._new_backup(journal, backup_store, clock)
        self._deletion = self._new_deletion(store, clock)
        self._lifecycle: tuple[LifecycleTask, ...] = (
            self._bucket,
            self._deletion,
            self._new_failover(clock),
            *self._sweeps(store),
            *((self._backup,) if self._backup else ()),
        )
        self._memory = ProcessMemory(_memory_limit(config))
        self._auditing = Auditing(config, clock, self._driver, self._controller, self._tls)
        self._policy = read_policy(config)
        self._authenticator, self._token_keys = rpc_authenticator(config, self._policy)
        if self._policy is not None:
            self._deny_peers(self._policy.current)
            self._policy.on_change(self._deny_peers)
        self._request_memory = MemoryBudget(config.request_memory_mb << 20, self._memory.took)
        self._phase = Phase.STARTING
        self._health_tasks: set[asyncio.Task[None]] = set()
        self._controller.on_leadership(self._announce_leadership)

    def _new_deletion(self, store: ObjectStore, clock: Clock) -> Deletion:
        config, backup = self._config, self._backup
        return Deletion(
            self._controller,
            store,
            config.namespace,
            clock,
            delay_ms=config.delete_delay_ms,
            interval_ms=config.lifecycle_interval_ms,
            may_delete=lambda: self._bucket.may_delete,
            backed_up_end=None if backup is None else lambda: backup.end_offset,
            objects_per_s=config.delete_rate,
        )

    def _new_failover(self, clock: Clock) -> Failover:
        per_target = self._config.recoveries_per_node
        return Failover(
            self._controller, self._sessions, self._heartbeats, clock, per_target=per_target
        )

    def _sweeps(self, store: ObjectStore) -> tuple[LifecycleTask, ...]:
        config = self._config
        return (
            sweeps.Expiry(self._controller, config.lifecycle_interval_ms),
            sweeps.StreamSweep(self._controller, config.lifecycle_interval_ms),
            sweeps.ProducerExpiry(self._controller, config.sweep_interval_ms),
            sweeps.SetObjectSweep(self._controller, self._sessions, config.sweep_interval_ms),
            sweeps.UploadSweep(
                self._controller,
                store,
                config.namespace,
                config.sweep_interval_ms,
                may_delete=lambda: self._bucket.may_delete,
                is_undecided=self._bucket.is_undecided,
            ),
        )

    def _new_backup(
        self, journal: Journal, store: ObjectStore | None, clock: Clock
    ) -> Backup | None:
        if store is None:
            return None
        config = self._config
        return Backup(
            self._controller,
            LogSource(self._driver, journal),
            store,
            clock,
            cluster_id=config.cluster_id,
            cluster_uuid=lambda: self._bucket.cluster_uuid,
            writer_version=metadata.version(DISTRIBUTION),
            interval_ms=config.backup_interval_ms,
            keep_ms=config.backup_keep_ms,
        )

    async def run(
        self, manager: operating_system.ServiceManager, signals: operating_system.StopSignals
    ) -> None:
        """Serve until a signal asks to stop or the quorum can't continue."""

        def stopping() -> None:
            self._phase = Phase.STOPPING
            manager.stopping("hands over leadership and answers calls in flight")

        signals.on_asked = stopping
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._look_again)
        self._tls.tell(self._auditing.changed)
        if self._policy is not None:
            self._policy.told = self._auditing.changed
        async with self._auditing, self._listening(signals), self._lifecycle_running() as lifecycle:
            _log.info("memory", limit_bytes=self._memory.limit_bytes)
            await self._set_health("leader", serving=False)
            await self._driver.start()
            _spare_collector()
            await self._set_health("serving", serving=True)
            self._phase = Phase.SERVING
            # The supervisor of this process reads this line; everything else goes to the log.
            print(f"ready endpoint={self._config.listen}", flush=True)
            manager.ready(f"serves {self._config.listen}")
            _log.info(
                "controller_ready",
                **self._tls.describe(),
            )
            stopped = asyncio.create_task(signals.asked.wait())
            # A part that can't continue ends the process: limping would hide it.
            ends: tuple[asyncio.Future[Any], ...] = (stopped, self._driver.fatal, *lifecycle)
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            await self._driver.stop(signals.hurried)
        for future in done:
            future.result()

    def _deny_peers(self, policy: Policy) -> None:
        self._tls.peers.denials = policy.denials
        self._transport.reauthorize()
        self._peers.reauthorize()

    def _look_again(self) -> None:
        """Look at files that may have been replaced, or moved away."""
        self._auditing.look()
        self._reloading.ask()
        for files in (self._policy, self._token_keys):
            if files is not None:
                files.look_now()

    @contextlib.asynccontextmanager
    async def _listening(self, signals: operating_system.StopSignals) -> AsyncIterator[None]:
        limit, listeners = operating_system.raise_limit(), len(self._tls.listeners)
        serves_http = self._config.http_listen is not None
        connections = operating_system.connections_within(
            limit, CONNECTIONS_MAX, listeners, serves_http=serves_http
        )
        _log.info("descriptors", limit=limit, connections_a_listener=connections)
        clients = new_server(self._config.connection_age_ms, connections)
        clients.add_generic_rpc_handlers(self._handlers())
        clients.prioritize(_PRIORITY)
        for plane in self._tls.listeners:
            try:
                clients.listen(plane.address, plane.certificates, asks_clients=not plane.by_token)
            except OSError as error:
                raise _port_in_use(plane.option, plane.address, error) from error
        try:
            await self._peers.start(self._config.peer_listen)
        except OSError as error:
            raise _port_in_use("peer-listen", self._config.peer_listen, error) from error
        await clients.start()
        try:
            async with self._monitored():
                yield
        finally:
            await self._peers.stop()
            await clients.stop(STOP_GRACE_S, signals.hurried)

    @contextlib.asynccontextmanager
    async def _monitored(self) -> AsyncIterator[None]:
        """Serve probes and metrics if that is configured; else their packages are not loaded."""
        address = self._config.http_listen
        if address is None:
            yield
            return
        from streammeta.controller.monitoring.monitoring import Monitoring
        from streammeta.controller.monitoring.parts import Parts

        config = self._config
        parts = Parts(
            phase=lambda: self._phase,
            driver=self._driver,
            controller=self._controller,
            peers=self._peers,
            tls=self._tls,
            memory=self._memory,
            request_memory=self._request_memory,
            audit=self._auditing.writer,
            backup=self._backup,
            deletion=self._deletion,
            requests=self._requests,
            journal=self._journal,
            data_dir=config.data_dir,
            transport=self._transport,
            store=self._store,
            sessions=self._sessions,
            heartbeats=self._heartbeats,
            metadata_limits=_metadata_limits(config),
            cluster_id=config.cluster_id,
            bucket=self._bucket,
            view=self._view,
            # Names and tags of streams are not for every caller that reaches a port in plain text.
            shows_status=config.shows_pages,
        )
        monitoring = Monitoring(parts, http_authenticator(self._config, self._policy))
        try:
            await monitoring.start(address)
        except OSError as error:
            raise _port_in_use("http-listen", address, error) from error
        try:
            yield
        finally:
            await monitoring.stop()

    @contextlib.asynccontextmanager
    async def _lifecycle_running(self) -> AsyncIterator[Sequence[asyncio.Task[None]]]:
        files = (self._reloading, self._policy, self._token_keys)
        watching = (part for part in files if part is not None)
        parts = (*self._lifecycle, *watching, self._memory, self._uncalled)
        tasks = [asyncio.create_task(part.run()) for part in parts]
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _handlers(self) -> list[grpc.GenericRpcHandler]:
        unary = {
            name: routed(route, self._controller)
            for name, route in routes(self._config.cluster_id, self._view).items()
        }
        nodes = contract.NodeHandlers(self._heartbeats, self._controller.gate)
        unary |= {f"streammeta.v1.NodeService.{name}": call for name, call in nodes.unary().items()}
        memory, rates, guard = self._request_memory, Rates(), MemoryGuard(self._memory)
        pipeline = CommitPipeline(self._controller, memory=memory, rates=rates, guard=guard)
        pipelines = {"CommitPipeline": pipeline.handle}
        features = FeatureUpdates(self._driver, self._controller, self._peers.versions)
        admin = contract.AdminHandlers(
            self._config, self._driver, self._controller, self._bucket, features
        )
        spool = SnapshotSpool(self._config.data_dir)
        spool.remove_left_over()
        metadata = contract.MetadataHandlers(self._controller, spool, self._bucket.claim_soon)
        quorum = QuorumServicer(
            *(self._driver, self._config.cluster_id, features, self._policy),
            self._auditing.head,
        )
        entrance = CallPipeline(
            *(self._authenticator, self._auditing.auditor, memory, rates, guard),
            connections=self._uncalled,
            tally=self._requests,
        )
        handlers = [
            *(
                contract.service_handler(
                    service,
                    entrance,
                    {
                        method.name: unary[method.full_name]
                        for method in service.methods
                        if method.full_name in unary
                    },
                    pipelines=pipelines if service.name == "ObjectService" else {},
                )
                for service in MAP_SERVICES
            ),
            contract.service_handler(SERVICES["QuorumService"], entrance, quorum.unary()),
            contract.service_handler(SERVICES["AdminService"], entrance, admin.unary()),
            contract.service_handler(SERVICES["MetadataService"], entrance, {}, metadata.streams()),
            contract.health_handler(self._health, entrance),
        ]
        if self._config.reflection:
            handlers.append(contract.reflection_handler(entrance))
        return handlers

    def _announce_leadership(self, leads: bool) -> None:
        task = asyncio.get_running_loop().create_task(self._set_health("leader", serving=leads))
        self._health_tasks.add(task)
        task.add_done_callback(self._health_tasks.discard)

    async def _set_health(self, service: str, *, serving: bool) -> None:
        states = health_pb2.HealthCheckResponse
        await self._health.set(service, states.SERVING if serving else states.NOT_SERVING)


def _memory_limit(config: ControllerConfig) -> int:
    return default_limit() if config.memory_limit_mb is None else config.memory_limit_mb << 20


def _port_in_use(option: str, address: str, error: Exception) -> PortInUseError:
    return PortInUseError(
        f"{option}: can't listen on {address}: {error}. "
        f"Is another process using the port? Choose another with --{option}"
    )


def _identity(config: ControllerConfig) -> Identity:
    software = Software(metadata.version(DISTRIBUTION), SUPPORTED)
    return Identity(
        config.cluster_id,
        config.node_id,
        config.advertise,
        software,
        config.token_endpoint or "",
    )


def _peer_addresses(config: ControllerConfig) -> PeerAddresses:
    own = Endpoints(config.peer_advertise, config.advertise, config.token_endpoint)
    return PeerAddresses(config.node_id, own, config.seeds, config.peer_overrides)


def _quorum_config(config: ControllerConfig, journal: Journal) -> QuorumConfig:
    return QuorumConfig(
        cluster_id=config.cluster_id,
        local=ReplicaKey(config.node_id, journal.identity.directory_id),
        endpoint=config.peer_advertise,
        client_endpoint=config.advertise,
        bootstrap_voters=journal.identity.bootstrap_voters,
        seeds=tuple(sorted(set(config.seeds) - {config.node_id})),
        timings=QuorumTimings(
            election_timeout_ms=config.election_timeout_ms,
            fetch_timeout_ms=config.fetch_timeout_ms,
        ),
    )


def _new_controller(
    config: ControllerConfig, clock: SystemClock, object_ids: ObjectIdGate, early: EarlyReading
) -> MetadataController:
    limits, lease = _metadata_limits(config), MarkerLease(lease_clock_ms)
    return MetadataController(ClusterMetadata(), clock, object_ids, early.read, limits, lease)


def _metadata_limits(config: ControllerConfig) -> MetadataLimits:
    return MetadataLimits(**{quota: getattr(config, f"max_{quota}") for quota in QUOTAS})


def _checkpoint_limits(config: ControllerConfig) -> CheckpointLimits:
    return CheckpointLimits(
        log_bytes=config.snapshot_log_bytes, interval_ms=config.snapshot_interval_ms
    )
