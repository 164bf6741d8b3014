"""Small files next to the log: quorum-state, damage record, flushed mark, and sealed JSON.

A sealed JSON file is one JSON object on one line, replaced as a whole. Its `checksum` is the
CRC-32C of the object without it, written with sorted keys and no spaces.

The flushed mark distinguishes damage from a torn tail. It is written after each flush of the log,
but not flushed itself. A cut of the log is announced there, durably, before it begins, so that the
next start finishes a cut interrupted by a crash.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import google_crc32c

from streammeta.controller.ids import NONE_ID, DirectoryId, EndOffset, Epoch, NodeId
from streammeta.controller.journal.errors import JournalDamagedError, WrongDirectoryError
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.log_view import LostEntries
from streammeta.controller.quorum.voters import ReplicaKey
from streammeta.storage.durable_files import DiskFullError, File, FileSystem, replace_file
from streammeta.storage.parsing import parse_json
from streammeta.storage.segmented_log import SlotFile

STATE_NAME = "quorum-state"
MARK_NAME = "flushed-mark"
DAMAGE_NAME = "damage.json"

Fields = dict[str, Any]

_VERSION = 1
_MAX_FINDINGS = 100
_MARK_LAYOUT = struct.Struct(">QQ?")  # sequence, end offset, whether the log is being cut there
# The slots are in different blocks, so that a torn write damages only one.
_MARK_SLOTS = (0, 4096)


def replace_sealed_json(files: FileSystem, path: Path, fields: Fields) -> None:
    """Replace `path` durably and atomically: a crash leaves the old contents or the new ones.

    Raises DiskFullError with the old contents in place.
    """
    sealed = {**fields, "checksum": _checksum(fields)}
    replace_file(files, path, [json.dumps(sealed, sort_keys=True).encode() + b"\n"])


def read_sealed_json(files: FileSystem, path: Path, version: int) -> Fields:
    """Read a file of the given `version` written by `replace_sealed_json`.

    Raises:
        FileNotFoundError: the file does not exist.
        JournalDamagedError: it is not JSON, or its checksum does not match.
        WrongDirectoryError: another release wrote it.
    """
    file = files.open(path)
    try:
        data = file.read(0, file.size())
    finally:
        file.close()

    try:
        fields = dict(parse_json(data))
        checksum = fields.pop("checksum")
    except (ValueError, KeyError, TypeError) as error:
        raise JournalDamagedError(path, 0, f"not a JSON object with a checksum ({error})") from None
    if checksum != _checksum(fields):
        raise JournalDamagedError(
            path, 0, f"checksum {checksum} does not match its contents ({_checksum(fields)})"
        )

    if fields.get("version") != version:
        raise WrongDirectoryError(
            f"{path} has version {fields.get('version')}, this release reads {version}: "
            "use the release that wrote it"
        )
    return fields


def _checksum(fields: Fields) -> int:
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    return int(google_crc32c.value(canonical))


@contextlib.contextmanager
def malformed_fields(path: Path) -> Iterator[None]:
    """Turn errors of reading fields into a JournalDamagedError."""
    try:
        yield
    except (KeyError, ValueError, TypeError) as error:
        raise JournalDamagedError(path, 0, f"field missing or malformed ({error})") from None


def write_quorum_state(files: FileSystem, path: Path, state: QuorumState) -> None:
    """Replace the quorum-state file (epoch, vote and leader, see KIP-595), durably."""
    vote = state.vote
    fields = {
        "version": _VERSION,
        "epoch": state.epoch,
        "leader_id": NONE_ID if state.leader_id is None else state.leader_id,
        "voted_id": NONE_ID if vote is None else vote.node_id,
        "voted_directory_id": (vote.directory_id if vote else None) or "",
    }
    replace_sealed_json(files, path, fields)


def read_quorum_state(files: FileSystem, path: Path) -> QuorumState:
    """Read the quorum-state. A missing file is damage, because formatting writes it.

    Raises:
        JournalDamagedError: it is missing or damaged.
        WrongDirectoryError: another release wrote it.
    """
    try:
        fields = read_sealed_json(files, path, _VERSION)
    except FileNotFoundError:
        raise JournalDamagedError(path, 0, "the file and the vote in it are missing") from None
    with malformed_fields(path):
        leader, voted = int(fields["leader_id"]), int(fields["voted_id"])
        directory = str(fields["voted_directory_id"])
        epoch = Epoch(int(fields["epoch"]))

    vote = ReplicaKey(NodeId(voted), DirectoryId(directory) if directory else None)
    return QuorumState(
        epoch,
        None if voted == NONE_ID else vote,
        None if leader == NONE_ID else NodeId(leader),
    )


@dataclass(frozen=True, slots=True)
class Finding:
    """A damaged place: file name, byte in the file, end offset of the good log before it."""

    file: str
    byte: int
    offset: EndOffset
    what: str


@dataclass(frozen=True, slots=True)
class DamageRecord:
    """Promises this replica made before its log was damaged, and the places of the damage.

    It is durable before damaged files are put aside and until everything is repaired, so that the
    replica never votes or acknowledges as if it still had the lost batches, even after restarts.
    """

    lost: LostEntries
    findings: tuple[Finding, ...]


def read_damage(files: FileSystem, directory: Path) -> DamageRecord | None:
    """Return the record, or None if nothing is damaged.

    Raises:
        JournalDamagedError: the record itself is damaged.
        WrongDirectoryError: another release wrote it.
    """
    path = directory / DAMAGE_NAME
    if DAMAGE_NAME not in files.names(directory):
        return None
    fields = read_sealed_json(files, path, _VERSION)
    with malformed_fields(path):
        lost = LostEntries(
            EndOffset(int(fields["promised_end_offset"])), Epoch(int(fields["epoch"]))
        )
        return DamageRecord(lost, tuple(Finding(**item) for item in fields["findings"]))


def note_damage(
    files: FileSystem,
    directory: Path,
    earlier: DamageRecord | None,
    finding: Finding,
    lost: LostEntries,
) -> DamageRecord:
    """Add a finding to the record, durably. The highest of all promises counts."""
    findings: tuple[Finding, ...] = (finding,)
    if earlier is not None:
        lost = LostEntries(
            max(lost.end_offset, earlier.lost.end_offset), max(lost.epoch, earlier.lost.epoch)
        )
        findings = (*(item for item in earlier.findings if item != finding), finding)

    # A failing disk may add many findings, of which the newest suffice.
    record = DamageRecord(lost, findings[-_MAX_FINDINGS:])
    if record != earlier:
        fields = {
            "version": _VERSION,
            "promised_end_offset": record.lost.end_offset,
            "epoch": record.lost.epoch,
            "findings": [asdict(item) for item in record.findings],
        }
        replace_sealed_json(files, directory / DAMAGE_NAME, fields)
    return record


def clear_damage(files: FileSystem, directory: Path) -> None:
    """Remove the damage record, durably."""
    if DAMAGE_NAME in files.names(directory):
        files.remove(directory / DAMAGE_NAME)
        files.sync_directory(directory)


class FlushedMark:
    """End offset up to which the log was flushed. At worst it is too old."""

    def __init__(self, file: File, log_id: bytes) -> None:
        self._file = file
        self._slots = SlotFile(file, log_id, _MARK_LAYOUT, _MARK_SLOTS)
        self.end_offset = EndOffset(0)
        self.is_cutting = False

    @classmethod
    def create(cls, files: FileSystem, path: Path, log_id: bytes) -> None:
        """Write a new mark at 0, durably."""
        file = files.open(path, create=True)
        try:
            mark = cls(file, log_id)
            # Both slots, so that a torn write of one leaves the other.
            mark._write(EndOffset(0))
            mark._write(EndOffset(0))
            file.sync()
        finally:
            file.close()

    @classmethod
    def open(cls, files: FileSystem, path: Path, log_id: bytes) -> FlushedMark:
        """Open the mark. Raises JournalDamagedError if neither slot is whole."""
        try:
            file = files.open(path)
        except FileNotFoundError:
            raise JournalDamagedError(path, 0, "the file is missing") from None
        mark = cls(file, log_id)
        values = mark._slots.read()
        if values is None:
            file.close()
            raise JournalDamagedError(path, 0, "neither of its two slots has a valid checksum")
        mark.end_offset, mark.is_cutting = values
        return mark

    def advance(self, end_offset: EndOffset) -> None:
        """Record that the log is flushed up to here. On a full disk the mark stays older."""
        with contextlib.suppress(DiskFullError):
            # An old mark only weakens the detection of damage. It never makes good data bad.
            self._write(end_offset)

    def lower(self, end_offset: EndOffset) -> None:
        """Lower the mark, durably. Raises DiskFullError with nothing changed."""
        if end_offset < self.end_offset:
            self._write(end_offset)
            self._file.sync()

    def begin_cut(self, end_offset: EndOffset) -> None:
        """Announce, durably, that a log flushed past `end_offset` is cut there."""
        self._write(end_offset, is_cutting=True)
        self._file.sync()

    def end_cut(self) -> None:
        """Record, durably, that the cut is complete. Does nothing without one."""
        if self.is_cutting:
            self._write(self.end_offset)
            self._file.sync()

    def sync(self) -> None:
        """Make the present mark durable."""
        self._file.sync()

    def close(self) -> None:
        """Make the mark durable and release the file."""
        self._file.sync()
        self._file.close()

    def _write(self, end_offset: EndOffset, *, is_cutting: bool = False) -> None:
        self._slots.write(end_offset, is_cutting)
        self.end_offset = end_offset
        self.is_cutting = is_cutting
