"""Auditor: makes audit lines of calls, by the rule of each, and of what happens to the process.

Each call has a record, which the parts of its way fill: the caller, the parsed request, the status
that ended it, the offset of its answer. Decides with `AuditFailure` which calls to reject while
lines can't be written. Knows no handler and no gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
from google.protobuf.message import Message

from streammeta.controller.config import AuditFailure
from streammeta.controller.errors import AuditUnavailableError
from streammeta.controller.trust.audit import lines
from streammeta.controller.trust.audit.check import START_CALL
from streammeta.controller.trust.audit.rules import refusals, targets
from streammeta.rpc.method_facts import AuditRule, Recorded
from streammeta.rpc.method_rows import COMMIT_WITH_EFFECTS
from streammeta.rpc.methods import PACKAGE, SERVED_METHODS

MINUTE_S = 60.0

# These calls may still take effect: the entry can be in the log when the wait for it ends.
_UNKNOWN_REASONS = frozenset({"OUTCOME_UNKNOWN", "DEADLINE", "REQUEST_TIMED_OUT"})
_DENIED_CODES = frozenset({"PERMISSION_DENIED", "UNAUTHENTICATED"})

_log = structlog.get_logger(component="audit")


class Clock(Protocol):
    """Time in milliseconds."""

    def monotonic_ms(self) -> int:
        """Return a time that never goes back."""
        ...

    def wall_ms(self) -> int:
        """Return the time since 1970."""
        ...


class Writer(Protocol):
    """Destination of lines, implemented by `audit_writer.AuditWriter`."""

    @property
    def head(self) -> lines.Chain:
        """Number and hash of the last line written."""
        ...

    @property
    def problem(self) -> str:
        """Reason why lines can't be recorded now, empty if they can."""
        ...

    def put(self, line: lines.AuditLine) -> bool:
        """Queue a line. Return False if it is lost."""
        ...

    async def written(self, line: lines.AuditLine) -> None:
        """Queue a line and wait until it is durable. Raises AuditUnavailableError."""
        ...


@dataclass(frozen=True, slots=True)
class LeadershipState:
    """Whose lines they are: this controller, its epoch, and whether it leads."""

    node: int
    epoch: int
    leads: bool


class CallRecord:
    """Facts of one call under way."""

    __slots__ = (
        *("_auditor", "_began_ms", "_call", "_code", "_counted", "_has_begun", "_reason"),
        *("_request", "_rule", "_peer", "cert", "offset", "principal", "rows"),
    )

    def __init__(self, auditor: Auditor, call: str, rule: AuditRule, peer: str) -> None:
        self._auditor = auditor
        self._call = call
        self._rule = rule
        # Frequent calls are only counted, so they do not pay for reading the clock.
        self._began_ms = -1 if rule.recorded is Recorded.SUMMED else auditor.clock.monotonic_ms()
        self._request: Message | None = None
        self._code = self._reason = ""
        self._counted = self._has_begun = False
        self.principal = "anonymous"
        self.cert = ""
        self._peer = peer
        self.offset = -1
        """End of the log on which the answer depends, -1 without one."""
        self.rows = 0

    async def parsed(self, request: Message) -> None:
        """Add the request, and record the begin of the call if its rule requires that.

        Raises:
            AuditUnavailableError: it must be on record, and can't be.
        """
        # Some rules depend on fields of the request, so the method alone does not decide.
        self._rule = self._rule.of(request)
        self.require()
        if self._rule.recorded is Recorded.SUMMED:
            if self._rule.at_start:
                self.counted(1, 0, 0, -1)
            return
        self._request = request
        # The rule was SUMMED before the request was parsed, so no time was taken at arrival.
        if self._began_ms < 0:
            self._began_ms = self._auditor.clock.monotonic_ms()
        if self._rule.is_guarded:
            # Durable before the handler runs: a crash in between must leave a trace of the attempt.
            await self._auditor.written(self._line(lines.Verdict.BEGUN))
            self._has_begun = True

    def require(self) -> None:
        """Raise AuditUnavailableError if the call must be on record and can't be."""
        self._auditor.require(self._rule)

    def began(self) -> None:
        """Record the begin of a stream of messages. Raises AuditUnavailableError."""
        self.require()
        self._auditor.put(self._line(lines.Verdict.BEGUN))
        self._has_begun = True

    def counted(self, calls: int, rows: int, refused: int, offset: int) -> None:
        """Count calls that arrived in one message of a stream.

        `offset` is the offset of their answers.
        """
        self._counted = True
        self.offset = max(self.offset, offset)
        self._auditor.count(self.principal, self._call, calls, rows, refused, offset)

    def carried(self, commit: Message, answer: Message, offset: int) -> None:
        """Record a commit with effects that came by a stream of messages, and its answer."""
        reason, refused = refusals(answer)
        self._auditor.put(
            self._auditor.line(
                self._call,
                lines.Verdict.REFUSED if refused else lines.Verdict.OK,
                origin=lines.Origin(self.principal, self.cert, self._peer),
                target=targets(COMMIT_WITH_EFFECTS, commit, answer),
                reason=reason,
                offset=None if offset < 0 else offset,
                request_id=getattr(commit, "request_id", ""),
            )
        )

    def ended_by(self, code: str, reason: str) -> None:
        """Note the status that ends the call."""
        self._code, self._reason = code, reason

    def failed(self) -> None:
        """Record the end of a call by a status, or because its caller left."""
        if self._code in _DENIED_CODES:
            self._denied()
        elif self._rule.recorded is Recorded.SUMMED:
            self._summed(refused=1 if self._code else 0)
        else:
            # Without a status the caller has left, and the handler may have changed the metadata
            # before.
            left = not self._code
            is_unknown = left or self._reason in _UNKNOWN_REASONS
            verdict = lines.Verdict.UNKNOWN if is_unknown else lines.Verdict.FAILED
            self._auditor.put(self._line(verdict, reason="CANCELLED" if left else self._reason))

    async def answered(self, answer: Any) -> None:
        """Record the end of a call by an answer.

        Return when the record of a guarded call is durable.

        Raises:
            AuditUnavailableError: it may never be; the call has taken effect.
        """
        if self._rule.recorded is Recorded.SUMMED:
            self._summed(refused=1 if getattr(answer, "error", 0) else 0)
            return

        if self.offset < 0:
            self.offset = getattr(answer, "end_offset", -1)

        reason, refused = refusals(answer)
        verdict = lines.Verdict.REFUSED if refused else lines.Verdict.OK
        line = self._line(verdict, reason=reason, answer=answer, refused=refused)
        if not self._rule.is_guarded:
            self._auditor.put(line)
            return

        try:
            await self._auditor.written(line)
        except AuditUnavailableError as error:
            # The change is committed and cannot be undone, so the caller must not take this for a
            # rejection.
            raise AuditUnavailableError(error.why, took_effect=True) from None

    def _denied(self) -> None:
        # A flood of rejected calls must not fill the disk. Further ones are only counted.
        if self._auditor.denials.has_room(self.principal, self._call, self._reason):
            self._auditor.put(self._line(lines.Verdict.DENIED, reason=self._reason))
        else:
            self._summed(refused=1)

    def _summed(self, *, refused: int) -> None:
        if self._has_begun:
            verdict = lines.Verdict.OK if not refused else lines.Verdict.FAILED
            self._auditor.put(self._line(verdict, reason=self._reason))
        # Messages of a stream have been counted one by one as they arrived.
        if not self._counted or refused:
            self._auditor.count(self.principal, self._call, 1, self.rows, refused, self.offset)

    def _line(
        self,
        verdict: lines.Verdict,
        *,
        reason: str = "",
        answer: Message | None = None,
        refused: int = 0,
    ) -> lines.AuditLine:
        found = targets(self._rule, self._request, answer)
        # A single refused item is already stated by the verdict and the reason.
        if refused > 1:
            found["refused"] = refused

        took_ms = None
        if self._began_ms >= 0 and verdict is not lines.Verdict.BEGUN:
            took_ms = float(self._auditor.clock.monotonic_ms() - self._began_ms)

        return self._auditor.line(
            self._call,
            verdict,
            origin=lines.Origin(self.principal, self.cert, self._peer),
            target=found,
            reason=reason,
            offset=None if self.offset < 0 else self.offset,
            request_id=getattr(self._request, "request_id", ""),
            took_ms=took_ms,
        )


_current: ContextVar[CallRecord | None] = ContextVar("audit record", default=None)


def current_record() -> CallRecord | None:
    """Return the record of the call under way in this task, None if none is kept."""
    return _current.get()


def note_caller(principal: str, cert: str) -> None:
    """Note the caller of the call under way: principal, and fingerprint of its certificate."""
    if (record := _current.get()) is not None:
        # A certificate that names nobody still has a fingerprint worth recording.
        record.principal = principal or record.principal
        record.cert = cert


def note_failure(code: str, reason: str) -> None:
    """Note the status that ends the call under way."""
    if (record := _current.get()) is not None:
        record.ended_by(code, reason)


def note_rows(rows: int) -> None:
    """Note the size of the call under way."""
    if (record := _current.get()) is not None:
        record.rows = rows


def note_offset(offset: int) -> None:
    """Note the end of the log that the answer of the call under way rests on."""
    if (record := _current.get()) is not None:
        record.offset = offset


class Auditor:
    """Records calls and events of one controller."""

    def __init__(
        self,
        writer: Writer,
        clock: Clock,
        leadership: Callable[[], LeadershipState],
        on_failure: AuditFailure = AuditFailure.BLOCK_ADMIN,
    ) -> None:
        self.clock = clock
        self.denials = lines.DenialLimit()
        self._writer = writer
        self._leadership = leadership
        self._on_failure = on_failure
        self._sums = lines.Sums()
        self._sums_since_ms = clock.wall_ms()

    def arrived(self, method: str, peer: str) -> CallRecord:
        """Begin the record of a call of `method`, e.g. `streammeta.v1.KVService.PutKVs`.

        `peer` is the caller's address as gRPC writes it.
        """
        rule = SERVED_METHODS[method].audit
        record = CallRecord(self, method.removeprefix(f"{PACKAGE}."), rule, peer)
        _current.set(record)
        return record

    def event(
        self, name: str, *, reason: str = "", target: Mapping[str, Any] | None = None
    ) -> None:
        """Record an event of the process, e.g. `policy.reload`, with `reason` if it failed."""
        verdict = lines.Verdict.FAILED if reason else lines.Verdict.OK
        origin = lines.Origin(f"controller/{self._leadership().node}")
        self.put(self.line(name, verdict, origin=origin, reason=reason, target=target or {}))

    async def run(self) -> None:
        """Write sums and log the chain's end once a minute. Never returns."""
        while True:
            await asyncio.sleep(MINUTE_S)
            self.end_minute()

    def end_minute(self) -> None:
        """Write and reset the sums, and log the chain's end."""
        self._write_sums()
        self.denials.begin_minute()
        # The controller log is usually shipped elsewhere, so a cut end of the audit log shows
        # there.
        self.tell_head()

    def tell_head(self) -> None:
        """Name the chain's end in the controller's log, which others keep."""
        head = self._writer.head
        _log.info("audit_chain", seq=head.seq, hash=head.head)

    def begin(self) -> None:
        """Record the start of the process."""
        self.event(START_CALL)

    def end(self) -> None:
        """Record the end of the process, and all counts until then."""
        self._write_sums()
        # Last, so that a chain that ends without it shows a killed process.
        self.event("audit.stop")

    # -- for records

    def line(self, call: str, verdict: lines.Verdict, **members: Any) -> lines.AuditLine:
        """Return a line of now."""
        leadership = self._leadership()
        return lines.AuditLine(
            ts_ms=self.clock.wall_ms(),
            node=leadership.node,
            epoch=leadership.epoch,
            leader=leadership.leads,
            call=call,
            verdict=verdict,
            **members,
        )

    def count(
        self, principal: str, call: str, calls: int, rows: int, refused: int, offset: int
    ) -> None:
        """Count calls for the minute's line."""
        # Principals are chosen by callers, so the table needs a bound.
        if len(self._sums) >= lines.SUMS_MAX:
            self._write_sums()
        self._sums.add(principal, call, calls=calls, rows=rows, refusals=refused, offset=offset)

    def require(self, rule: AuditRule) -> None:
        """Raise AuditUnavailableError if a call must be recorded and can't be."""
        is_refused = self._on_failure is AuditFailure.BLOCK_ALL and not rule.is_always_answered
        # Traffic of brokers continues: losing commits would be worse than losing their sums.
        if self._on_failure is AuditFailure.BLOCK_ADMIN:
            is_refused = rule.is_guarded
        if is_refused and (problem := self._writer.problem):
            raise AuditUnavailableError(problem)

    def put(self, line: lines.AuditLine) -> None:
        """Hand a line over."""
        self._writer.put(line)

    async def written(self, line: lines.AuditLine) -> None:
        """Hand a guarded call's line over and wait for the disk, unless lines may be lost."""
        if self._on_failure is AuditFailure.DROP:
            self._writer.put(line)
        else:
            await self._writer.written(line)

    def _write_sums(self) -> None:
        # Swapped before the lines are written, so that consecutive sums leave no gap in time.
        since_ms, self._sums_since_ms = self._sums_since_ms, self.clock.wall_ms()
        for principal, call, counted, offset in self._sums.drain(since_ms):
            origin = lines.Origin(principal)
            self.put(self.line(call, lines.Verdict.SUM, origin=origin, sum=counted, offset=offset))
