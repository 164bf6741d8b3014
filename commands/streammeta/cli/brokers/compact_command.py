"""`streammeta compact`: compaction of stream set objects from outside a broker, or a plan of it.

Owns the commands and their help. The broker client does the work.
"""

from __future__ import annotations

import asyncio

import click

from streammeta.cli.brokers.compaction_request import CompactionRequest, request_options
from streammeta.cli.framework.output import Duration, Output, with_output

RUN = "run"


class RunByDefault(click.Group):
    """Group that runs `run` when its first word is an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert `run` before options that do not belong to the group."""
        # Words other than options name a command of the group. --help must show the group's help.
        if args and args[0].startswith("-") and args[0] not in self.get_help_option_names(ctx):
            args = [RUN, *args]
        return super().parse_args(ctx, args)


@click.group(cls=RunByDefault)
def compact() -> None:
    """Merge many small stream set objects into few large ones, or show the savings.

    `streammeta compact OPTIONS` is short for `streammeta compact run OPTIONS`. Brokers that use the
    Python client can compact by themselves. This command is for other brokers, for departed nodes,
    and for experiments. It registers and fences no node, and may run together with another
    compaction of the same objects.

    \b
    Examples:
      streammeta compact plan --connect 127.0.0.1:9091 --store file:///data --node 7
      streammeta compact --connect 127.0.0.1:9091 --store file:///data --node 7
    """


@compact.command(RUN)
@request_options
@click.option(
    "--stream-objects",
    is_flag=True,
    help="Also merge and link the stream objects of streams that these nodes own, and of shared"
    " streams, except for departed and fenced nodes.",
)
@click.option("--once", is_flag=True, help="Compact the due objects, then exit. [default]")
@click.option(
    "--interval",
    "interval_ms",
    type=Duration(),
    metavar="DURATION",
    help="Pause between repeated compactions, until SIGTERM or Ctrl-C.",
)
@with_output
def run_command(
    *,
    request: CompactionRequest,
    stream_objects: bool,
    once: bool,
    interval_ms: int | None,
    output: Output,
) -> None:
    """Compact the stream set objects of some nodes.

    The command uses the epoch that each node's own process registered. An object that can't be
    compacted stays unchanged and is listed with the reason, which is not a failure. Exit code 1:
    work remains, because the store, the controllers or an object failed meanwhile.

    \b
    Examples:
      streammeta compact --connect 127.0.0.1:9091 --store file:///data --node 7 --budget 64MiB
      streammeta compact --connect 127.0.0.1:9091 --store file:///data --gone --interval 5m
    """
    if once and interval_ms is not None:
        raise click.UsageError("use --once or --interval, not both")
    from streammeta.cli.brokers.compaction_run import run  # numpy and boto3 load slowly

    try:
        asyncio.run(run(request, interval_ms, output, stream_objects=stream_objects))
    # The second signal cancels the task. For the user that is an interruption like any other.
    except asyncio.CancelledError:
        raise click.Abort from None


@compact.command("plan")
@request_options
@with_output
def plan_command(*, request: CompactionRequest, output: Output) -> None:
    """Show the work of a compaction now, and its savings. Change nothing.

    The command reads the indexes of the stream set objects. Metadata is counted as bytes of a
    checkpoint. A cold read reads all offsets of one stream in these objects with empty caches.
    Write amplification is the number of bytes written per byte that no compaction has written yet.

    \b
    Example:
      streammeta compact plan --connect 127.0.0.1:9091 --store file:///data --node 7
    """
    # numpy and boto3 load slowly.
    from streammeta.cli.brokers.compaction_run import plan

    asyncio.run(plan(request, output))
