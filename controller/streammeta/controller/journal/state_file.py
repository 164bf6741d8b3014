"""The quorum-state file: epoch, vote and leader, as KIP-595 and KIP-996 ask them to be kept."""

from __future__ import annotations

from pathlib import Path

from streammeta.controller.ids import DirectoryId, Epoch, NodeId
from streammeta.controller.journal.errors import JournalDamagedError, WrongDirectoryError
from streammeta.controller.journal.sealed_json import read_sealed_json, replace_sealed_json
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.voters import ReplicaKey
from streammeta.storage.durable_files import FileSystem

_VERSION = 1
_NONE = -1


def write_quorum_state(files: FileSystem, path: Path, state: QuorumState) -> None:
    """Replace the file durably and atomically."""
    vote = state.vote
    fields = {
        "version": _VERSION,
        "epoch": state.epoch,
        "leader_id": _NONE if state.leader_id is None else state.leader_id,
        "voted_id": _NONE if vote is None else vote.node_id,
        "voted_directory_id": (vote.directory_id if vote else None) or "",
    }
    replace_sealed_json(files, path, fields)


def read_quorum_state(files: FileSystem, path: Path) -> QuorumState:
    """Read the file; a missing one is damage, for formatting has written it.

    Raises:
        JournalDamagedError: it is missing or not what was written.
        WrongDirectoryError: a newer release wrote it.
    """
    try:
        fields = read_sealed_json(files, path)
    except FileNotFoundError:
        raise JournalDamagedError(path, 0, "the file is missing, and with it the vote") from None
    if fields.get("version") != _VERSION:
        raise WrongDirectoryError(
            f"{path} has version {fields.get('version')}, this release reads {_VERSION}; "
            "use the release that wrote it"
        )
    try:
        leader, voted = int(fields["leader_id"]), int(fields["voted_id"])
        directory = str(fields["voted_directory_id"])
        epoch = Epoch(int(fields["epoch"]))
    except (KeyError, ValueError, TypeError) as error:
        raise JournalDamagedError(path, 0, f"field missing or malformed ({error})") from None
    vote = ReplicaKey(NodeId(voted), DirectoryId(directory) if directory else None)
    return QuorumState(
        epoch,
        None if voted == _NONE else vote,
        None if leader == _NONE else NodeId(leader),
    )
