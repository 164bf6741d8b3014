"""The section of a checkpoint that names the voters.

A checkpoint outlives the log below it, so it carries the voters as of its end. A file without the
section, as older versions wrote, names no voter; one without the column `client_endpoint`, which is
left out while none is known, names the voters' other addresses alone.
"""

from typing import Any

import numpy as np

from streammeta.controller.ids import DirectoryId, NodeId
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from streammeta.controller.snapshot.checkpoint_file import CheckpointError, CheckpointReader

VOTERS_SECTION = "voters"

VOTERS_COLUMNS = ("node_id", "directory_id", "endpoint", "client_endpoint")


def voters_section(voters: VoterSet) -> dict[str, Any]:
    """Return the columns of the section; what is not known of a voter is an empty text."""
    columns: dict[str, Any] = {
        "node_id": np.array([voter.key.node_id for voter in voters], dtype=np.int64),
        "directory_id": [voter.key.directory_id or "" for voter in voters],
        "endpoint": [voter.endpoint for voter in voters],
    }
    if any(voter.client_endpoint for voter in voters):
        columns["client_endpoint"] = [voter.client_endpoint or "" for voter in voters]
    return columns


def section_voters(reader: CheckpointReader) -> VoterSet:
    """Return the voters as of the checkpoint's end.

    Raises:
        CheckpointError: the section is damaged, or names a node twice.
    """
    if VOTERS_SECTION not in reader.entries:
        return VoterSet()
    columns = reader.columns(VOTERS_SECTION)
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
