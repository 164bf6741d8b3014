"""Segment of a backup: committed batches as bytes, and its manifest.

A segment is the concatenation of the batches' journal frames. The frames' log id is the cluster's
UUID and their flushed end is 0, so equal batches are equal bytes on every controller. Pure.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from streammeta.controller.backup.errors import BackupDamagedError
from streammeta.controller.journal.segment import batch_codec, decode_batch, encode_body
from streammeta.controller.quorum.messages import Batch, BatchKind
from streammeta.controller.runtime.persistence.state_hashes import RollingHash
from streammeta.storage.cluster_files.backup_files import Folder, SegmentManifest
from streammeta.storage.segmented_log import FRAME_HEADER_SIZE, BadFrameError, FrameCodec


@dataclass(frozen=True, slots=True)
class Position:
    """An offset of the log, and the rolling hash of the entries below it."""

    end_offset: int
    log_hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """Attributes of a new file: its folder, the leader's times and level, the version."""

    folder: Folder
    first_ms: int
    last_ms: int
    feature_level: int
    writer_version: str


def advance_position(position: Position, batches: Sequence[Batch]) -> Position:
    """Return the position after batches that begin at `position`."""
    rolling = RollingHash(position.log_hash)
    for batch in batches:
        # Control batches are not applied to the metadata and not part of its log hash.
        if batch.kind is BatchKind.DATA:
            for index, payload in enumerate(batch.payloads):
                rolling.extend(batch.base_offset + index, payload)
        # Nothing is undone here, and the former values would pile up.
        rolling.forget_undo(batch.end_offset)
    return Position(batches[-1].end_offset if batches else position.end_offset, rolling.value)


def new_segment(
    batches: Sequence[Batch], before: Position, writing: Writing
) -> tuple[bytes, SegmentManifest]:
    """Return a segment of at least one batch that begins at `before`, and its manifest."""
    after = advance_position(before, batches)
    # Equal batches are equal bytes, so two leaders' uploads of one range do not conflict.
    data = encode(batches, writing.folder.cluster_uuid)
    manifest = SegmentManifest(
        cluster_id=writing.folder.cluster_id,
        cluster_uuid=writing.folder.cluster_uuid,
        start_offset=before.end_offset,
        end_offset=after.end_offset,
        first_epoch=batches[0].epoch,
        last_epoch=batches[-1].epoch,
        first_ms=writing.first_ms,
        last_ms=writing.last_ms,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        log_hash_before=before.log_hash.hex(),
        log_hash=after.log_hash.hex(),
        feature_level=writing.feature_level,
        writer_version=writing.writer_version,
    )

    return data, manifest


def encode(batches: Sequence[Batch], cluster_uuid: str) -> bytes:
    """Return the bytes of a segment."""
    codec = _codec(cluster_uuid)
    return b"".join(
        codec.encode(
            encode_body(batch.payloads),
            base_offset=batch.base_offset,
            epoch=batch.epoch,
            flushed_end=0,
            kind=batch.kind,
            count=len(batch.payloads),
        )
        for batch in batches
    )


def decode(data: bytes, manifest: SegmentManifest) -> tuple[Batch, ...]:
    """Return the batches of a segment, verified against its manifest.

    Raises:
        BackupDamagedError: the bytes or the batches differ from the manifest.
    """
    digest = hashlib.sha256(data).hexdigest()
    if (len(data), digest) != (manifest.size, manifest.sha256):
        raise _damaged(
            manifest,
            f"has {len(data)} bytes with SHA-256 {digest}, but its manifest says {manifest.size} "
            f"with {manifest.sha256}",
        )

    batches = []
    end, epoch = manifest.start_offset, manifest.first_epoch
    for batch in _batches(data, manifest):
        # A batch may be intact by itself and still be in the wrong place.
        if batch.base_offset != end or batch.epoch < epoch:
            raise _damaged(
                manifest,
                f"a batch at {batch.base_offset} of epoch {batch.epoch} follows one that ends at "
                f"{end} of epoch {epoch}",
            )
        batches.append(batch)
        end, epoch = batch.end_offset, batch.epoch

    if (end, epoch) != (manifest.end_offset, manifest.last_epoch):
        raise _damaged(
            manifest,
            f"ends at {end} in epoch {epoch}, but its manifest at {manifest.end_offset} in epoch "
            f"{manifest.last_epoch}",
        )

    before = Position(manifest.start_offset, bytes.fromhex(manifest.log_hash_before))
    if advance_position(before, batches).log_hash.hex() != manifest.log_hash:
        raise _damaged(manifest, "the log hash of its entries differs from its manifest")

    return tuple(batches)


def _batches(data: bytes, manifest: SegmentManifest) -> Iterator[Batch]:
    codec, at = _codec(manifest.cluster_uuid), 0
    while at < len(data):
        try:
            header = codec.decode_header(data[at : at + FRAME_HEADER_SIZE])
            body = data[at + FRAME_HEADER_SIZE : at + header.size]
            header.check_body(body)
        except BadFrameError as error:
            raise _damaged(manifest, f"the batch at byte {at}: {error}") from None
        yield decode_batch(header, body)
        at += header.size


def _codec(cluster_uuid: str) -> FrameCodec:
    return batch_codec(uuid.UUID(cluster_uuid).bytes)


def _damaged(manifest: SegmentManifest, problem: str) -> BackupDamagedError:
    return BackupDamagedError(manifest.name, problem)
