"""Traces of Spark tasks, as part of their run's trace.

A task exports its spans from its own process. If a package for that is missing, only the spans are
lost.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from streammeta.rpc import trace_export, tracing

SERVICE = "streammeta-reconcile"
"""Default name of the service in traces, overridden by OTEL_SERVICE_NAME."""

_OTEL = "OTEL_"


@dataclass(frozen=True, slots=True)
class TaskTracing:
    """Trace settings of a task: its parent span, and the driver's variables OTEL_*.

    Without a `traceparent`, nothing is traced.
    """

    traceparent: str
    variables: Mapping[str, str]

    @contextmanager
    def trace(self) -> Iterator[None]:
        """Trace the body in a task's process, whose own variables win over the driver's.

        Without the extra `tracing`, nothing is traced.
        """
        if not self.traceparent:
            yield
            return
        try:
            with _completed(self.variables):
                provider = trace_export.otlp_provider(SERVICE)
        except ModuleNotFoundError:
            yield
            return
        with trace_export.tracing_by(provider), tracing.within(self.traceparent):
            yield


def tracing_of_tasks() -> TaskTracing:
    """Return the settings that make tasks part of the current span."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(_OTEL)}
    return TaskTracing(tracing.current_traceparent(), variables)


@contextmanager
def _completed(variables: Mapping[str, str]) -> Iterator[None]:
    """Add missing variables to the environment in the body."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
