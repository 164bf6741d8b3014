"""What is remembered of damage until it is mended: `damage.json`.

The file is durable before anything damaged is put aside. It holds what this replica had promised,
so that it neither votes nor acknowledges as if it still had it, however often it restarts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from streammeta.controller.ids import EndOffset, Epoch
from streammeta.controller.journal.errors import JournalDamagedError, WrongDirectoryError
from streammeta.controller.journal.sealed_json import read_sealed_json, replace_sealed_json
from streammeta.controller.quorum.log_view import LostPromise
from streammeta.storage.durable_files import FileSystem

DAMAGE_NAME = "damage.json"
_VERSION = 1
_MOST_FINDINGS = 100


@dataclass(frozen=True, slots=True)
class Finding:
    """One damaged place: file name, byte in it, end offset of the good log before it."""

    file: str
    byte: int
    offset: EndOffset
    what: str


@dataclass(frozen=True, slots=True)
class DamageRecord:
    """What was promised, and where the log was found damaged."""

    lost: LostPromise
    findings: tuple[Finding, ...]


def read_damage(files: FileSystem, directory: Path) -> DamageRecord | None:
    """Return the record, None if nothing is damaged.

    Raises:
        JournalDamagedError: the record itself is not what was written.
        WrongDirectoryError: a newer release wrote it.
    """
    path = directory / DAMAGE_NAME
    if DAMAGE_NAME not in files.names(directory):
        return None
    fields = read_sealed_json(files, path)
    if fields.get("version") != _VERSION:
        raise WrongDirectoryError(
            f"{path} has version {fields.get('version')}, this release reads {_VERSION}; "
            "use the release that wrote it"
        )
    try:
        lost = LostPromise(
            EndOffset(int(fields["promised_end_offset"])), Epoch(int(fields["epoch"]))
        )
        findings = tuple(Finding(**item) for item in fields["findings"])
    except (KeyError, ValueError, TypeError) as error:
        raise JournalDamagedError(path, 0, f"field missing or malformed ({error})") from None
    return DamageRecord(lost, findings)


def note_damage(
    files: FileSystem,
    directory: Path,
    earlier: DamageRecord | None,
    finding: Finding,
    lost: LostPromise,
) -> DamageRecord:
    """Add to the record, durably; the highest of all promises counts."""
    findings: tuple[Finding, ...] = (finding,)
    if earlier is not None:
        lost = LostPromise(
            max(lost.end_offset, earlier.lost.end_offset), max(lost.epoch, earlier.lost.epoch)
        )
        findings = (*(item for item in earlier.findings if item != finding), finding)
    record = DamageRecord(lost, findings[-_MOST_FINDINGS:])
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
    """Forget, durably, that there was any damage."""
    if DAMAGE_NAME in files.names(directory):
        files.remove(directory / DAMAGE_NAME)
        files.sync_directory(directory)
