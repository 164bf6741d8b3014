"""A reading of the quorum for operators: who leads, how far each replica is."""

from __future__ import annotations

from dataclasses import dataclass

from streammeta.controller.ids import EndOffset, Epoch, NodeId
from streammeta.controller.quorum.config import QuorumConfig
from streammeta.controller.quorum.core import QuorumCore
from streammeta.controller.quorum.messages import SnapshotId
from streammeta.controller.quorum.roles import Leader
from streammeta.controller.quorum.voters import ReplicaKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDescription:
    """One replica as its leader sees it; None for what is not known."""

    key: ReplicaKey
    endpoint: str
    end_offset: EndOffset | None
    last_fetch_age_ms: int | None
    """Milliseconds since its last Fetch; 0 for the leader itself."""
    last_caught_up_age_ms: int | None
    """Milliseconds since it had everything the leader had; 0 for the leader itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumDescription:
    """The quorum as this node sees it; only the leader knows the other replicas' progress."""

    node_id: NodeId
    role: str
    leader_id: NodeId | None
    epoch: Epoch
    high_watermark: EndOffset
    end_offset: EndOffset
    flushed_end: EndOffset
    log_start_offset: EndOffset
    snapshot_id: SnapshotId | None
    """The newest snapshot on this node's disk."""
    is_repairing: bool
    """Whether damage took what this node had acknowledged; it does not vote until that is back."""
    is_disk_full: bool
    is_transferring: bool
    """Whether this node leads and is handing leadership over."""
    voters: tuple[ReplicaDescription, ...]
    """Those in force: the newest in the log, committed or not."""
    observers: tuple[ReplicaDescription, ...]


def describe_quorum(
    core: QuorumCore, config: QuorumConfig, now_ms: int, *, is_disk_full: bool
) -> QuorumDescription:
    """Describe the quorum as `core` sees it at `now_ms`."""
    described = {
        voter.key: _describe(core, config.local, voter.key, voter.endpoint, now_ms)
        for voter in core.voters
    }
    others = core.role.progress if isinstance(core.role, Leader) else {}
    observers = tuple(
        _describe(core, config.local, key, "", now_ms) for key in others if key not in described
    )
    return QuorumDescription(
        node_id=config.local.node_id,
        role=type(core.role).__name__.lower(),
        leader_id=core.leader_id,
        epoch=core.epoch,
        high_watermark=core.high_watermark,
        end_offset=core.log.end_offset,
        flushed_end=core.log.flushed_end,
        log_start_offset=core.log.start_offset,
        snapshot_id=core.newest_snapshot,
        is_repairing=core.is_repairing,
        is_disk_full=is_disk_full,
        is_transferring=core.is_transferring,
        voters=tuple(described.values()),
        observers=observers,
    )


def _describe(
    core: QuorumCore, local: ReplicaKey, key: ReplicaKey, endpoint: str, now_ms: int
) -> ReplicaDescription:
    end_offset, fetched, caught_up = None, None, None
    progress = core.role.progress.get(key) if isinstance(core.role, Leader) else None
    # A voter that is named without a disk is not the disk that replaced it.
    if key == local or (core.is_voter and key == ReplicaKey(local.node_id)):
        key, end_offset = local, core.log.end_offset
        if isinstance(core.role, Leader):
            fetched = caught_up = 0
    elif progress is not None and progress.has_fetched:
        end_offset = progress.end_offset
        fetched = now_ms - progress.last_fetch
        if progress.caught_up_at is not None:
            caught_up = now_ms - progress.caught_up_at
    return ReplicaDescription(
        key=key,
        endpoint=endpoint,
        end_offset=end_offset,
        last_fetch_age_ms=fetched,
        last_caught_up_age_ms=caught_up,
    )
