"""Audit trail of a run: a line before each change of the bucket, and a line with its outcome.

A candidate that is kept because it is ahead of the metadata has a line too, because it may be the
only trace of a commit. So has a candidate that another attempt of the task deleted.

Lines are JSON objects chained by hashes, in the controllers' format, so that one command verifies
both. Two attempts of a task may run at once, so each has a separate file and chain, with the
attempt's number in place of a controller's node id. A key with only a BEGUN line in all files
belongs to a process that ended before the outcome.
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
    """Audit trail of one attempt of a task."""

    def __init__(self, order: DeletionOrder, attempt: Attempt) -> None:
        self._order = order
        self._attempt = attempt
        self._file: AuditFile | None = None
        self._begun: set[str] = set()

    def begin(self, candidates: Sequence[Candidate]) -> None:
        """Record the next changes durably. Raises `OSError`."""
        self._write([self._line(candidate, Verdict.BEGUN) for candidate in candidates])
        self._begun.update(candidate.key for candidate in candidates)

    def end(self, judged: Sequence[Judged]) -> None:
        """Record the outcomes of candidates begun by any attempt, or ahead of the metadata.

        A dry run has no trail. Raises `OSError`.
        """
        if not self._order.delete:
            return
        unbegun = (self._order.done, Outcome.AHEAD_OF_METADATA)
        recorded = [
            result
            for result in judged
            if result.candidate.key in self._begun or result.outcome in unbegun
        ]
        self._begun.clear()
        self._write([self._outcome_line(result) for result in recorded])

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _outcome_line(self, result: Judged) -> AuditLine:
        outcome, detail = result.outcome, result.detail
        # A failed request may have taken effect, so its outcome is unknown.
        is_certain = outcome in (self._order.done, Outcome.GONE, Outcome.KEPT)
        verdict = Verdict.OK if is_certain else Verdict.UNKNOWN
        if outcome is Outcome.AHEAD_OF_METADATA:
            verdict = Verdict.REFUSED
        reason = detail if outcome is self._order.done else f"{outcome}: {detail}"
        return self._line(result.candidate, verdict, reason)

    def _line(self, candidate: Candidate, verdict: Verdict, reason: str = "") -> AuditLine:
        return AuditLine(
            ts_ms=time.time_ns() // 1_000_000,
            node=self._attempt.number,
            epoch=0,
            leader=False,
            call=_CALLS[self._order.done],
            verdict=verdict,
            target={
                "run": self._order.run,
                "key": candidate.key,
                "object_id": candidate.object_id,
                "size": candidate.size,
                "etag": candidate.etag,
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
        # Before the change of the bucket, or after a crash no line would explain a missing object.
        self._file.sync()
