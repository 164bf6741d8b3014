"""The section of a checkpoint that says who votes.

A checkpoint outlives the log below it, so it carries the voters as of its end. A file without the
section, as older versions wrote, names nobody.
"""

from typing import Any

import numpy as np

from streammeta.controller.ids import DirectoryId, NodeId
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from streammeta.controller.snapshot.checkpoint_file import CheckpointError, CheckpointReader

VOTERS_SECTION = "voters"


def voters_section(voters: VoterSet) -> dict[str, Any]:
    """Return the columns of the section; a directory id that is not known is an empty text."""
    return {
        "node_id": np.array([voter.key.node_id for voter in voters], dtype=np.int64),
        "directory_id": [voter.key.directory_id or "" for voter in voters],
        "endpoint": [voter.endpoint for voter in voters],
    }


def section_voters(reader: CheckpointReader) -> VoterSet:
    """Return who votes as of the checkpoint's end.

    Raises:
        CheckpointError: the section is damaged, or names a node twice.
    """
    if VOTERS_SECTION not in reader.entries:
        return VoterSet()
    columns = reader.columns(VOTERS_SECTION)
    rows = zip(columns["node_id"], columns["directory_id"], columns["endpoint"], strict=True)
    try:
        return VoterSet(
            tuple(
                Voter(ReplicaKey(NodeId(int(node_id)), DirectoryId(disk) if disk else None), place)
                for node_id, disk, place in rows
            )
        )
    except ValueError as error:
        raise CheckpointError(f"section {VOTERS_SECTION!r}: {error}") from error
