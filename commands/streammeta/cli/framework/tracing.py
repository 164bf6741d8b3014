"""The option `--tracing`, and traces of a process that runs as a command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from streammeta.cli.framework.client import Command
from streammeta.rpc.trace_export import otlp_provider, tracing_by
from streammeta.storage.installation import optional_packages


def tracing_option(traced: str) -> Callable[[Command], Command]:
    """Add `--tracing` to a command. `traced` names the traced work in its help."""
    return click.option(
        "--tracing",
        is_flag=True,
        help=f"Trace {traced}, and send spans by OTLP. The OTEL_* variables configure the"
        " exporter. Needs the extra tracing.",
    )


@contextmanager
def exporting_traces(service: str, *, wanted: bool) -> Iterator[None]:
    """Trace in the body if `wanted`, as `service` unless the environment names another.

    Raises `MissingPackageError` if the extra is not installed.
    """
    # Import nothing of OpenTelemetry unless traces are wanted.
    if not wanted:
        yield
        return
    with optional_packages("--tracing", "tracing"):
        provider = otlp_provider(service)
    with tracing_by(provider):
        yield
