"""Traces of tasks in processes and on machines of Spark, which join the trace of their run.

A task sends its spans itself, from where it runs. What it lacks for that costs it its spans, and
nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from streammeta.rpc import tracing
from streammeta.rpc.trace_export import otlp_provider, tracing_by

SERVICE = "streammeta-reconcile"
"""Name of the service in traces, unless OTEL_SERVICE_NAME says another."""

_OTEL = "OTEL_"


@dataclass(frozen=True, slots=True)
class TaskTracing:
    """Settings of a task's traces: the span that it belongs to, and the driver's variables OTEL_*.

    Without a `traceparent` nothing is traced.
    """

    traceparent: str
    variables: Mapping[str, str]

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Trace in the body, in a task's process; variables that this has go before the driver's.

        Without the extra `tracing` there, it traces nothing.
        """
        if not self.traceparent:
            yield
            return
        try:
            with _completed(self.variables):
                provider = otlp_provider(SERVICE)
        except ModuleNotFoundError:
            yield
            return
        with tracing_by(provider), tracing.within(self.traceparent):
            yield


def tracing_of_tasks() -> TaskTracing:
    """Return what joins tasks to the current span."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(_OTEL)}
    return TaskTracing(tracing.current_traceparent(), variables)


@contextmanager
def _completed(variables: Mapping[str, str]) -> Iterator[None]:
    """Have the environment's own variables and these in the body."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
