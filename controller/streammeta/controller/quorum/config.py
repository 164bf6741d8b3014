"""Configuration of a replica (voters, timings, limits) and the state that survives a crash.

Times are milliseconds of a monotonic clock. Nothing here reads a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from streammeta.controller.ids import ClusterId, Epoch, NodeId
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumTimings:
    """Waits, in milliseconds. Each election timeout is drawn from [T, 2T)."""

    election_timeout_ms: int = 1000
    fetch_timeout_ms: int = 2000
    """A voter without a successful Fetch for this long asks for pre-votes."""
    fetch_max_wait_ms: int = 500
    request_timeout_ms: int = 2000
    retry_backoff_ms: int = 20
    failover_stagger_ms: int = 30
    """Interval between the campaigns of voters that saw the connection to the leader break."""
    catch_up_rounds: int = 10
    """A new voter must catch up with the leader's end at the start of a round within an election
    timeout. After this many slower rounds it is rejected."""
    high_watermark_linger_ms: int = 10
    """Maximum wait of a new high watermark for batches to travel with."""

    def __post_init__(self) -> None:
        for name in ("election_timeout_ms", "fetch_timeout_ms", "request_timeout_ms"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}, must be at least 1")
        for name, harm in (
            # A Fetch waits this long when there is nothing to send, so it must end earlier.
            ("request_timeout_ms", "every long poll times out"),
            ("fetch_timeout_ms", "an idle leader is deposed"),
        ):
            if self.fetch_max_wait_ms >= getattr(self, name):
                raise ValueError(
                    f"fetch_max_wait_ms: {self.fetch_max_wait_ms}, must be below "
                    f"{name} ({getattr(self, name)}), or {harm}"
                )

    @property
    def heartbeat_ms(self) -> int:
        """Return the interval at which a leader announces itself to voters that don't fetch."""
        return max(1, self.fetch_timeout_ms // 2)

    @property
    def check_quorum_ms(self) -> int:
        """Return how long a leader keeps leading without Fetches from a majority."""
        return self.fetch_timeout_ms * 3 // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumLimits:
    """Sizes, in bytes unless stated otherwise."""

    max_batch_bytes: int = 8 << 20
    max_fetch_bytes: int = 8 << 20
    """At least one whole batch is always sent, even if larger."""
    max_uncommitted_bytes: int = 64 << 20
    """Appended and not yet committed bytes. Beyond this limit appends are rejected."""
    tail_bytes: int = 32 << 20
    """Memory for the newest batches, which most Fetches read. Older batches are read from disk."""
    max_delayed_fetches: int = 64
    """Maximum number of delayed Fetches. Further ones are answered immediately."""
    max_pending_reads: int = 16_384
    """Maximum number of reads that wait for a majority's echo. Further ones are rejected."""
    snapshot_chunk_bytes: int = 1 << 20
    """Snapshot bytes in one request."""
    snapshots_kept: int = 2
    """The log reaches back to the oldest of these, so that slow followers need no snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumConfig:
    """Identity and environment of a replica.

    `bootstrap_voters` vote until the log or a snapshot names others. They are empty for a replica
    that joins a cluster. A replica without a vote asks `seeds` for the leader. Peers reach this
    replica at `endpoint`, clients at `client_endpoint`, which is None without clients.
    """

    cluster_id: ClusterId
    local: ReplicaKey
    endpoint: str
    client_endpoint: str | None = None
    bootstrap_voters: VoterSet
    seeds: tuple[NodeId, ...] = ()
    timings: QuorumTimings = field(default_factory=QuorumTimings)
    limits: QuorumLimits = field(default_factory=QuorumLimits)

    @property
    def voter(self) -> Voter:
        """Return this replica as the current voters should name it."""
        return Voter(self.local, self.endpoint, self.client_endpoint)


PRIMORDIAL_EPOCH = Epoch(0)
"""Epoch before the first election. It never has a leader or a batch."""


@dataclass(frozen=True, slots=True)
class QuorumState:
    """State besides the log that must survive a crash (KIP-595's quorum-state file).

    Both the leader and the vote are kept. With pre-votes a voter can stop following a leader within
    one epoch, and must not vote a second time then.
    """

    epoch: Epoch = PRIMORDIAL_EPOCH
    vote: ReplicaKey | None = None
    leader_id: NodeId | None = None
