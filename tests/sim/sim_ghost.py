"""What must be true of the whole quorum, kept outside the nodes and across their restarts.

The names are those of Raft: election safety, log matching, leader completeness, state machine
safety. Every check is incremental, so it can run after every event.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from controller.quorum.messages import (
    Batch,
    FetchRequest,
    Message,
    VoteRequest,
    VoteResponse,
)


class Violation(Exception):  # noqa: N818 (the simulator's word for it)
    """An invariant does not hold; the message begins with its name."""


def check(condition: object, invariant: str, detail: str) -> None:
    if not condition:
        raise Violation(f"{invariant}: {detail}")


@dataclass
class GhostLog:
    """What a node's log must hold: its batches, and how many of them are certainly durable."""

    batches: list[Batch] = field(default_factory=list)
    durable: int = 0

    @property
    def end(self) -> int:
        return self.batches[-1].end_offset if self.batches else 0

    @property
    def durable_end(self) -> int:
        return self.batches[self.durable - 1].end_offset if self.durable else 0

    def count_up_to(self, end_offset: int) -> int:
        """Number of batches that end at or before `end_offset`."""
        low, high = 0, len(self.batches)
        while low < high:
            middle = (low + high) // 2
            if self.batches[middle].end_offset <= end_offset:
                low = middle + 1
            else:
                high = middle
        return low


class Ghost:
    """Remembers everything that was promised."""

    def __init__(self, voters: int) -> None:
        self._majority = voters // 2 + 1
        self.logs = [GhostLog() for _ in range(voters)]
        self.ledger: list[Batch] = []
        self._leaders: dict[int, tuple[int, int]] = {}
        self._votes: dict[tuple[int, int], int] = {}
        self._sent_epochs = [0] * voters
        self._batches: dict[tuple[int, int], tuple[tuple[bytes, ...], int]] = {}
        self._delivered = [0] * voters
        self._high_watermarks = [0] * voters

    @property
    def ledger_end(self) -> int:
        """End of what any node ever called committed."""
        return self.ledger[-1].end_offset if self.ledger else 0

    # -- a node's life

    def on_start(self, node: int, batches: list[Batch]) -> None:
        log = self.logs[node]
        kept = log.batches[: log.durable]
        check(
            batches[: len(kept)] == kept,
            "durability",
            f"node {node} restarted with {len(batches)} batches and lost some of {len(kept)}",
        )
        log.batches = list(batches)
        log.durable = len(batches)
        self._delivered[node] = 0
        self._high_watermarks[node] = 0

    # -- election

    def on_leader(self, node: int, incarnation: int, epoch: int) -> None:
        """A node's leadership is durable; before, a crash leaves no trace of it."""
        known = self._leaders.setdefault(epoch, (node, incarnation))
        check(
            known == (node, incarnation),
            "election safety",
            f"epoch {epoch} was led by node, life {known}, now also by {(node, incarnation)}",
        )

    def on_elected(self, node: int, epoch: int) -> None:
        if self.ledger:
            index = len(self.ledger) - 1
            log = self.logs[node].batches
            check(
                index < len(log) and log[index] == self.ledger[index],
                "leader completeness",
                f"node {node} leads epoch {epoch} without the committed batch that ends at "
                f"{self.ledger_end}",
            )

    def on_sent(self, node: int, message: Message) -> None:
        epoch = message.header.epoch
        check(
            epoch >= self._sent_epochs[node],
            "epochs never fall",
            f"node {node} sent epoch {epoch} after {self._sent_epochs[node]}",
        )
        self._sent_epochs[node] = epoch
        if isinstance(message, VoteResponse) and message.granted and not message.pre_vote:
            self._on_vote(node, epoch, message.header.receiver)
        elif isinstance(message, VoteRequest) and not message.pre_vote:
            self._on_vote(node, epoch, node)
        elif isinstance(message, FetchRequest):
            check(
                message.fetch_offset <= self.logs[node].durable_end,
                "acknowledged is flushed",
                f"node {node} fetches at {message.fetch_offset}, flushed is "
                f"{self.logs[node].durable_end}",
            )

    def _on_vote(self, node: int, epoch: int, candidate: int) -> None:
        known = self._votes.setdefault((node, epoch), candidate)
        check(
            known == candidate,
            "one vote an epoch",
            f"node {node} voted in epoch {epoch} for {known} and for {candidate}",
        )

    # -- the log

    def on_append(self, node: int, batches: tuple[Batch, ...]) -> None:
        log = self.logs[node]
        for batch in batches:
            check(batch.base_offset == log.end, "log is gapless", f"node {node}, {batch}")
            previous = log.batches[-1].epoch if log.batches else 0
            key = (batch.base_offset, batch.epoch)
            known = self._batches.setdefault(key, (batch.payloads, previous))
            check(
                known == (batch.payloads, previous),
                "log matching",
                f"node {node} has another batch at offset, epoch {key}",
            )
            log.batches.append(batch)

    def on_truncate(self, node: int, end_offset: int) -> None:
        log = self.logs[node]
        keep = log.count_up_to(end_offset)
        check(
            end_offset >= self._high_watermarks[node],
            "committed is never truncated",
            f"node {node} cuts to {end_offset}, its high watermark is "
            f"{self._high_watermarks[node]}",
        )
        lost = keep < len(self.ledger) and log.batches[keep : keep + 1] == [self.ledger[keep]]
        check(not lost, "committed is never truncated", f"node {node} cuts to {end_offset}")
        del log.batches[keep:]
        log.durable = min(log.durable, keep)

    def on_durable(self, node: int, end_offset: int) -> None:
        log = self.logs[node]
        log.durable = max(log.durable, log.count_up_to(min(end_offset, log.end)))

    # -- commit

    def on_commit(self, node: int, high_watermark: int, epoch: int, *, is_leader: bool) -> None:
        log = self.logs[node]
        check(
            self._high_watermarks[node] < high_watermark <= log.end,
            "high watermark grows within the log",
            f"node {node}: {self._high_watermarks[node]} to {high_watermark}, log {log.end}",
        )
        self._high_watermarks[node] = high_watermark
        for batch in log.batches[self._delivered[node] : log.count_up_to(high_watermark)]:
            index = self._delivered[node]
            if index == len(self.ledger):
                self.ledger.append(batch)
            check(
                self.ledger[index] == batch,
                "state machine safety",
                f"node {node} commits at {batch.base_offset} epoch {batch.epoch}, committed was "
                f"epoch {self.ledger[index].epoch}",
            )
            self._delivered[node] += 1
        if is_leader:
            # By the offset its clients wait for: only so are older batches safe (Raft, figure 8).
            check(
                self.ledger[self._delivered[node] - 1].epoch == epoch,
                "a leader commits by batches of its own epoch",
                f"node {node} leads epoch {epoch} and commits up to {high_watermark}",
            )
            self._check_majority(node, self._delivered[node] - 1)

    def _check_majority(self, node: int, index: int) -> None:
        batch = self.ledger[index]
        holders = [
            other
            for other, log in enumerate(self.logs)
            if log.durable > index and log.batches[index] == batch
        ]
        check(
            len(holders) >= self._majority,
            "acknowledged is flushed on a majority",
            f"node {node} committed up to {batch.end_offset}, flushed only on {holders}",
        )

    def on_read(self, node: int, index: int, committed_before: int) -> None:
        check(
            index >= committed_before,
            "linearizable reads",
            f"node {node} read at {index}, {committed_before} was committed before it asked",
        )

    def on_delivered(self, node: int, batches: list[Batch]) -> None:
        check(
            batches == self.ledger[: len(batches)],
            "applied is a prefix of the ledger",
            f"node {node} applied {len(batches)} batches",
        )
