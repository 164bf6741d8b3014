"""Whose data directory this is: formatting it once, and checking it before anything is touched.

Names in a controller's directory: `meta.json`, `quorum-state`, `flushed-mark`, `.lock` and
`<20 digits>.log`, each perhaps with `.tmp`. Other names are not ours and are never touched.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

from controller.ids import ClusterId, DirectoryId, NodeId
from controller.journal.errors import (
    DirectoryNotFormattedError,
    JournalDamagedError,
    WrongDirectoryError,
)
from controller.journal.files import FileSystem, PosixFileSystem
from controller.journal.flushed_mark import FlushedMark
from controller.journal.sealed_json import read_sealed_json, replace_sealed_json
from controller.journal.state_file import write_quorum_state
from controller.quorum.config import QuorumState

META_NAME = "meta.json"
STATE_NAME = "quorum-state"
MARK_NAME = "flushed-mark"
LOCK_NAME = ".lock"

_META_VERSION = 1
_LEFT_BY_UNFINISHED_FORMAT = {
    LOCK_NAME,
    STATE_NAME,
    MARK_NAME,
    f"{META_NAME}.tmp",
    f"{STATE_NAME}.tmp",
}
_LEFT_BY_FILE_SYSTEMS = {"lost+found"}


@dataclass(frozen=True, slots=True)
class DirectoryIdentity:
    """Which node of which cluster a directory belongs to; `log_id` is part of every checksum."""

    cluster_id: ClusterId
    node_id: NodeId
    directory_id: DirectoryId
    log_id: bytes


def format_directory(
    path: Path,
    *,
    cluster_id: ClusterId,
    node_id: NodeId,
    directory_id: DirectoryId | None = None,
    files: FileSystem | None = None,
) -> DirectoryIdentity:
    """Make an empty directory ready for one node, once.

    The identity file is written last, so an interrupted format can be repeated. `directory_id` is
    drawn at random unless given.

    Raises:
        WrongDirectoryError: the directory holds anything already.
        DirectoryLockedError: another process uses it.
    """
    files = files or PosixFileSystem()
    names = set(files.names(path)) - _LEFT_BY_FILE_SYSTEMS
    if META_NAME in names:
        raise WrongDirectoryError(f"{path} is formatted already; it is used as it is")
    if foreign := sorted(names - _LEFT_BY_UNFINISHED_FORMAT):
        raise WrongDirectoryError(
            f"{path} is not empty ({', '.join(foreign[:5])}); a controller needs a directory of "
            "its own: give it an empty one"
        )
    identity = DirectoryIdentity(
        cluster_id, node_id, directory_id or DirectoryId(str(uuid.uuid4())), uuid.uuid4().bytes
    )
    files.make_directory(path)
    lock = files.lock(path / LOCK_NAME)
    try:
        write_quorum_state(files, path / STATE_NAME, QuorumState())
        FlushedMark.create(files, path / MARK_NAME, identity.log_id)
        replace_sealed_json(files, path / META_NAME, _to_fields(identity))
    finally:
        lock.release()
    return identity


def read_identity(path: Path, files: FileSystem) -> DirectoryIdentity:
    """Read whose directory this is; changes nothing.

    Raises:
        DirectoryNotFormattedError: it is empty, missing, or its formatting was interrupted.
        WrongDirectoryError: it holds files and is not a controller's.
        JournalDamagedError: the identity file is damaged.
    """
    names = set(files.names(path)) - _LEFT_BY_FILE_SYSTEMS
    if META_NAME not in names:
        if foreign := sorted(names - _LEFT_BY_UNFINISHED_FORMAT):
            raise WrongDirectoryError(
                f"{path} holds {', '.join(foreign[:5])} but no {META_NAME}: it is not a "
                "controller's data directory; give an empty one, or the right one"
            )
        raise DirectoryNotFormattedError(
            f"{path} is not formatted; format it for this node and cluster first"
        )
    return _from_fields(read_sealed_json(files, path / META_NAME), path / META_NAME)


def check_identity(
    identity: DirectoryIdentity, path: Path, cluster_id: ClusterId, node_id: NodeId
) -> None:
    """Raise WrongDirectoryError unless the directory belongs to this node and cluster."""
    if identity.cluster_id != cluster_id:
        raise WrongDirectoryError(
            f"{path} belongs to cluster {identity.cluster_id!r}, this controller to "
            f"{cluster_id!r}; give it its own directory or correct its cluster id"
        )
    if identity.node_id != node_id:
        raise WrongDirectoryError(
            f"{path} belongs to node {identity.node_id}, this controller is node {node_id}; "
            "give it its own directory or correct its node id"
        )


def _to_fields(identity: DirectoryIdentity) -> dict[str, object]:
    return {
        "version": _META_VERSION,
        "cluster_id": identity.cluster_id,
        "node_id": identity.node_id,
        "directory_id": identity.directory_id,
        "log_id": identity.log_id.hex(),
    }


def _from_fields(fields: dict[str, object], path: Path) -> DirectoryIdentity:
    if fields.get("version") != _META_VERSION:
        raise WrongDirectoryError(
            f"{path} has version {fields.get('version')}, this release reads {_META_VERSION}; "
            "use the release that wrote it"
        )
    try:
        return DirectoryIdentity(
            ClusterId(str(fields["cluster_id"])),
            NodeId(int(str(fields["node_id"]))),
            DirectoryId(str(fields["directory_id"])),
            bytes.fromhex(str(fields["log_id"])),
        )
    except (KeyError, ValueError) as error:
        raise JournalDamagedError(path, 0, f"field missing or malformed ({error})") from None
