"""Traces of calls and commits: spans, and the `traceparent` that connects two processes.

Tracing is off until `enable`: OpenTelemetry is not imported, and a span costs one comparison. Owns
no exporter and no settings, and does not know the traced work. Names and attributes follow
OpenTelemetry's conventions for RPC. `traceparent` is defined by W3C Trace Context, version 00.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, TraceFlags, Tracer, TracerProvider

TRACEPARENT_KEY = "traceparent"
"""Metadata key of a call for the context of its trace."""

LINKS_MAX = 128
"""Maximum number of traces that one message of commits names, and of spans that share work."""

_TRACEPARENT = re.compile("([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")

Attributes: TypeAlias = Mapping[str, str | int | bool]

_tracer: Tracer | None = None


def enable(provider: TracerProvider | None = None) -> None:
    """Start tracing with `provider`, or with the provider that the process has set globally.

    Raises `ModuleNotFoundError` if opentelemetry-api is not installed.
    """
    global _tracer  # noqa: PLW0603 - one switch for the process, as OpenTelemetry's own
    from opentelemetry import trace

    _tracer = trace.get_tracer("streammeta", tracer_provider=provider)


def disable() -> None:
    """Stop tracing."""
    global _tracer  # noqa: PLW0603 - as above
    _tracer = None


def is_on() -> bool:
    """Return whether tracing is on."""
    return _tracer is not None


class OpenSpan:
    """Span in progress. `end` it once. A span that is not traced does nothing."""

    __slots__ = ("_sharers", "_span")

    def __init__(self, span: Span | None, parent_id: int = 0) -> None:
        self._span = span
        self._sharers = {parent_id}

    @property
    def traceparent(self) -> str:
        """Context that connects others to the trace, empty if it is not traced or not sampled."""
        return "" if self._span is None else _traceparent(self._span)

    def end(self, error: str = "", attributes: Attributes | None = None) -> None:
        """End the span. `error` describes its failure."""
        if self._span is None:
            return
        for name, value in (attributes or {}).items():
            self._span.set_attribute(name, value)
        if error:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()

    def drop(self) -> None:
        """Remove the span from its trace. It must have no children."""
        self._span = None

    def share(self, name: str) -> OpenSpan:
        """Return the span, called `name`, of work that also serves the current span.

        Its parent is the first sampled span that the work serves. It and each later one are linked
        to each other, up to `LINKS_MAX` of them.
        """
        if self._span is None:
            return self
        from opentelemetry import trace

        sharer = trace.get_current_span()
        of = sharer.get_span_context()
        # Without a sampled span there is nothing to link, and a span is linked once.
        if not (of.is_valid and of.trace_flags.sampled) or of.span_id in self._sharers:
            return self
        # Nobody would see this span. Begin another one, in the trace that is sampled.
        if not self.traceparent:
            return begin(name)
        if len(self._sharers) <= LINKS_MAX:
            self._sharers.add(of.span_id)
            self._span.add_link(of)
            sharer.add_link(self._span.get_span_context())
        return self

    def current(self) -> contextlib.AbstractContextManager[object]:
        """Make this span the parent of spans started in the body."""
        if self._span is None:
            return _NO_SPAN
        from opentelemetry import trace

        # The span outlives the block, and its owner sets its status.
        return trace.use_span(self._span, end_on_exit=False, record_exception=False)


NOT_TRACED = OpenSpan(None)

_NO_SPAN = contextlib.nullcontext(NOT_TRACED)


def begin(name: str, attributes: Attributes | None = None) -> OpenSpan:
    """Start a span, a child of the current one if there is any."""
    if _tracer is None:
        return NOT_TRACED
    from opentelemetry import trace

    parent_id = trace.get_current_span().get_span_context().span_id
    return OpenSpan(_tracer.start_span(name, attributes=dict(attributes or {})), parent_id)


def note(attributes: Attributes) -> None:
    """Add attributes to the current span."""
    if _tracer is None:
        return
    from opentelemetry import trace

    for name, value in attributes.items():
        trace.get_current_span().set_attribute(name, value)


def span(
    name: str, attributes: Attributes | None = None
) -> contextlib.AbstractContextManager[OpenSpan]:
    """Trace the body as a child of the current span. An exception is the span's error."""
    return _NO_SPAN if _tracer is None else traced(name, attributes)


@contextlib.contextmanager
def traced(name: str, attributes: Attributes | None = None) -> Iterator[OpenSpan]:
    """Trace the body as `span` does. As a decorator it follows `enable` at each call."""
    if _tracer is None:
        yield NOT_TRACED
        return
    opened = begin(name, attributes)
    error = ""
    try:
        with opened.current():
            yield opened
    # A cancelled span failed too.
    except BaseException as failure:
        error = type(failure).__name__
        raise
    finally:
        opened.end(error)


@contextlib.contextmanager
def part(name: str, attributes: Attributes | None = None) -> Iterator[OpenSpan]:
    """Trace the body as `span` does, if it belongs to a recorded trace."""
    if not is_traced():
        yield NOT_TRACED
        return
    with span(name, attributes) as opened:
        yield opened


@contextlib.contextmanager
def serving(name: str, traceparent: str) -> Iterator[None]:
    """Trace the answer to a call that carried `traceparent`, nothing without one."""
    parent = None if _tracer is None else _context(traceparent)
    if _tracer is None or parent is None:
        yield
        return
    from opentelemetry import trace

    served = _tracer.start_span(name, context=parent, kind=trace.SpanKind.SERVER)
    with trace.use_span(served, end_on_exit=True, record_exception=False):
        yield


@contextlib.contextmanager
def within(traceparent: str) -> Iterator[None]:
    """Make the span of `traceparent`, of any process, the parent of spans started inside.

    An invalid one changes nothing.
    """
    parent = None if _tracer is None else _context(traceparent)
    if parent is None:
        yield
        return
    from opentelemetry.context import attach, detach

    token = attach(parent)
    try:
        yield
    finally:
        detach(token)


def current_traceparent() -> str:
    """Return the context that connects another process to the span, empty if not sampled."""
    if _tracer is None:
        return ""
    from opentelemetry import trace

    return _traceparent(trace.get_current_span())


def is_traced() -> bool:
    """Return whether the current work belongs to a recorded trace."""
    return bool(current_traceparent())


def call_metadata() -> tuple[tuple[str, str], ...]:
    """Return the metadata that connects a call to the current span, empty if not sampled."""
    traceparent = current_traceparent()
    return ((TRACEPARENT_KEY, traceparent),) if traceparent else ()


def outside() -> contextvars.Context:
    """Return the present context without its span, for a task that outlives its starter."""
    context = contextvars.copy_context()
    if _tracer is not None:
        from opentelemetry import trace
        from opentelemetry.context import attach

        # attach() inside the copy changes only the copy.
        context.run(attach, trace.set_span_in_context(trace.INVALID_SPAN))
    return context


def record_phases(
    name: str,
    traceparents: Sequence[str],
    times_ns: Sequence[tuple[str, int]],
    attributes: Attributes | None = None,
    error: str = "",
) -> None:
    """Record finished work: a span with a child for each phase.

    `traceparents` belong to the requesters: the first is the parent, the others are linked. If
    empty, the current span is the parent. `times_ns` begins with the start time, under any name,
    followed by the end time of each phase, in ns since 1970.
    """
    if _tracer is None:
        return
    from opentelemetry import trace

    contexts = [
        found
        for traceparent in traceparents[:LINKS_MAX]
        if (found := _context(traceparent)) is not None
    ]
    # No trace is sampled, so nobody wants a span.
    if traceparents and not contexts:
        return
    links = [
        trace.Link(trace.get_current_span(context).get_span_context()) for context in contexts[1:]
    ]
    whole = _tracer.start_span(
        name,
        context=contexts[0] if contexts else None,
        kind=trace.SpanKind.SERVER if contexts else trace.SpanKind.INTERNAL,
        attributes=dict(attributes or {}),
        links=links,
        start_time=times_ns[0][1],
    )
    inside = trace.set_span_in_context(whole)
    for (_, began), (phase, ended) in itertools.pairwise(times_ns):
        # The clock may step back between two phases.
        _tracer.start_span(phase, context=inside, start_time=began).end(max(began, ended))
    if error:
        whole.set_status(trace.Status(trace.StatusCode.ERROR, error))
    whole.end(times_ns[-1][1])


def _traceparent(span: Span) -> str:
    of = span.get_span_context()
    if not (of.is_valid and of.trace_flags.sampled):
        return ""
    # 01: sampled, as checked above.
    return f"00-{of.trace_id:032x}-{of.span_id:016x}-01"


def _context(traceparent: str) -> Context | None:
    """Return the context of a foreign `traceparent`, None if it is not sampled."""
    from opentelemetry import trace

    parts = _TRACEPARENT.fullmatch(traceparent)
    # Version ff is invalid by W3C Trace Context.
    if parts is None or parts[1] == "ff":
        return None
    trace_id, span_id, flags = (int(part, 16) for part in parts.groups()[1:])
    remote = trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=_flags(flags))
    if not (remote.is_valid and remote.trace_flags.sampled):
        return None
    return trace.set_span_in_context(trace.NonRecordingSpan(remote))


def _flags(value: int) -> TraceFlags:
    from opentelemetry.trace import TraceFlags

    return TraceFlags(value)
