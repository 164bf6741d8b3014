"""One core under the test's hand: time, messages and writes happen only when the test says so."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import TypeVar

from controller.ids import ClusterId, EndOffset, Epoch, NodeId
from controller.quorum.config import QuorumConfig, QuorumState, QuorumTimings
from controller.quorum.core import QuorumCore
from controller.quorum.events import (
    AppendLog,
    Effect,
    Event,
    PersistQuorumState,
    Received,
    Send,
    Tick,
    TruncateLog,
    WriteDone,
)
from controller.quorum.log_view import EpochStart, LogStart
from controller.quorum.messages import (
    Batch,
    BatchKind,
    BeginQuorumEpochRequest,
    EndQuorumEpochRequest,
    EpochEnd,
    FetchRequest,
    FetchResponse,
    Message,
    QuorumError,
    RequestHeader,
    ResponseHeader,
    VoteRequest,
    VoteResponse,
)
from controller.quorum.voters import ReplicaKey, Voter, VoterSet

CLUSTER = ClusterId("c")
E = TypeVar("E")
ME = NodeId(0)


def batch(base: int, epoch: int, *payloads: bytes) -> Batch:
    return Batch(EndOffset(base), Epoch(epoch), BatchKind.DATA, payloads or (b"x",))


def log_of(batches: Iterable[Batch]) -> LogStart:
    """What recovery finds when the log is exactly these batches."""
    tail = tuple(batches)
    starts: list[EpochStart] = []
    for item in tail:
        if not starts or starts[-1].epoch != item.epoch:
            starts.append(EpochStart(item.epoch, item.base_offset))
    end = tail[-1].end_offset if tail else EndOffset(0)
    return LogStart(EndOffset(0), end, tuple(starts), tail)


class Lone:
    """Node 0 of `size` voters; the test plays the others."""

    def __init__(
        self,
        size: int = 3,
        state: QuorumState | None = None,
        batches: Iterable[Batch] = (),
        timings: QuorumTimings | None = None,
    ) -> None:
        voters = VoterSet(tuple(Voter(ReplicaKey(NodeId(i)), f"n{i}:1") for i in range(size)))
        self.config = QuorumConfig(
            cluster_id=CLUSTER,
            local=ReplicaKey(ME),
            voters=voters,
            timings=timings or QuorumTimings(),
        )
        self.now = 1000
        self.core = QuorumCore(
            self.config, state or QuorumState(), log_of(batches), random.Random(1)
        )
        self.effects: list[Effect] = self.core.start(self.now)

    # -- what happens to it

    def step(self, event: Event) -> list[Effect]:
        self.effects = self.core.step(self.now, event)
        return self.effects

    def receive(self, message: Message) -> list[Effect]:
        return self.step(Received(message))

    def pass_time(self, ms: int) -> list[Effect]:
        self.now += ms
        return self.step(Tick())

    def flush(self) -> list[Effect]:
        """Complete every write of the last step."""
        tokens = [
            effect.token
            for effect in self.effects
            if isinstance(effect, PersistQuorumState | AppendLog | TruncateLog)
        ]
        return self.step(WriteDone(max(tokens))) if tokens else self.effects

    # -- what it did

    def sent(self, kind: type[E]) -> list[E]:
        return [
            effect.message
            for effect in self.effects
            if isinstance(effect, Send) and isinstance(effect.message, kind)
        ]

    def only(self, kind: type[E]) -> E:
        (message,) = self.sent(kind)
        return message

    def effects_of(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    @property
    def role(self) -> str:
        return type(self.core.role).__name__

    # -- what the others say

    def header(self, sender: int, epoch: int, request_id: int = 1) -> RequestHeader:
        return RequestHeader(
            cluster_id=CLUSTER,
            sender=ReplicaKey(NodeId(sender)),
            receiver=ReplicaKey(ME),
            epoch=Epoch(epoch),
            incarnation=sender,
            request_id=request_id,
        )

    def reply(
        self,
        request: VoteRequest | FetchRequest,
        *,
        epoch: int | None = None,
        leader: int | None = None,
        error: QuorumError = QuorumError.NONE,
    ) -> ResponseHeader:
        return ResponseHeader(
            sender=request.header.receiver.node_id,
            receiver=ME,
            epoch=request.header.epoch if epoch is None else Epoch(epoch),
            leader_id=None if leader is None else NodeId(leader),
            error=error,
            incarnation=request.header.incarnation,
            request_id=request.header.request_id,
        )

    def ask_vote(
        self, sender: int, epoch: int, last_epoch: int, end: int, *, pre_vote: bool = False
    ) -> bool:
        self.receive(
            VoteRequest(
                header=self.header(sender, epoch),
                pre_vote=pre_vote,
                last_epoch=Epoch(last_epoch),
                end_offset=EndOffset(end),
            )
        )
        return self.only(VoteResponse).granted

    def grant(self, request: VoteRequest) -> list[Effect]:
        return self.receive(
            VoteResponse(header=self.reply(request), pre_vote=request.pre_vote, granted=True)
        )

    def begin(self, leader: int, epoch: int) -> list[Effect]:
        return self.receive(BeginQuorumEpochRequest(header=self.header(leader, epoch)))

    def end(self, leader: int, epoch: int, *successors: int) -> list[Effect]:
        keys = tuple(ReplicaKey(NodeId(node)) for node in successors)
        return self.receive(
            EndQuorumEpochRequest(header=self.header(leader, epoch), preferred_successors=keys)
        )

    def fetch(
        self, sender: int, offset: int, last_epoch: int, *, hw: int = 0, read_round: int = 0
    ) -> list[Effect]:
        return self.receive(
            FetchRequest(
                header=self.header(sender, self.core.epoch),
                fetch_offset=EndOffset(offset),
                last_epoch=Epoch(last_epoch),
                high_watermark=EndOffset(hw),
                read_round=read_round,
                max_wait_ms=500,
                max_bytes=1 << 20,
            )
        )

    def feed(
        self,
        request: FetchRequest,
        *batches: Batch,
        hw: int = 0,
        diverging: EpochEnd | None = None,
        leader: int | None = None,
    ) -> list[Effect]:
        """Answer its Fetch."""
        known = self.core.leader_id if leader is None else leader
        return self.receive(
            FetchResponse(
                header=self.reply(request, leader=known),
                high_watermark=EndOffset(hw),
                log_start_offset=EndOffset(0),
                read_round=0,
                diverging=diverging,
                batches=batches,
            )
        )

    def become_leader(self) -> None:
        """Win an election with everything flushed."""
        self.pass_time(5000)
        for _ in range(2):
            self.grant(self.sent(VoteRequest)[0])
        assert self.role == "Leader"
        self.flush()
