"""Restoring: from a backup's metadata to the first checkpoint of a new cluster.

Numbers that brokers and readers remember must not decrease. Log offsets, epochs, and ids of
objects, streams and nodes therefore jump ahead, so that no earlier one is issued again or taken for
a new one. Object ids in the gap, and prepared ones, are undecided: the bucket may have objects
under them that the metadata does not know. The marker of a generation names them, see
`storage.bucket_marker`. So does the metadata, which begins in recovery mode, see
`metadata.recovery`. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from streammeta.controller.backup.errors import BackupError
from streammeta.controller.backup.replaying import Replayed
from streammeta.controller.features import SECTIONS
from streammeta.controller.ids import EndOffset, Epoch, SnapshotId
from streammeta.controller.metadata.registries.nodes import NODE_ID_MIN
from streammeta.controller.metadata.sections import frozen
from streammeta.controller.metadata.tables.values import INT32_MAX, ObjectState, column
from streammeta.controller.quorum.voters import VoterSet
from streammeta.controller.runtime.persistence.metadata_checkpoint import LOG_HASH_SECTION
from streammeta.controller.snapshot import checkpoint_file
from streammeta.controller.snapshot.checkpoint_file import Sink
from streammeta.controller.snapshot.voters import VOTERS_SECTION, voters_section

OFFSET_JUMP = 1 << 32
"""Log offsets that are skipped: more than any controller has issued since the backup."""

EPOCH_JUMP = 1_000
"""Quorum epochs that are skipped."""

OBJECT_ID_JUMP = 1 << 24
"""Object ids that are skipped above the highest that may have been issued."""

STREAM_ID_JUMP = 1 << 17
"""Stream ids that are skipped. Each of them takes some memory."""

NODE_ID_JUMP = 1 << 16
"""Broker ids that are skipped."""

HOLD_MS = 7 * 86_400_000
"""Time after a restore in which no object's bytes are deleted, in milliseconds."""

Section: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """Source and result of a restore. Equal plans produce equal clusters.

    `from_*` describe the backup: everything below `from_end_offset`, committed by
    `committed_by_ms`, is restored. `voters` are ID@HOST:PORT,.. of the new cluster. Its log begins
    at `end_offset`, after `epoch`. It issues object ids from `next_object_id` on. Ids in
    `[undecided_from, next_object_id)` that its metadata does not know are undecided. `generation`
    is the number of its marker in the bucket. Times are in ms since 1970.
    """

    from_cluster_id: str
    from_cluster_uuid: str
    from_end_offset: int
    committed_by_ms: int
    cluster_id: str
    cluster_uuid: str
    namespace: str
    voters: str
    end_offset: int
    epoch: int
    next_object_id: int
    undecided_from: int
    generation: int
    created_ms: int
    state_hash: str

    @property
    def snapshot_id(self) -> SnapshotId:
        """The first checkpoint of the new cluster."""
        return SnapshotId(EndOffset(self.end_offset), Epoch(self.epoch))


def jump_object_id(next_object_id: int, claimed_below: int) -> int:
    """Return the first object id of the new cluster, a multiple of the jump.

    `claimed_below` is the highest claim in the bucket: no id at or above it was ever issued.
    """
    highest = max(next_object_id, claimed_below)
    return -(-(highest + OBJECT_ID_JUMP) // OBJECT_ID_JUMP) * OBJECT_ID_JUMP


def first_undecided_id(view: frozen.FrozenMetadata, next_object_id: int) -> int:
    """Return the lowest id that is prepared, still undecided, or would have been issued next."""
    sections = view.sections()
    objects = sections["objects"]
    prepared = np.asarray(objects["object_id"])[
        np.asarray(objects["state"]) == ObjectState.PREPARED
    ]
    first = int(prepared.min()) if len(prepared) else next_object_id
    if "recovery" in sections:
        # An earlier restore may not have been finished, and its undecided ids stay undecided.
        first = min(first, int(sections["recovery"]["undecided_from"][0]))
    return first


def restore_sections(view: frozen.FrozenMetadata, plan: RestorePlan) -> Mapping[str, Any]:
    """Return the sections of the new cluster's metadata, each computed on access.

    Raises:
        BackupError: ids of streams or brokers would exceed their range.
    """
    return _Changed(
        view.sections(),
        {
            "counters": lambda section: _counters(section, view, plan),
            "objects": _without_prepared,
            "nodes": lambda section: _nodes(section, plan.created_ms),
            # Freed ids may have been issued again since the backup.
            "free_node_ids": lambda _: {"node_id": column()},
            "bucket_claim": lambda _: {
                "cluster_uuid": [plan.cluster_uuid],
                "issued_below": column([plan.next_object_id]),
            },
            "feature_level": lambda section: {
                "level": np.maximum(np.asarray(section["level"]), SECTIONS["recovery"])
            },
            "recovery": lambda _: frozen.recovery_section(plan.undecided_from, plan.next_object_id),
        },
    )


def state_hash(view: frozen.FrozenMetadata, plan: RestorePlan) -> str:
    """Return the digest of the new cluster's metadata, in hex."""
    return frozen.sections_digest(restore_sections(view, plan).items()).hex()


def write_checkpoint(sink: Sink, replayed: Replayed, plan: RestorePlan, voters: VoterSet) -> None:
    """Write the first checkpoint of the new cluster."""
    sections = {
        VOTERS_SECTION: voters_section(voters),
        LOG_HASH_SECTION: {"value": [replayed.position.log_hash.hex()]},
        **restore_sections(replayed.cluster_metadata.freeze(), plan),
    }
    checkpoint_file.write_checkpoint(sink, plan.snapshot_id, plan.cluster_id, sections)


def require_same(replayed: Replayed, plan: RestorePlan) -> None:
    """Require that a backup produces the plan's result.

    Raises:
        BackupError: it is another backup, or was written by another version.
    """
    found = (replayed.position.end_offset, state_hash(replayed.cluster_metadata.freeze(), plan))
    if found != (plan.from_end_offset, plan.state_hash):
        raise BackupError(
            f"the backup at offset {found[0]} produces metadata with hash {found[1]}, but the plan "
            f"says offset {plan.from_end_offset} and {plan.state_hash}: make a new plan"
        )


def _counters(section: Section, view: frozen.FrozenMetadata, plan: RestorePlan) -> Section:
    nodes = view.sections()["nodes"]["node_id"]
    # Nodes may have been registered under higher ids than the counter, which freed ids reduce.
    highest_node = max(NODE_ID_MIN, int(section["last_node_id"][0]), *map(int, nodes))
    next_stream_id = int(section["next_stream_id"][0]) + STREAM_ID_JUMP
    last_node_id = highest_node + NODE_ID_JUMP
    for name, value in (("stream", next_stream_id), ("broker", last_node_id)):
        if value > INT32_MAX:
            raise BackupError(f"the next {name} id would be {value}, above {INT32_MAX}")

    return {
        "next_stream_id": column([next_stream_id]),
        "next_object_id": column([plan.next_object_id]),
        "last_node_id": column([last_node_id]),
        "deletions_held_since_ms": column([0]),
        # A slow clock at the time of planning must not end the hold immediately.
        "deletions_held_until_ms": column([max(plan.created_ms, plan.committed_by_ms) + HOLD_MS]),
    }


def _without_prepared(section: Section) -> Section:
    # They may have been committed since. The brokers that prepared them register again.
    stays = np.asarray(section["state"]) != ObjectState.PREPARED
    return {name: np.asarray(values)[stays] for name, values in section.items()}


def _nodes(section: Section, now_ms: int) -> Section:
    # Fences every earlier process: node epochs are start times by convention.
    epochs = np.maximum(np.asarray(section["node_epoch"]) + 1, now_ms)
    return {**section, "node_epoch": epochs}


class _Changed(Mapping[str, Any]):
    """Sections of which some are replaced. New ones come last."""

    def __init__(
        self, sections: Mapping[str, Any], changes: Mapping[str, Callable[[Section], Section]]
    ) -> None:
        self._sections = sections
        self._changes = changes

    def __getitem__(self, name: str) -> Any:
        section = self._sections.get(name, {})
        return self._changes[name](section) if name in self._changes else section

    def __iter__(self) -> Iterator[str]:
        yield from self._sections
        yield from (name for name in self._changes if name not in self._sections)

    def __len__(self) -> int:
        return len(self._sections.keys() | self._changes.keys())
