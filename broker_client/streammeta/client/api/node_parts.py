"""Opening of the parts of a node: its session, its write-ahead log and its writer."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from streammeta.client.api.client_config import StreamClientConfig
from streammeta.client.config import UploadObserver, WriterConfig
from streammeta.client.controllers.bucket_check import BucketCheck
from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.nodes.node_epochs import register
from streammeta.client.nodes.session import BrokerSession, Tags
from streammeta.client.wal.bucket.config import WAL_CONFIG
from streammeta.client.wal.bucket.log import ObjectLog
from streammeta.client.wal.disk.config import LogIdentity
from streammeta.client.wal.disk.log import WriteAheadLog, find_log_id
from streammeta.client.wal.registered_log import require_registered_log
from streammeta.client.writing.writer import StreamWriter
from streammeta.storage.cluster_files.wal_config import DISK_LOG, NO_LOG
from streammeta.storage.object_store.protocol.base import ObjectStore


async def open_writer(
    session: BrokerSession,
    store: ObjectStore,
    log: WriteAheadLog | ObjectLog | None,
    config: StreamClientConfig,
    observer: UploadObserver | None,
    closing: AsyncExitStack,
) -> StreamWriter:
    """Open the writer of a session and attach its inherited streams."""
    limits = config.writer or WriterConfig(durability="object" if log is None else "wal")
    writer = StreamWriter(session, store, limits, observer, log)
    await closing.enter_async_context(writer)
    writer.attach(session.inherited)
    return writer


async def open_session(
    controllers: ControllerClient,
    node_id: int,
    node_epoch: int | None,
    tags: Tags | None,
    config: StreamClientConfig,
) -> BrokerSession:
    """Register the process, unless it lacks the log that its node has registered."""
    wal_config = await find_registered_log(config)
    if not config.allow_missing_log:
        await require_registered_log(controllers, node_id, wal_config)
    timeout_s = config.session_timeout_s
    return await register(
        controllers, node_id, node_epoch, wal_config=wal_config, tags=tags, timeout_s=timeout_s
    )


async def find_registered_log(config: StreamClientConfig) -> str:
    """Return the registered value of the process's log. A log not created yet has no id."""
    if config.object_log is not None:
        return WAL_CONFIG
    if config.wal_directory is None:
        return NO_LOG
    # Without opening the log: the registration comes first, and may be rejected.
    log_id = await asyncio.to_thread(find_log_id, config.wal_directory)
    return DISK_LOG + (log_id or b"").hex()


async def open_log(
    session: BrokerSession,
    store: ObjectStore,
    config: StreamClientConfig,
    closing: AsyncExitStack,
) -> WriteAheadLog | ObjectLog | None:
    """Open the configured write-ahead log, if any."""
    identity = LogIdentity(session.namespace, session.node.node_id, session.node.node_epoch)
    if config.object_log is not None:
        await BucketCheck(session.client, store, session.namespace).require()
        in_bucket = await ObjectLog.open(store, identity, config.object_log)
        return await closing.enter_async_context(in_bucket)
    if config.wal_directory is None:
        return None
    log = await WriteAheadLog.open(config.wal_directory, identity, config.wal)
    return await closing.enter_async_context(log)
