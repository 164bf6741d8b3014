"""Verification of a backup: all damage in it, and how far it can be restored.

The newest chain is replayed in memory. On request, the files of older points are read too. Changes
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from streammeta.controller.backup.chains import Chain, find_unreachable, newest_chain
from streammeta.controller.backup.errors import BackupDamagedError
from streammeta.controller.backup.replaying import BackupFiles, Replayed, load_checkpoint, replay
from streammeta.controller.backup.segments import decode
from streammeta.storage.cluster_files.backup_files import (
    CheckpointManifest,
    CheckpointName,
    FileName,
    Inventory,
    Manifest,
    SegmentManifest,
    SegmentName,
)


class DescribedFiles(BackupFiles, Protocol):
    """Files whose manifests can be read separately."""

    def segment_manifest(self, name: SegmentName) -> SegmentManifest:
        """Return a segment's manifest."""
        ...

    def checkpoint_manifest(self, name: CheckpointName) -> CheckpointManifest:
        """Return a checkpoint's manifest."""
        ...


@dataclass(frozen=True, slots=True)
class Verified:
    """Result: the newest chain and its metadata, None if it can't be restored, and the damage."""

    chain: Chain | None
    replayed: Replayed | None
    damages: tuple[BackupDamagedError, ...]


def verify(inventory: Inventory, files: DescribedFiles, *, is_all: bool = False) -> Verified:
    """Verify a backup: every file with `is_all`, else the files that the newest point needs."""
    chain = newest_chain(inventory)
    damages = list(_missing(inventory, chain))
    state_hashes = _state_hashes(inventory, files, chain, damages)
    replayed = None
    if chain is not None:
        try:
            replayed = replay(chain, files, state_hashes=state_hashes)
        except BackupDamagedError as error:
            damages.append(error)
    if is_all:
        damages += _other_damages(inventory, files, chain)
    return Verified(chain, replayed, tuple(damages))


def newest_file(inventory: Inventory, files: DescribedFiles) -> Manifest | None:
    """Return the manifest of the file that reaches furthest, None if there is no file.

    Raises:
        BackupDamagedError: it is damaged.
    """
    segment = max(inventory.segments, key=lambda name: name.end_offset, default=None)
    checkpoint = max(inventory.checkpoints, default=None)
    if checkpoint is None:
        return None if segment is None else files.segment_manifest(segment)
    if segment is None or segment.end_offset < checkpoint.end_offset:
        return files.checkpoint_manifest(checkpoint)
    return files.segment_manifest(segment)


def _missing(inventory: Inventory, chain: Chain | None) -> Iterator[BackupDamagedError]:
    """Yield the gap that keeps the newest chain from reaching the newest segment."""
    end = 0 if chain is None else chain.end_offset
    # Older unreachable files do not limit the newest point.
    unreached = [name for name in find_unreachable(inventory) if name.end_offset > end]
    if unreached:
        first = unreached[0]
        yield BackupDamagedError(
            first, f"offsets from {end} to {first.start_offset} before it are missing", end
        )


def _state_hashes(
    inventory: Inventory,
    files: DescribedFiles,
    chain: Chain | None,
    damages: list[BackupDamagedError],
) -> dict[int, str]:
    """Return the digest of the metadata at each checkpoint on a chain's way."""
    found: dict[int, str] = {}
    if chain is None:
        return found
    for name in inventory.checkpoints:
        if chain.start_offset < name.end_offset <= chain.end_offset:
            try:
                found[name.end_offset] = files.checkpoint_manifest(name).state_hash
            except BackupDamagedError as error:
                damages.append(error)
    return found


def _other_damages(
    inventory: Inventory, files: DescribedFiles, chain: Chain | None
) -> Iterator[BackupDamagedError]:
    """Yield the damage of files that the newest chain does not need."""
    needed: tuple[object, ...] = () if chain is None else (chain.base, *chain.segments)
    checked = frozenset(needed)
    for name in inventory.files:
        if name in checked:
            continue
        try:
            _check(name, files)
        except BackupDamagedError as error:
            yield error
    yield from _contradictions(inventory, files)


def _check(name: FileName, files: DescribedFiles) -> None:
    if isinstance(name, SegmentName):
        decode(*files.segment(name))
    else:
        load_checkpoint(name, files)


def _contradictions(inventory: Inventory, files: DescribedFiles) -> Iterator[BackupDamagedError]:
    """Yield the files whose log hash at an offset differs from an earlier file's."""
    claimed: dict[int, str] = {}
    for name in inventory.files:
        try:
            claims = _claims(name, files)
        except BackupDamagedError:
            continue  # already reported
        # The first file to name a hash for an offset is the reference for later ones.
        wrong = [offset for offset, value in claims if claimed.setdefault(offset, value) != value]
        if wrong:
            yield BackupDamagedError(
                name, f"disagrees with another file about the log below {wrong[0]}"
            )


def _claims(name: FileName, files: DescribedFiles) -> tuple[tuple[int, str], ...]:
    if isinstance(name, CheckpointName):
        return ((name.end_offset, files.checkpoint_manifest(name).log_hash),)
    manifest = files.segment_manifest(name)
    return (
        (name.start_offset, manifest.log_hash_before),
        (name.end_offset, manifest.log_hash),
    )
