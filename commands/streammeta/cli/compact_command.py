"""`streammeta compact`: put set objects together from outside a broker, or say what that would do.

Owns what the commands are called and what they say; how to compact is the broker client's
business.
"""

from __future__ import annotations

import asyncio

import click

from streammeta.cli.compaction_request import CompactionRequest, request_options
from streammeta.cli.output import Duration, OutputFormat, command_output, format_option

RUN = "run"


class RunByDefault(click.Group):
    """A group that means `run` where its first word is an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put `run` before options that are not the group's own."""
        if args and args[0].startswith("-") and args[0] not in self.get_help_option_names(ctx):
            args = [RUN, *args]
        return super().parse_args(ctx, args)


@click.group(cls=RunByDefault)
def compact() -> None:
    """Turn many small set objects into few large ones, or say what that would save.

    `streammeta compact OPTIONS` is short for `streammeta compact run OPTIONS`. Brokers that use the
    Python client can compact by themselves; this is for those that don't, for nodes that are gone,
    and for trying things. It registers no node and fences nobody, and does no harm beside another
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
    help="Also merge and link the stream objects of the streams that these nodes own. Of nodes that"
    " are gone none.",
)
@click.option("--once", is_flag=True, help="Compact what is due, then end.  [default]")
@click.option(
    "--interval",
    "interval_ms",
    type=Duration(),
    metavar="DURATION",
    help="Do it again and again, so long after one another, until SIGTERM or Ctrl-C.",
)
@format_option
def run_command(
    *,
    request: CompactionRequest,
    stream_objects: bool,
    once: bool,
    interval_ms: int | None,
    output_format: OutputFormat,
) -> None:
    """Compact the set objects of some nodes.

    Speaks for each node with the epoch that its own process has registered. An object that can't be
    compacted is left as it is and named with the reason, which does not make the command fail. Exit
    code 1: more was left undone, because the store, the controllers or an object failed meanwhile.

    \b
    Examples:
      streammeta compact --connect 127.0.0.1:9091 --store file:///data --node 7 --budget 64MiB
      streammeta compact --connect 127.0.0.1:9091 --store file:///data --gone --interval 5m
    """
    if once and interval_ms is not None:
        raise click.UsageError("give --once or --interval, not both")
    with command_output(output_format) as output:
        from streammeta.cli.compaction_run import run  # numpy and boto3 load slowly

        try:
            asyncio.run(run(request, interval_ms, output, stream_objects=stream_objects))
        except asyncio.CancelledError:
            raise click.Abort from None


@compact.command("plan")
@request_options
@format_option
def plan_command(*, request: CompactionRequest, output_format: OutputFormat) -> None:
    """Say what a compaction would do now, and what it would save. Changes nothing.

    Reads the indexes of the set objects that would be compacted. Metadata is counted as bytes of a
    checkpoint. A cold read is one of all that the objects hold of one stream, with empty caches.
    Write amplification is what would be written for each byte that no compaction has written yet.

    \b
    Example:
      streammeta compact plan --connect 127.0.0.1:9091 --store file:///data --node 7
    """
    with command_output(output_format) as output:
        from streammeta.cli.compaction_run import plan

        asyncio.run(plan(request, output))
