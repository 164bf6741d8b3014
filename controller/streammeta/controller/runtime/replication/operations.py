"""Operator requests to a leader: voter changes, leadership transfer, quorum description."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from streammeta.controller.ids import EndOffset, Epoch, NodeId, SnapshotId
from streammeta.controller.quorum import events
from streammeta.controller.quorum.config import QuorumConfig
from streammeta.controller.quorum.core import QuorumCore
from streammeta.controller.quorum.messages import QuorumError
from streammeta.controller.quorum.roles import Follower, Leader
from streammeta.controller.quorum.voters import ReplicaKey, Voter
from streammeta.controller.runtime.interfaces import Endpoints
from streammeta.controller.runtime.quorum_errors import TransferRefusedError, VoterChangeError
from streammeta.controller.runtime.replication.waiters import WaiterMap

_TRANSFER = 0
"""Key of the only transfer that may run at a time."""


class Operations:
    """Passes requests to the core through `feed`, and outcomes to the waiting callers."""

    def __init__(self, feed: Callable[[events.Event], None]) -> None:
        self._feed = feed
        self._changes: WaiterMap[int, EndOffset] = WaiterMap()
        self._transfers: WaiterMap[int, None] = WaiterMap()
        self._last_change = 0

    async def change_voters(self, change: Voter | ReplicaKey, timeout_ms: int) -> EndOffset:
        """Add or remove a voter. Returns the end offset of the committed change.

        Raises:
            VoterChangeError: it was rejected, or did not finish in time and still may.
        """
        self._last_change += 1
        change_id = self._last_change
        # Before the event, because the core may answer within `feed`.
        future = self._changes.expect(change_id)
        self._feed(events.VoterChangeRequested(change_id, change))
        try:
            return await asyncio.wait_for(future, timeout_ms / 1000)
        except TimeoutError:
            raise VoterChangeError(
                QuorumError.REQUEST_TIMED_OUT,
                f"not committed within {timeout_ms} ms, and it still may be: check the voters",
            ) from None
        finally:
            # A late outcome finds no caller and is dropped.
            self._changes.forget(change_id, future)

    async def transfer(self, to: NodeId | None, timeout_ms: int) -> None:
        """Transfer leadership, and return when this node's leadership has ended.

        Raises:
            TransferRefusedError: leadership stays, or did not end in time.
        """
        # Two successors would compete, and each could end the term of the other.
        if self._transfers:
            raise TransferRefusedError(
                "a leadership transfer is already in progress: wait for its end"
            )
        future = self._transfers.expect(_TRANSFER)
        self._feed(events.TransferRequested(to))
        try:
            await asyncio.wait_for(future, timeout_ms / 1000)
        except TimeoutError:
            raise TransferRefusedError(
                f"leadership was not transferred within {timeout_ms} ms, and it still may be"
            ) from None
        finally:
            self._transfers.forget(_TRANSFER, future)

    def complete(
        self, effect: events.VoterChangeDone | events.VoterChangeRejected | events.TransferRejected
    ) -> None:
        """Complete the waiting call with its outcome."""
        match effect:
            case events.VoterChangeDone(change_id=change_id, end_offset=end_offset):
                self._changes.answer(change_id, end_offset)
            case events.VoterChangeRejected(change_id=change_id, error=error, reason=reason):
                self._changes.fail(change_id, VoterChangeError(error, reason))
            case events.TransferRejected(reason=reason):
                self._transfers.fail(_TRANSFER, TransferRefusedError(reason))

    def leadership_ended(self) -> None:
        """Complete a waiting transfer, because leadership has ended."""
        self._transfers.answer(_TRANSFER, None)

    def close(self, error: Exception) -> None:
        """Fail all waiting calls."""
        self._changes.fail_all(error)
        self._transfers.fail_all(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDescription:
    """One replica as its leader sees it, None for unknown values."""

    key: ReplicaKey
    endpoint: str
    """Where clients reach it, empty if unknown."""
    peer_endpoint: str
    """Where the other controllers reach it, empty if unknown."""
    end_offset: EndOffset | None
    last_fetch_age_ms: int | None
    """Milliseconds since its last Fetch, 0 for the leader itself."""
    last_caught_up_age_ms: int | None
    """Milliseconds since it was caught up with the leader, 0 for the leader itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumDescription:
    """The quorum as this node sees it. Only the leader knows the other replicas' progress."""

    node_id: NodeId
    role: str
    leader_id: NodeId | None
    """The leader of the epoch as far as this node knows. It may have ended."""
    has_leader: bool
    """Whether this node leads, or a leader has answered it and is not known to have ended."""
    epoch: Epoch
    high_watermark: EndOffset
    end_offset: EndOffset
    flushed_end: EndOffset
    log_start_offset: EndOffset
    snapshot_id: SnapshotId | None
    """The newest snapshot on this node's disk."""
    is_repairing: bool
    """Whether damage removed acknowledged entries. The node does not vote until they are
    restored."""
    is_disk_full: bool
    is_transferring: bool
    """Whether this node leads and is transferring leadership."""
    voters: tuple[ReplicaDescription, ...]
    """The current voters: the newest in the log, committed or not."""
    observers: tuple[ReplicaDescription, ...]


def describe_quorum(
    core: QuorumCore,
    config: QuorumConfig,
    now_ms: int,
    *,
    is_disk_full: bool,
    endpoints: Callable[[NodeId], Endpoints],
) -> QuorumDescription:
    """Describe the quorum as `core` sees it at `now_ms`.

    `endpoints` returns observers' addresses.
    """
    described = {voter.key: _describe(core, config.local, voter, now_ms) for voter in core.voters}
    # Only a leader hears of observers, by their fetches.
    others = core.role.progress if isinstance(core.role, Leader) else {}
    observers = tuple(
        _describe(core, config.local, _as_voter(key, endpoints(key.node_id)), now_ms)
        for key in others
        if key not in described
    )

    return QuorumDescription(
        node_id=config.local.node_id,
        role=type(core.role).__name__.lower(),
        leader_id=core.leader_id,
        has_leader=_has_leader(core),
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


def _has_leader(core: QuorumCore) -> bool:
    match core.role:
        case Leader():
            return True
        case Follower() as follower:
            # A node that only voted does not know yet whether the candidate won.
            return follower.has_fetched and not follower.leader_ended
        case _:
            return False


def _as_voter(key: ReplicaKey, at: Endpoints) -> Voter:
    return Voter(key, at.peers or "", at.clients)


def _describe(
    core: QuorumCore, local: ReplicaKey, replica: Voter, now_ms: int
) -> ReplicaDescription:
    key, end_offset, fetched, caught_up = replica.key, None, None, None
    progress = core.role.progress.get(key) if isinstance(core.role, Leader) else None
    # A voter named without a disk means this replica only if its disk is the original one.
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
        endpoint=replica.client_endpoint or "",
        peer_endpoint=replica.endpoint,
        end_offset=end_offset,
        last_fetch_age_ms=fetched,
        last_caught_up_age_ms=caught_up,
    )


def voter_option(voter: Voter) -> str:
    """Return a voter in the format of `storage format --voters`."""
    disk = f"/{voter.key.directory_id}" if voter.key.directory_id else ""
    return f"{voter.key.node_id}@{voter.endpoint}{disk}"
