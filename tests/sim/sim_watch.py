"""Invariants of one node by itself, whatever the others do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from streammeta.controller.ids import ClusterId
from streammeta.controller.quorum import events, messages
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.core import QuorumCore
from streammeta.controller.quorum.roles import Candidate, Follower, Leader
from streammeta.controller.quorum.voters import VoterSet
from tests.sim.sim_time import violated

if TYPE_CHECKING:
    from tests.sim.sim_node import SimNode

CLUSTER = ClusterId("sim")
_TICKS_AT_ONCE = 20
_SLACK_MS = 5


class Watch:
    def __init__(self, node: SimNode, state: QuorumState) -> None:
        self._node = node
        self.state = state
        """The last quorum-state that the core asked to be made durable."""
        self._binds_nobody = False
        self._last_tick = -1
        self._ticks_at_once = 0
        self._epoch_led = 0
        self._voters = VoterSet()
        self._heard: dict[int, int] = {}
        """When a leader got the last Fetch of each voter, by its own clock."""
        self._heard_nobody_since = 0
        self._state_under_way = 0
        """Token of the newest quorum-state while that is not durable: nothing can be heard yet."""
        self._voted_at = 0
        """When a leader was last one of the committed voters, or last slept too long to be told."""
        self._looked_at = 0

    # -- before a step

    def before(self, core: QuorumCore, event: events.Event, now: int) -> None:
        """Look at what the core is about to be fed."""
        if type(event) is not events.Received:
            return
        message = event.message
        if isinstance(message.header, messages.RequestHeader):
            is_foreign = message.header.cluster_id != CLUSTER
            is_pre_vote = (
                isinstance(message, messages.VoteRequest)
                and message.pre_vote
                and message.header.epoch <= core.epoch
            )
            if is_foreign or is_pre_vote:
                deadline = core.next_deadline()
                self._binds_nobody = deadline is None or deadline > now
            elif (
                isinstance(message, messages.FetchRequest | messages.FetchSnapshotRequest)
                and message.header.epoch == core.epoch
            ):
                self._heard[message.header.sender.node_id] = now

    def on_tick(self, now: int) -> None:
        """Count wake-ups in one millisecond."""
        self._ticks_at_once = self._ticks_at_once + 1 if now == self._last_tick else 1
        self._last_tick = now
        if self._ticks_at_once > _TICKS_AT_ONCE:
            core = self._node.core
            violated(
                "no busy loop", f"{self._node.key} wakes up again and again as {core and core.role}"
            )

    # -- after a step

    def after(
        self, core: QuorumCore, event: events.Event, effects: Sequence[events.Effect], now: int
    ) -> None:
        if self._binds_nobody:
            self._binds_nobody = False
            for effect in effects:
                if not isinstance(effect, events.Send):
                    violated(
                        "pre-votes and other clusters' messages change nothing",
                        f"{self._node.key}: {effect}",
                    )
        self._note_state(event, effects, now)
        if isinstance(core.role, Leader) and not isinstance(event, events.Append):
            self._check_hold(core, now)  # an append leaves what is due to the next event

    def _note_state(self, event: events.Event, effects: Sequence[events.Effect], now: int) -> None:
        if (
            isinstance(event, events.WriteDone | events.StateDone)
            and event.token >= self._state_under_way
        ):
            if self._state_under_way:
                self._heard_nobody_since = now  # no other event need have come meanwhile
            self._state_under_way = 0
        for effect in effects:
            if isinstance(effect, events.PersistQuorumState):
                self._state_under_way = effect.token

    def check_role(self, core: QuorumCore) -> None:
        """The role in memory is one that the quorum-state allows."""
        role, state = core.role, self.state
        is_consistent = state.epoch == core.epoch
        if isinstance(role, Leader):
            is_consistent &= state.leader_id == self._node.node_id
        elif isinstance(role, Follower):
            is_consistent &= state.leader_id == role.leader_id
        elif isinstance(role, Candidate):
            is_consistent &= state.vote == self._node.key
        if not is_consistent:
            violated(
                "role and quorum-state agree",
                f"{self._node.key} epoch {core.epoch} {role}, {state}",
            )

    def _check_hold(self, core: QuorumCore, now: int) -> None:
        """A leader that a majority has not fetched from for long enough is none any more."""
        if core.epoch != self._epoch_led or core.voters is not self._voters:
            if core.epoch != self._epoch_led:
                self._heard.clear()
                self._voted_at = now
            self._epoch_led, self._voters = core.epoch, core.voters
            self._heard_nobody_since = now
        if self._state_under_way:
            self._heard_nobody_since = now
        if any(voter.key.matches(self._node.key) for voter in self._node.world.ghost.ledger.voters):
            self._voted_at = now
        times = sorted(
            now
            if voter.key.matches(self._node.key)
            else max(self._heard_nobody_since, self._heard.get(voter.key.node_id, 0))
            for voter in core.voters
        )
        oldest_needed = times[(len(times) - 1) // 2]
        limit = self._node.world.timings.check_quorum_ms + _SLACK_MS
        if now - self._looked_at > limit:
            self._voted_at = now
        self._looked_at = now
        if now - self._voted_at > 2 * limit:
            violated(
                "who was removed does not lead on",
                f"{self._node.key} leads epoch {core.epoch} at {now}, voted until {self._voted_at}",
            )
        if now - oldest_needed > limit:
            violated(
                "a leader without a majority steps down",
                f"{self._node.key} leads epoch {core.epoch}, heard {times} of its voters at {now}",
            )
