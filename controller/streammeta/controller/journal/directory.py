"""Identity of a data directory: formatted once, checked before anything in it is touched.

Names in a controller's directory: `meta.json`, `quorum-state`, `flushed-mark`, `damage.json`,
`reserve`, `.lock`, `<20 digits>.log` and `<20 digits>-<10 digits>.checkpoint`, possibly with the
suffix `.tmp`, `.part` or `.damaged`, temporarily `snapshot-<process>-<number>.spool`, and after a
recovery `recovery-<number>.json` and the directory `recovery-<number>`. Other files are never
touched.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from streammeta.controller.ids import ClusterId, DirectoryId, Epoch, NodeId, SnapshotId
from streammeta.controller.journal import errors, state_files
from streammeta.controller.journal.reserve import RESERVE_NAME
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.voters import VoterSet
from streammeta.storage import durable_files

META_NAME = "meta.json"
LOCK_NAME = ".lock"
_EVIDENCE_NAME = re.compile(r"recovery-[0-9]+\.json")

_META_VERSION = 2
_LEFT_BY_UNFINISHED_FORMAT = {
    LOCK_NAME,
    state_files.STATE_NAME,
    state_files.MARK_NAME,
    RESERVE_NAME,
    f"{META_NAME}.tmp",
    f"{state_files.STATE_NAME}.tmp",
}
# ext4 creates it at the root of a file system.
_LEFT_BY_FILE_SYSTEMS = {"lost+found"}


@dataclass(frozen=True, slots=True)
class DirectoryIdentity:
    """The node and cluster that a directory belongs to. `log_id` is part of every checksum.

    `bootstrap_voters` vote until the log names others, empty for a node that joins a cluster.
    """

    cluster_id: ClusterId
    node_id: NodeId
    directory_id: DirectoryId
    log_id: bytes
    bootstrap_voters: VoterSet = field(default_factory=VoterSet)


@dataclass(frozen=True, slots=True)
class FirstCheckpoint:
    """Checkpoint file that a new cluster begins with, the same on each controller."""

    snapshot_id: SnapshotId
    data: bytes


def format_directory(
    path: Path,
    *,
    cluster_id: ClusterId,
    node_id: NodeId,
    bootstrap_voters: VoterSet | None = None,
    directory_id: DirectoryId | None = None,
    first_checkpoint: FirstCheckpoint | None = None,
    files: durable_files.FileSystem | None = None,
) -> DirectoryIdentity:
    """Prepare an empty directory for one node, once.

    The identity file is written last, so an interrupted format can be repeated. Without
    `bootstrap_voters` the node joins an existing cluster. `directory_id` is random unless given
    here or among the voters. With `first_checkpoint` the log begins at its end.

    Raises:
        WrongDirectoryError: the directory is not empty, or the node is not among the voters.
        DirectoryLockedError: another process uses it.
        DiskFullError: the disk is full. Formatting can be repeated.
    """
    files = files or durable_files.PosixFileSystem()
    voters = bootstrap_voters or VoterSet()
    check_empty(path, files)
    named_id = _directory_id_among(voters, node_id)
    if named_id and directory_id and named_id != directory_id:
        raise errors.WrongDirectoryError(
            f"directory id {directory_id} was requested, but the voters name {named_id} for node "
            f"{node_id}: use one of them"
        )

    identity = DirectoryIdentity(
        cluster_id,
        node_id,
        directory_id or named_id or DirectoryId(str(uuid.uuid4())),
        uuid.uuid4().bytes,
        voters,
    )

    files.make_directory(path)
    lock = lock_directory(files, path)
    try:
        # Again, because another process may have formatted it before the lock was taken.
        check_empty(path, files)
        if first_checkpoint is not None:
            name = first_checkpoint.snapshot_id.file_name
            durable_files.replace_file(files, path / name, [first_checkpoint.data])
        epoch = Epoch(0) if first_checkpoint is None else first_checkpoint.snapshot_id.epoch
        state = QuorumState(epoch=epoch)
        state_files.write_quorum_state(files, path / state_files.STATE_NAME, state)
        state_files.FlushedMark.create(files, path / state_files.MARK_NAME, identity.log_id)
        # The identity comes last, because it marks a complete format.
        state_files.replace_sealed_json(files, path / META_NAME, _to_fields(identity))
    finally:
        lock.release()
    return identity


def evidence_name(generation: int) -> str:
    """Return the name of the file that describes a recovery from the loss of a majority."""
    return f"recovery-{generation}.json"


def is_evidence(name: str) -> bool:
    """Return whether a file describes a recovery."""
    return _EVIDENCE_NAME.fullmatch(name) is not None


def lock_directory(files: durable_files.FileSystem, path: Path) -> durable_files.Lock:
    """Claim a directory. Raises DirectoryLockedError."""
    try:
        return files.lock(path / LOCK_NAME)
    except durable_files.DirectoryInUseError as error:
        raise errors.DirectoryLockedError(str(error)) from None


def check_empty(path: Path, files: durable_files.FileSystem) -> None:
    """Raise WrongDirectoryError unless a directory may be formatted."""
    names = set(files.names(path)) - _LEFT_BY_FILE_SYSTEMS
    if META_NAME in names:
        raise errors.WrongDirectoryError(f"{path} is already formatted: use it as it is")
    if foreign := sorted(names - _LEFT_BY_UNFINISHED_FORMAT):
        raise errors.WrongDirectoryError(
            f"{path} is not empty ({', '.join(foreign[:5])}): a controller needs its own "
            "directory, use an empty one"
        )
    if (
        state_files.STATE_NAME in names
        and state_files.read_quorum_state(files, path / state_files.STATE_NAME) != QuorumState()
    ):
        # An interrupted format leaves no votes, so this node was in use and lost its identity.
        raise errors.WrongDirectoryError(
            f"{path} has no {META_NAME}, but a {state_files.STATE_NAME} with votes, which must not "
            "be forgotten: restore the file, or replace the voter with an empty directory"
        )


def _directory_id_among(voters: VoterSet, node_id: NodeId) -> DirectoryId | None:
    if not voters:
        return None
    voter = voters.find(node_id)
    if voter is None:
        known = ", ".join(str(item.key.node_id) for item in voters)
        raise errors.WrongDirectoryError(
            f"node {node_id} is not among the voters ({known}): name it there, or format it as a "
            "node that joins"
        )
    return voter.key.directory_id


def read_identity(path: Path, files: durable_files.FileSystem) -> DirectoryIdentity:
    """Return the identity of a directory, changing nothing.

    Raises:
        DirectoryNotFormattedError: it is empty, missing, or its formatting was interrupted.
        WrongDirectoryError: it has files and is not a controller's.
        JournalDamagedError: the identity file is damaged.
    """
    names = set(files.names(path)) - _LEFT_BY_FILE_SYSTEMS
    if META_NAME not in names:
        if any(map(is_evidence, names)):
            raise errors.WrongDirectoryError(
                f"{path} has no {META_NAME}: its recovery was interrupted, repeat "
                "`streammeta recover apply` with the same plan"
            )
        if foreign := sorted(names - _LEFT_BY_UNFINISHED_FORMAT):
            raise errors.WrongDirectoryError(
                f"{path} contains {', '.join(foreign[:5])} but no {META_NAME}: it is not a "
                "controller's data directory, use an empty one or the right one"
            )
        raise errors.DirectoryNotFormattedError(
            f"{path} is not formatted: format it for this node and cluster first with "
            "streammeta storage format"
        )

    fields = state_files.read_sealed_json(files, path / META_NAME, _META_VERSION)
    with state_files.malformed_fields(path / META_NAME):
        return DirectoryIdentity(
            ClusterId(str(fields["cluster_id"])),
            NodeId(int(str(fields["node_id"]))),
            DirectoryId(str(fields["directory_id"])),
            bytes.fromhex(str(fields["log_id"])),
            VoterSet.from_fields(fields["bootstrap_voters"]),
        )


def check_identity(
    identity: DirectoryIdentity,
    path: Path,
    cluster_id: ClusterId,
    node_id: NodeId,
    directory_id: DirectoryId | None = None,
) -> None:
    """Raise WrongDirectoryError unless the directory belongs to this node and cluster.

    A `directory_id` of None accepts any.
    """
    # A vote in another cluster's directory would count there as well.
    if identity.cluster_id != cluster_id:
        raise errors.WrongDirectoryError(
            f"{path} belongs to cluster {identity.cluster_id!r}, this controller to "
            f"{cluster_id!r}: use its own directory or correct its cluster id"
        )
    if identity.node_id != node_id:
        raise errors.WrongDirectoryError(
            f"{path} belongs to node {identity.node_id}, this controller is node {node_id}: "
            "use its own directory or correct its node id"
        )
    if directory_id is not None and identity.directory_id != directory_id:
        raise errors.WrongDirectoryError(
            f"{path} has directory id {identity.directory_id}, but {directory_id} is expected: "
            "use the directory with that id"
        )


def _to_fields(identity: DirectoryIdentity) -> state_files.Fields:
    return {
        "version": _META_VERSION,
        "cluster_id": identity.cluster_id,
        "node_id": identity.node_id,
        "directory_id": identity.directory_id,
        "log_id": identity.log_id.hex(),
        "bootstrap_voters": identity.bootstrap_voters.to_fields(),
    }
