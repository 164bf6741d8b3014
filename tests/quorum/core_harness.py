"""One core under the test's hand: time, messages and writes happen only when the test says so."""

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from streammeta.controller.ids import ClusterId, EndOffset, Epoch, NodeId, SnapshotId
from streammeta.controller.quorum import events, messages
from streammeta.controller.quorum.config import QuorumConfig, QuorumState, QuorumTimings
from streammeta.controller.quorum.core import QuorumCore
from streammeta.controller.quorum.log_view import EpochStart, LogStart
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet

CLUSTER = ClusterId("c")
E = TypeVar("E")
ME = NodeId(0)


def batch(base: int, epoch: int, *payloads: bytes) -> messages.Batch:
    return messages.Batch(
        EndOffset(base), Epoch(epoch), messages.BatchKind.DATA, payloads or (b"x",)
    )


def log_of(batches: Iterable[messages.Batch]) -> LogStart:
    """What recovery finds when the log is exactly these batches."""
    tail = tuple(batches)
    starts: list[EpochStart] = []
    for item in tail:
        if not starts or starts[-1].epoch != item.epoch:
            starts.append(EpochStart(item.epoch, item.base_offset))
    end = tail[-1].end_offset if tail else EndOffset(0)
    return LogStart(EndOffset(0), end, tuple(starts), tail)


def voter_set(*nodes: int) -> VoterSet:
    """Voters as a static configuration names them: without their disks."""
    return VoterSet(tuple(Voter(ReplicaKey(NodeId(i)), f"n{i}:1") for i in nodes))


class Lone:
    """Node 0 of `size` voters, unless `local` says otherwise; the test plays the others."""

    def __init__(
        self,
        size: int = 3,
        state: QuorumState | None = None,
        batches: Iterable[messages.Batch] = (),
        timings: QuorumTimings | None = None,
        local: ReplicaKey | None = None,
        log: LogStart | None = None,
        seeds: Iterable[int] = (),
        client_endpoint: str | None = None,
    ) -> None:
        self.local = local or ReplicaKey(ME)
        self.config = QuorumConfig(
            cluster_id=CLUSTER,
            local=self.local,
            endpoint=f"n{self.local.node_id}:1",
            client_endpoint=client_endpoint,
            bootstrap_voters=voter_set(*range(size)),
            seeds=tuple(map(NodeId, seeds)),
            timings=timings or QuorumTimings(),
        )
        self.now = 1000
        self.core = QuorumCore(
            self.config, state or QuorumState(), log or log_of(batches), random.Random(1)
        )
        self._last_write = 0
        self._answered = 0
        self.writes_states = True
        """Whether every quorum-state is durable at once; else by `flush`, as all other writes."""
        self.effects: list[events.Effect] = []
        self._note(self.core.start(self.now))

    # -- what happens to it

    def step(self, event: events.Event) -> list[events.Effect]:
        return self._note(self.core.step(self.now, event))

    def _note(self, effects: list[events.Effect]) -> list[events.Effect]:
        self.effects = []
        while effects:
            self.effects += effects
            tokens = [item.token for item in effects if isinstance(item, events.PersistQuorumState)]
            effects = []
            if tokens and self.writes_states:
                effects = self.core.step(self.now, events.StateDone(tokens[-1]))
        written = (getattr(item, "token", 0) for item in self.effects)
        self._last_write = max([self._last_write, *written])
        return self.effects

    def receive(self, message: messages.Message) -> list[events.Effect]:
        return self.step(events.Received(message))

    def pass_time(self, ms: int) -> list[events.Effect]:
        self.now += ms
        return self.step(events.Tick())

    def write(self, *payloads: bytes) -> None:
        """Append records as the leader, and flush them."""
        self.step(events.Append(payloads))
        self.flush()

    def flush(self) -> list[events.Effect]:
        """Complete every write so far; earlier effects stay to be seen unless new ones follow."""
        before = self.effects
        if self._last_write and not self.step(events.WriteDone(self._last_write)):
            self.effects = before
        return self.effects

    # -- what it did

    def sent(self, kind: type[E]) -> list[E]:
        return [
            effect.message
            for effect in self.effects
            if isinstance(effect, events.Send) and isinstance(effect.message, kind)
        ]

    def only(self, kind: type[E]) -> E:
        (message,) = self.sent(kind)
        return message

    def effects_of(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def batches(self) -> tuple[messages.Batch, ...]:
        """Return its log, all of which is in memory."""
        return self.core.log.read(EndOffset(0), max_bytes=1 << 20) or ()

    @property
    def role(self) -> str:
        return type(self.core.role).__name__

    # -- what the others say

    def header(
        self, sender: int | ReplicaKey, epoch: int, request_id: int = 1
    ) -> messages.RequestHeader:
        key = sender if isinstance(sender, ReplicaKey) else ReplicaKey(NodeId(sender))
        return messages.RequestHeader(
            cluster_id=CLUSTER,
            sender=key,
            receiver=self.local,
            epoch=Epoch(epoch),
            incarnation=key.node_id,
            request_id=request_id,
            is_founder=self.config.bootstrap_voters.contains(key),
        )

    def reply(
        self,
        request: messages.VoteRequest | messages.FetchRequest | messages.FetchSnapshotRequest,
        *,
        epoch: int | None = None,
        leader: int | None = None,
        error: messages.QuorumError = messages.QuorumError.NONE,
    ) -> messages.ResponseHeader:
        return messages.ResponseHeader(
            sender=request.header.receiver.node_id,
            receiver=self.local.node_id,
            epoch=request.header.epoch if epoch is None else Epoch(epoch),
            leader_id=None if leader is None else NodeId(leader),
            error=error,
            incarnation=request.header.incarnation,
            request_id=request.header.request_id,
        )

    def ask_vote(
        self,
        sender: int,
        epoch: int,
        last_epoch: int,
        end: int,
        *,
        pre_vote: bool = False,
        **header: Any,
    ) -> bool:
        """Ask for a vote, with fields of the header replaced; return whether it is granted."""
        self.receive(
            messages.VoteRequest(
                header=replace(self.header(sender, epoch), **header),
                pre_vote=pre_vote,
                last_epoch=Epoch(last_epoch),
                end_offset=EndOffset(end),
            )
        )
        return self.only(messages.VoteResponse).granted

    def grant(
        self, request: messages.VoteRequest, *, granted: bool = True, leader: int | None = None
    ) -> list[events.Effect]:
        header, pre_vote = self.reply(request, leader=leader), request.pre_vote
        return self.receive(
            messages.VoteResponse(header=header, pre_vote=pre_vote, granted=granted)
        )

    def begin(self, leader: int, epoch: int) -> list[events.Effect]:
        return self.receive(messages.BeginQuorumEpochRequest(header=self.header(leader, epoch)))

    def follow(self, leader: int, epoch: int) -> messages.FetchRequest:
        """Let it follow a leader; return its first Fetch."""
        self.begin(leader, epoch)
        return self.only(messages.FetchRequest)

    def end(self, leader: int, epoch: int, *successors: int) -> list[events.Effect]:
        keys = tuple(ReplicaKey(NodeId(node)) for node in successors)
        return self.receive(
            messages.EndQuorumEpochRequest(
                header=self.header(leader, epoch), preferred_successors=keys
            )
        )

    def fetch(
        self,
        sender: int | ReplicaKey,
        offset: int,
        last_epoch: int,
        *,
        epoch: int | None = None,
        hw: int = 0,
        read_round: int = 0,
        hears: bool = True,
        is_disk_full: bool = False,
        max_bytes: int = 1 << 20,
    ) -> list[events.Effect]:
        return self.receive(
            messages.FetchRequest(
                header=self.header(sender, self.core.epoch if epoch is None else epoch),
                fetch_offset=EndOffset(offset),
                last_epoch=Epoch(last_epoch),
                high_watermark=EndOffset(hw),
                read_round=read_round,
                max_wait_ms=500,
                max_bytes=max_bytes,
                answered_request_id=self._next_answered() if hears else 0,
                is_disk_full=is_disk_full,
            )
        )

    def fetch_each(self, offset: int, last_epoch: int, **more: Any) -> None:
        """Let nodes 1 and 2 fetch, one after the other."""
        for sender in (1, 2):
            self.fetch(sender, offset, last_epoch, **more)

    def _next_answered(self) -> int:
        """A request of the sender's that has been answered since its last Fetch."""
        self._answered += 1
        return self._answered

    def feed(
        self,
        request: messages.FetchRequest,
        *batches: messages.Batch,
        hw: int = 0,
        diverging: messages.EpochEnd | None = None,
        snapshot_id: SnapshotId | None = None,
        read_round: int = 0,
        **reply: Any,
    ) -> list[events.Effect]:
        """Answer its Fetch; `reply` as for the method of that name."""
        known = {"leader": self.core.leader_id, **reply}
        return self.receive(
            messages.FetchResponse(
                header=self.reply(request, **known),
                high_watermark=EndOffset(hw),
                log_start_offset=EndOffset(0),
                read_round=read_round,
                diverging=diverging,
                snapshot_id=snapshot_id,
                batches=batches,
            )
        )

    def update(self, voter: Voter) -> messages.QuorumError:
        """Have a voter of epoch 1 tell where it is, and with which disk; return the error."""
        header = self.header(voter.key, 1)
        self.receive(messages.UpdateVoterRequest(header=header, voter=voter))
        return self.only(messages.UpdateVoterResponse).header.error

    def become_leader(self) -> None:
        """Win an election with everything flushed."""
        self.pass_time(5000)
        for _ in range(2):  # the pre-vote, and the vote
            for request in self.sent(messages.VoteRequest)[: len(self.core.voters) // 2]:
                self.grant(request)
        assert self.role == "Leader"
        self.flush()


def elected(size: int = 3) -> Lone:
    """A leader that has flushed all of its log, and has committed nothing yet."""
    node = Lone(size=size)
    node.become_leader()
    return node
