"""Request for one compaction: the options that the commands of `streammeta compact` share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import click

from streammeta.cli.brokers.node_command import NODE_ID_MAX
from streammeta.cli.framework import client, connecting, output
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

    return connecting.connection_options()(client.add_options(*_OPTIONS)(with_request))


_OPTIONS = (
    client.store_option,
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
        type=output.ByteCount(),
        default=DEFAULT_BUDGET,
        metavar="SIZE",
        help="Memory for blocks and indexes in flight.",
    ),
    click.option(
        "--split-size",
        type=output.ByteCount(),
        default=DEFAULT_SPLIT_SIZE,
        metavar="SIZE",
        help="Size above which a stream gets its own stream object.",
    ),
    click.option(
        "--growth",
        type=click.FloatRange(1, 1000),
        default=DEFAULT_GROWTH,
        help="Merge neighbours once together they are this many times as large as the"
        " largest. A larger value rewrites less, a smaller one leaves fewer objects.",
    ),
    click.option(
        "--rate",
        type=output.ByteCount(),
        default="0B",
        show_default=False,
        metavar="SIZE",
        help="Maximum bytes read, and maximum bytes written, per second. [default: no limit]",
    ),
)
