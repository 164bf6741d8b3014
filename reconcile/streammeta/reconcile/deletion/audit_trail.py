"""Audit trail of a run: a line before each change of the bucket, and one with what became of it.

A candidate that is kept as it is ahead of the map has a line too: it may be all that is left of a
commit. So has one that another attempt of the task had deleted.

Lines are JSON objects chained by hashes, as controllers write theirs, so that one command verifies
both. Each attempt of a task has a file and a chain of its own, with the attempt's number where a
controller has its node id: two attempts may run at once. A key with a line that says BEGUN and no
other line in any file belongs to a process that ended in between.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from streammeta.controller.trust.audit.file import AuditFile, Entry
from streammeta.controller.trust.audit.lines import AuditLine, Verdict
from streammeta.reconcile.deletion.order import Candidate, DeletionOrder, Judged, Outcome
from streammeta.reconcile.vocabulary.attempts import Attempt
from streammeta.storage.durable_files import PosixFileSystem

_CALLS = {
    Outcome.DELETED: "reconcile.delete",
    Outcome.QUARANTINED: "reconcile.quarantine",
    Outcome.TAGGED: "reconcile.tag",
}


class AuditTrail:
    """The trail of one attempt of a task."""

    def __init__(self, order: DeletionOrder, attempt: Attempt) -> None:
        self._order = order
        self._attempt = attempt
        self._file: AuditFile | None = None
        self._begun: set[str] = set()

    def begin(self, candidates: Sequence[Candidate]) -> None:
        """Put on record durably what is changed next. Raises `OSError`."""
        self._write([self._line(one, Verdict.BEGUN) for one in candidates])
        self._begun.update(one.key for one in candidates)

    def end(self, judged: Sequence[Judged]) -> None:
        """Put on record the outcomes of those begun by any attempt, or ahead of the map.

        A dry run has no trail. Raises `OSError`.
        """
        if not self._order.delete:
            return
        unbegun = (self._order.done, Outcome.AHEAD_OF_MAP)
        told = [one for one in judged if one.candidate.key in self._begun or one.outcome in unbegun]
        self._begun.clear()
        self._write([self._outcome(one) for one in told])

    def close(self) -> None:
        """Release the file."""
        if self._file is not None:
            self._file.close()

    def _outcome(self, one: Judged) -> AuditLine:
        is_certain = one.outcome in (self._order.done, Outcome.GONE, Outcome.KEPT)
        verdict = Verdict.OK if is_certain else Verdict.UNKNOWN
        if one.outcome is Outcome.AHEAD_OF_MAP:
            verdict = Verdict.REFUSED
        told = one.detail if one.outcome is self._order.done else f"{one.outcome}: {one.detail}"
        return self._line(one.candidate, verdict, told)

    def _line(self, one: Candidate, verdict: Verdict, reason: str = "") -> AuditLine:
        return AuditLine(
            ts_ms=time.time_ns() // 1_000_000,
            node=self._attempt.number,
            epoch=0,
            leader=False,
            call=_CALLS[self._order.done],
            verdict=verdict,
            target={
                "run": self._order.run,
                "key": one.key,
                "object_id": one.object_id,
                "size": one.size,
                "etag": one.etag,
            },
            reason=reason,
        )

    def _write(self, lines: Sequence[AuditLine]) -> None:
        if not lines:
            return
        if self._file is None:
            path = Path(self._order.audit_folder) / f"task-{self._attempt.name}.jsonl"
            self._file = AuditFile(PosixFileSystem(), path)
        self._file.append([Entry(line) for line in lines])
        self._file.sync()
