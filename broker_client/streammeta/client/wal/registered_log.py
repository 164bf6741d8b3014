"""The write-ahead log that a node has registered, against the one that its next process brings.

A process that starts without the log of its node would write over offsets that only that log
holds, as when a volume is not mounted. It is refused as long as the node has streams open.
"""

from __future__ import annotations

from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.controllers.methods import GET_NODES
from streammeta.client.wal.disk.errors import LogMissingError
from streammeta.storage.cluster_files.wal_config import DISK_LOG, NO_LOG
from streammeta.v1 import nodes_pb2

_UNKNOWN = ""


async def require_registered_log(client: ControllerClient, node_id: int, wal_config: str) -> None:
    """Check that a process with the log `wal_config` may go on with the streams of its node.

    Raises `LogMissingError` if the node has streams open, or owes uploads, and registered another.
    """
    request = nodes_pb2.GetNodesRequest(node_ids=[node_id])
    for node in (await client.call(GET_NODES, request)).nodes:
        may_hold_records = node.has_opening_streams or node.pending_upload_count > 0
        is_new = node.wal_config == DISK_LOG and wal_config.startswith(DISK_LOG)
        known = is_new or node.wal_config in (_UNKNOWN, NO_LOG, wal_config)
        if may_hold_records and not known:
            raise LogMissingError(node_id, node.wal_config, wal_config)
