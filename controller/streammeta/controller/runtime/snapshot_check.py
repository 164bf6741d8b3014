"""Joins the journal, which keeps snapshots, to the format they are written in."""

from __future__ import annotations

from typing import BinaryIO

from streammeta.controller.ids import ClusterId
from streammeta.controller.journal.errors import BadSnapshotError
from streammeta.controller.journal.snapshots import SnapshotCheck
from streammeta.controller.quorum.messages import SnapshotId
from streammeta.controller.quorum.voters import VoterSet
from streammeta.controller.snapshot.format import CheckpointError, CheckpointId
from streammeta.controller.snapshot.reader import CheckpointReader
from streammeta.controller.snapshot.voters import section_voters


def snapshot_check(cluster_id: ClusterId) -> SnapshotCheck:
    """Return the check that a journal of this cluster makes of every snapshot file."""

    def check(snapshot_id: SnapshotId, file: BinaryIO) -> VoterSet:
        try:
            return _checked_voters(file, snapshot_id, cluster_id)
        except CheckpointError as error:
            raise BadSnapshotError(str(error)) from error

    return check


def _checked_voters(file: BinaryIO, snapshot_id: SnapshotId, cluster_id: ClusterId) -> VoterSet:
    wanted = CheckpointId(snapshot_id.end_offset, snapshot_id.epoch)
    reader = CheckpointReader(file, wanted.file_name)
    if (reader.id, reader.cluster_id) != (wanted, cluster_id):
        raise CheckpointError(
            f"{wanted.file_name}: the file is checkpoint {reader.id.file_name} of cluster "
            f"{reader.cluster_id!r}, wanted is that of its name, of cluster {cluster_id!r}"
        )
    reader.verify()
    return section_voters(reader)
