"""Comparison of the write-ahead log that a node registered with the log of its next process.

A process without its node's log, e.g. because a volume is not mounted, would overwrite offsets that
only that log contains. It is rejected while the node has open streams.
"""

from __future__ import annotations

from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.controllers.methods import GET_NODES
from streammeta.client.errors import LogMissingError
from streammeta.storage.cluster_files.wal_config import DISK_LOG, NO_LOG
from streammeta.v1 import nodes_pb2

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
