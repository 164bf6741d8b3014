"""The section of a checkpoint with the voters.

A checkpoint outlives the log below it, so it contains the voters at its end. Files of older
versions do not have the section, and therefore no voters. The column `client_endpoint` is omitted
while no such address is known.
"""

from typing import Any

import numpy as np

from streammeta.controller.ids import DirectoryId, NodeId
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from streammeta.controller.snapshot.checkpoint_file import CheckpointError, CheckpointReader

VOTERS_SECTION = "voters"

VOTERS_COLUMNS = ("node_id", "directory_id", "endpoint", "client_endpoint")


def voters_section(voters: VoterSet) -> dict[str, Any]:
    """Return the columns of the section. Unknown values are empty texts."""
    columns: dict[str, Any] = {
        "node_id": np.array([voter.key.node_id for voter in voters], dtype=np.int64),
        "directory_id": [voter.key.directory_id or "" for voter in voters],
        "endpoint": [voter.endpoint for voter in voters],
    }
    # Older versions reject a column that they do not know.
    if any(voter.client_endpoint for voter in voters):
        columns["client_endpoint"] = [voter.client_endpoint or "" for voter in voters]
    return columns


def section_voters(reader: CheckpointReader) -> VoterSet:
    """Return the voters at the checkpoint's end.

    Raises:
        CheckpointError: the section is damaged, or contains a node twice.
    """
    if VOTERS_SECTION not in reader.entries:
        return VoterSet()
    columns = reader.columns(VOTERS_SECTION)
    # Columns that are absent in the file read as empty texts.
    count = len(columns["node_id"])
    rows = zip(*(columns.get(name, [""] * count) for name in VOTERS_COLUMNS), strict=True)
    try:
        return VoterSet(
            tuple(
                Voter(
                    ReplicaKey(NodeId(int(node_id)), DirectoryId(disk) if disk else None),
                    peers,
                    clients or None,
                )
                for node_id, disk, peers, clients in rows
            )
        )
    except ValueError as error:
        raise CheckpointError(f"section {VOTERS_SECTION!r}: {error}") from error
