"""Opening of the parts of a node: its session, write-ahead log, writer and failovers."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

from streammeta.client.api.client_config import StreamClientConfig
from streammeta.client.config import UploadObserver, WriterConfig
from streammeta.client.controllers.bucket_check import BucketCheck
from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.controllers.methods import GET_NODES
from streammeta.client.errors import LogMissingError
from streammeta.client.nodes.node_epochs import register
from streammeta.client.nodes.session import BrokerSession, Tags
from streammeta.client.wal.bucket.config import WAL_CONFIG
from streammeta.client.wal.bucket.failover import FailoverWorker
from streammeta.client.wal.bucket.log import ObjectLog
from streammeta.client.wal.disk.config import LogIdentity
from streammeta.client.wal.disk.log import WriteAheadLog, find_log_id
from streammeta.client.writing.shared_writer import SharedWriter
from streammeta.client.writing.writer import StreamWriter
from streammeta.storage.cluster_files.wal_config import DISK_LOG, NO_LOG
from streammeta.storage.object_store.protocol.base import ObjectStore
from streammeta.v1 import nodes_pb2

# Comparison of the write-ahead log that a node registered with the log of its next process.
#
# A process without its node's log, e.g. because a volume is not mounted, would overwrite offsets
# that only that log contains. It is rejected while the node has open streams.

_UNKNOWN = ""


async def require_registered_log(client: ControllerClient, node_id: int, wal_config: str) -> None:
    """Check that a process with the log `wal_config` may continue the streams of its node.

    Raises `LogMissingError` if the node registered another log and has open streams or pending
    uploads.
    """
    request = nodes_pb2.GetNodesRequest(node_ids=[node_id])
    for node in (await client.call(GET_NODES, request)).nodes:
        may_hold_records = node.has_opening_streams or node.pending_upload_count > 0
        # A node registers a disk log without an id before the log is created.
        is_new = node.wal_config == DISK_LOG and wal_config.startswith(DISK_LOG)
        known = is_new or node.wal_config in (_UNKNOWN, NO_LOG, wal_config)
        if may_hold_records and not known:
            raise LogMissingError(node_id, node.wal_config, wal_config)


@dataclass(frozen=True, slots=True)
class NodeParts:
    """Parts that only a client with a node has."""

    session: BrokerSession | None = None
    log: WriteAheadLog | ObjectLog | None = None
    writer: StreamWriter | None = None
    shared_writer: SharedWriter | None = None
    failovers: FailoverWorker | None = None

    @property
    def epochs(self) -> dict[int, int]:
        """The epochs of the streams that an earlier process left open."""
        inherited = () if self.session is None else self.session.inherited
        return {stream.stream_id: stream.epoch for stream in inherited}


async def open_node(
    controllers: ControllerClient,
    store: ObjectStore,
    process: tuple[int, int | None, Tags | None],
    config: StreamClientConfig,
    observer: UploadObserver | None,
    closing: AsyncExitStack,
) -> NodeParts:
    """Register a process, a node id with an epoch and tags, and open its parts."""
    session = await _open_session(controllers, *process, config)
    log = await _open_log(session, store, config, closing)
    # A new log gets its id when it is opened, after the registration.
    if config.wal_directory is not None:
        await session.register_log(await _find_registered_log(config), process[2])
    writer = await _open_writer(session, store, log, config, observer, closing)
    # It is closed before the writer, whose heartbeats keep the session.
    shared_writer = SharedWriter(session, store, config.writer, observer)
    await closing.enter_async_context(shared_writer)
    failovers = FailoverWorker(session, store, writer.heartbeat)
    await closing.enter_async_context(failovers)
    return NodeParts(session, log, writer, shared_writer, failovers)


async def _open_writer(
    session: BrokerSession,
    store: ObjectStore,
    log: WriteAheadLog | ObjectLog | None,
    config: StreamClientConfig,
    observer: UploadObserver | None,
    closing: AsyncExitStack,
) -> StreamWriter:
    limits = config.writer or WriterConfig(durability="object" if log is None else "wal")
    writer = StreamWriter(session, store, limits, observer, log)
    await closing.enter_async_context(writer)
    writer.attach(session.inherited)
    return writer


async def _open_session(
    controllers: ControllerClient,
    node_id: int,
    node_epoch: int | None,
    tags: Tags | None,
    config: StreamClientConfig,
) -> BrokerSession:
    """Register the process, unless the node has registered a log that is not found here."""
    wal_config = await _find_registered_log(config)
    if not config.allow_missing_log:
        await require_registered_log(controllers, node_id, wal_config)
    timeout_s = config.session_timeout_s
    return await register(
        controllers, node_id, node_epoch, wal_config=wal_config, tags=tags, timeout_s=timeout_s
    )


async def _find_registered_log(config: StreamClientConfig) -> str:
    """Return the registered value of the process's log. A log not created yet has no id."""
    if config.object_log is not None:
        return WAL_CONFIG
    if config.wal_directory is None:
        return NO_LOG
    # Without opening the log: the registration comes first, and may be rejected.
    log_id = await asyncio.to_thread(find_log_id, config.wal_directory)
    return DISK_LOG + (log_id or b"").hex()


async def _open_log(
    session: BrokerSession,
    store: ObjectStore,
    config: StreamClientConfig,
    closing: AsyncExitStack,
) -> WriteAheadLog | ObjectLog | None:
    identity = LogIdentity(session.namespace, session.node.node_id, session.node.node_epoch)
    if config.object_log is not None:
        await BucketCheck(session.client, store, session.namespace).require()
        in_bucket = await ObjectLog.open(store, identity, config.object_log)
        return await closing.enter_async_context(in_bucket)
    if config.wal_directory is None:
        return None
    log = await WriteAheadLog.open(config.wal_directory, identity, config.wal)
    return await closing.enter_async_context(log)
