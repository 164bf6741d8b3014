"""Wrong rules to plant: each is a mistake that real Raft implementations have made.

A simulator is only worth what it finds, so each must be caught within a number of seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import pytest

from controller.ids import EndOffset
from controller.quorum import election, leading, majority
from controller.quorum.core import QuorumCore
from controller.quorum.election import Election
from controller.quorum.events import Effect, PersistQuorumState, ReadIndexReady, Send
from controller.quorum.following import Following
from controller.quorum.leading import Leading
from controller.quorum.log_view import LogView
from controller.quorum.messages import (
    EpochEnd,
    FetchRequest,
    QuorumError,
    ResponseHeader,
    VoteRequest,
)
from controller.quorum.replica import Replica
from controller.quorum.roles import Leader
from controller.quorum.voters import Voter
from tests.sim.sim_node import SimNode, Write

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Sabotage:
    """A wrong rule, the weather in which to look for it, and how to plant it."""

    name: str
    plant: Callable[[Patch], type[SimNode]]
    profile: str = "swarm"
    seeds: int = 60


def _commit_unflushed(patch: Patch) -> type[SimNode]:
    original = Leading._flushed_end

    def flushed_end(self: Leading, role: Leader, voter: Voter) -> EndOffset:
        if voter.key.matches(self._replica.local):
            return self._replica.log.end_offset
        return original(self, role, voter)

    patch.setattr(Leading, "_flushed_end", flushed_end)
    return SimNode


def _commit_earlier_epochs(patch: Patch) -> type[SimNode]:
    def committed_end(ends: Collection[EndOffset], epoch_start: EndOffset) -> EndOffset:
        del epoch_start
        return majority.majority_end(ends)

    patch.setattr(leading, "committed_end", committed_end)
    return SimNode


def _small_majority(patch: Patch) -> type[SimNode]:
    def half(voters: int) -> int:
        return max(1, voters // 2)

    for module in (majority, election, leading):
        patch.setattr(module, "majority", half)
    return SimNode


class _ForgetfulNode(SimNode):
    def perform(self, write: Write) -> None:
        if isinstance(write, PersistQuorumState):
            write = replace(write, state=replace(write.state, vote=None))
        super().perform(write)


def _vote_in_memory(patch: Patch) -> type[SimNode]:
    del patch
    return _ForgetfulNode


def _leader_restarts_as_leader(patch: Patch) -> type[SimNode]:
    original = QuorumCore.start

    def start(self: QuorumCore, now_ms: int) -> list[Effect]:
        replica = self._replica
        if replica.leader_id != replica.local.node_id:
            return original(self, now_ms)
        replica.now = now_ms
        replica.become_leader()
        return self._finish()

    patch.setattr(QuorumCore, "start", start)
    return SimNode


class _HastyNode(SimNode):
    def send(self, effect: Send) -> None:
        self.release(effect.message)


def _send_before_flush(patch: Patch) -> type[SimNode]:
    del patch
    return _HastyNode


class _HastyFetchNode(SimNode):
    def send(self, effect: Send) -> None:
        if isinstance(effect.message, FetchRequest):
            self.release(effect.message)
        else:
            super().send(effect)


def _fetch_before_flush(patch: Patch) -> type[SimNode]:
    del patch
    return _HastyFetchNode


def _vote_without_log_check(patch: Patch) -> type[SimNode]:
    original = Election._judge

    def judge(self: Election, request: VoteRequest) -> tuple[QuorumError, bool]:
        longest = replace(request, last_epoch=request.header.epoch, end_offset=1 << 60)  # type: ignore[arg-type]
        return original(self, longest)

    patch.setattr(Election, "_judge", judge)
    return SimNode


def _stale_responses_accepted(patch: Patch) -> type[SimNode]:
    def take_answered(self: Replica, header: ResponseHeader, kind: type) -> bool:
        self._outstanding.pop((header.sender, kind), None)
        return True

    patch.setattr(Replica, "take_answered", take_answered)
    patch.setattr(Following, "_fits", lambda self, response: True)
    return SimNode


def _reads_without_proof(patch: Patch) -> type[SimNode]:
    def request_read_index(self: Leading, read_id: int) -> None:
        if isinstance(self._replica.role, Leader):
            self._replica.emit(ReadIndexReady(read_id, self._replica.high_watermark))

    patch.setattr(Leading, "request_read_index", request_read_index)
    return SimNode


def _credit_before_log_check(patch: Patch) -> type[SimNode]:
    original = Leading.on_fetch

    def on_fetch(self: Leading, request: FetchRequest) -> None:
        role = self._replica.role
        assert isinstance(role, Leader)
        progress = self._progress_of(role, request.header.sender)
        progress.end_offset = min(request.fetch_offset, self._replica.log.end_offset)
        self.update_high_watermark()
        original(self, request)

    patch.setattr(Leading, "on_fetch", on_fetch)
    return SimNode


def _diverging_logs_not_cut(patch: Patch) -> type[SimNode]:
    def end_of_epoch(self: LogView, epoch: int) -> EpochEnd:
        return EpochEnd(epoch, self.end_offset)  # type: ignore[arg-type]

    patch.setattr(LogView, "end_of_epoch", end_of_epoch)
    return SimNode


def _vote_dropped_in_same_epoch(patch: Patch) -> type[SimNode]:
    original = Replica.become_unattached

    def become_unattached(self: Replica, epoch: int) -> None:
        if epoch == self.epoch and self.vote == self.local:
            self.vote = None
        original(self, epoch)  # type: ignore[arg-type]

    patch.setattr(Replica, "become_unattached", become_unattached)
    return SimNode


SABOTAGES = (
    Sabotage("the leader counts what it has not flushed", _commit_unflushed),
    Sabotage("batches of earlier epochs are committed by counting", _commit_earlier_epochs),
    Sabotage("half of the voters are a majority", _small_majority),
    Sabotage("the vote is kept in memory only", _vote_in_memory),
    Sabotage("a restarted leader goes on leading its epoch", _leader_restarts_as_leader),
    Sabotage("messages do not wait for the disk", _send_before_flush),
    Sabotage("a Fetch does not wait for the disk", _fetch_before_flush),
    Sabotage("votes are granted to shorter logs", _vote_without_log_check),
    Sabotage("answers to older requests are accepted", _stale_responses_accepted),
    Sabotage("reads are answered without proof of leadership", _reads_without_proof),
    Sabotage("a Fetch is credited before its position is checked", _credit_before_log_check),
    Sabotage("diverging logs are not cut", _diverging_logs_not_cut),
    Sabotage("a vote is dropped within its epoch", _vote_dropped_in_same_epoch),
)
