"""Audit lines and logs of tests."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from streammeta.controller.trust.audit.file import Entry
from streammeta.controller.trust.audit.lines import AuditLine, Chain, Origin, Verdict

ALICE = Origin("admin/alice", "12ab", "10.0.0.9:4711")


def line(number: int, *, node: int = 3, call: str = "NodeService.LockNode") -> AuditLine:
    """Return a line that differs from those of other numbers."""
    return AuditLine(
        ts_ms=1_800_000_000_000 + number,
        node=node,
        epoch=7,
        leader=True,
        call=call,
        verdict=Verdict.OK,
        origin=ALICE,
        target={"node": 1000 + number},
        offset=100 + number,
    )


def chained(count: int, *, node: int = 3, chain: Chain | None = None) -> list[bytes]:
    """Return lines of one chain, each with its newline."""
    chain = Chain() if chain is None else chain
    return [chain.link(line(number, node=node)) for number in range(count)]


@dataclass
class MemoryLog:
    """An `AuditLog` that fails when it is told to."""

    chain: Chain = field(default_factory=Chain)
    written: list[bytes] = field(default_factory=list)
    synced: int = 0
    reopened: int = 0
    error: OSError | None = None
    sync_error: OSError | None = None

    def append(self, entries: Sequence[Entry]) -> None:
        if self.error is not None:
            raise self.error
        self.written += [self.chain.link(entry.line, entry.dropped) for entry in entries]

    def sync(self) -> None:
        if self.sync_error is not None:
            raise self.sync_error
        self.synced = len(self.written)

    def reopen(self) -> None:
        self.reopened += 1

    def close(self) -> None:
        pass
