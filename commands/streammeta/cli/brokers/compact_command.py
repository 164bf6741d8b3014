"""`streammeta compact`: compaction of stream set objects from outside a broker, or a plan of it.

Owns the options and their contradictions. The broker client does the work.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import click

from streammeta.cli.brokers.node_command import NODE_ID_MAX
from streammeta.cli.framework.client import store_option
from streammeta.cli.framework.connecting import connection_options
from streammeta.cli.framework.output import ByteCount, Duration, Output, with_output
from streammeta.tls.files import TlsFiles, TokenFiles

if TYPE_CHECKING:
    from streammeta.client.compaction.config import CompactionConfig
    from streammeta.storage.object_store.protocol.base import ObjectStore

DEFAULT_BUDGET = "200MiB"
DEFAULT_SPLIT_SIZE = "8MiB"
DEFAULT_GROWTH = 8.0


@dataclass(frozen=True, slots=True)
class CompactionRequest:
    """One call of the command. Sizes are in bytes, `rate` in bytes per second, 0 for no limit.

    Nodes are selected by id. Without ids, `gone` selects departed and fenced ones, otherwise all.
    """

    connect: tuple[str, ...]
    timeout_s: float
    store: str
    node_ids: tuple[int, ...]
    gone: bool
    force_split: bool
    budget: int
    split_size: int
    growth: float
    rate: int
    tls: TlsFiles | None = None

    def config(self) -> CompactionConfig:
        """Return the bounds of the compactor. Raises `click.UsageError` on impossible values."""
        # numpy comes along with these.
        from streammeta.client.compaction.config import CompactionConfig
        from streammeta.storage.compaction.selection import SelectionConfig

        try:
            return CompactionConfig(
                memory_budget=self.budget,
                read_rate=self.rate,
                write_rate=self.rate,
                selection=SelectionConfig(growth=self.growth, split_size=self.split_size),
            )
        except ValueError as error:
            raise click.UsageError(str(error)) from error

    def open_store(self) -> ObjectStore:
        """Open the bucket without a request to it. Raises `click.UsageError`."""
        # boto3 loads slowly.
        from streammeta.storage.object_store.opening import open_object_store

        try:
            return open_object_store(self.store)
        except ValueError as error:
            raise click.UsageError(str(error)) from error


_FIELDS = fields(CompactionRequest)


def request_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the shared options: argument `request: CompactionRequest`."""

    @functools.wraps(command)
    def with_request(*, every_node: bool, **given: Any) -> None:
        # Tokens are for people's tools. Compaction makes the calls of a broker.
        if isinstance(given["tls"], TokenFiles):
            raise click.UsageError(
                "token-file: compaction needs a certificate. Set --tls-cert and --tls-key"
            )
        # Only the fields of the request. What remains are the options of the command itself.
        request = CompactionRequest(**{field.name: given.pop(field.name) for field in _FIELDS})
        if sum((bool(request.node_ids), every_node, request.gone)) != 1:
            raise click.UsageError("select the nodes: --node ID, --all or --gone")
        command(request=request, **given)

    # Reversed: click shows options in the reverse order of their decoration.
    for option in reversed(_OPTIONS):
        with_request = option(with_request)
    return connection_options()(with_request)


_OPTIONS = (
    store_option,
    click.option(
        "--node",
        "node_ids",
        type=click.IntRange(0, NODE_ID_MAX),
        multiple=True,
        metavar="ID",
        help="Compact stream set objects of this node. Repeatable.",
    ),
    click.option(
        "--all", "every_node", is_flag=True, help="Compact stream set objects of every node."
    ),
    click.option(
        "--gone",
        is_flag=True,
        help="Compact stream set objects of nodes that have departed or are fenced.",
    ),
    click.option(
        "--force-split",
        is_flag=True,
        help="Split stream set objects regardless of their age: each stream gets its own objects.",
    ),
    click.option(
        "--budget",
        type=ByteCount(),
        default=DEFAULT_BUDGET,
        show_default=True,
        metavar="SIZE",
        help="Memory for blocks and indexes in flight.",
    ),
    click.option(
        "--split-size",
        type=ByteCount(),
        default=DEFAULT_SPLIT_SIZE,
        show_default=True,
        metavar="SIZE",
        help="Size above which a stream gets its own stream object.",
    ),
    click.option(
        "--growth",
        type=click.FloatRange(1, 1000),
        default=DEFAULT_GROWTH,
        show_default=True,
        help="Merge neighbours once together they are this many times as large as the"
        " largest. A larger value rewrites less, a smaller one leaves fewer objects.",
    ),
    click.option(
        "--rate",
        type=ByteCount(),
        default="0B",
        metavar="SIZE",
        help="Maximum bytes read, and maximum bytes written, per second. [default: no limit]",
    ),
)


RUN = "run"


class RunByDefault(click.Group):
    """Group that runs `run` when its first word is an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert `run` before options that do not belong to the group."""
        # Words that are no options name a command of the group. --help must show the group's help.
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
    help="Also merge and link the stream objects of streams that these nodes own, except"
    " departed and fenced nodes.",
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
