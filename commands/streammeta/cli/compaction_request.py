"""What an operator asks of a compaction: where the cluster is, whose objects, within which bounds.

Owns the options that all commands of `streammeta compact` share, and what contradicts itself in
them. Asks nobody yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from streammeta.cli.client import connection_options
from streammeta.cli.node_command import NODE_ID_MAX
from streammeta.cli.output import ByteCount

if TYPE_CHECKING:
    from streammeta.client.compaction.config import CompactionConfig
    from streammeta.storage.object_store.base import ObjectStore

DEFAULT_BUDGET = "200MiB"
DEFAULT_SPLIT_SIZE = "8MiB"
DEFAULT_GROWTH = 8.0


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """Nodes by id; without any, with `gone` those whose process is gone, else all."""

    node_ids: tuple[int, ...] = ()
    gone: bool = False


@dataclass(frozen=True, slots=True)
class CompactionRequest:
    """One call of the command; sizes in bytes, `rate` in bytes a second, 0: as fast as it goes."""

    connect: tuple[str, ...]
    timeout_s: float
    store_uri: str
    choice: NodeChoice
    force_split: bool
    budget: int
    split_size: int
    growth: float
    rate: int

    def config(self) -> CompactionConfig:
        """Return the bounds of the compactor. Raises `click.UsageError` on what can't work."""
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
        """Open the bucket, which asks it nothing yet. Raises `click.UsageError`."""
        from streammeta.storage.object_store.address import open_object_store

        try:
            return open_object_store(self.store_uri)
        except ValueError as error:
            raise click.UsageError(str(error)) from error


def request_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the shared options: argument `request: CompactionRequest`."""

    @functools.wraps(command)
    def with_request(
        *,
        connect: tuple[str, ...],
        timeout_s: float,
        store_uri: str,
        node_ids: tuple[int, ...],
        every_node: bool,
        gone: bool,
        force_split: bool,
        budget: int,
        split_size: int,
        growth: float,
        rate: int,
        **others: Any,
    ) -> None:
        if sum((bool(node_ids), every_node, gone)) != 1:
            raise click.UsageError("say whose set objects: --node ID, --all or --gone")
        request = CompactionRequest(
            connect=connect,
            timeout_s=timeout_s,
            store_uri=store_uri,
            choice=NodeChoice(node_ids, gone),
            force_split=force_split,
            budget=budget,
            split_size=split_size,
            growth=growth,
            rate=rate,
        )
        command(request=request, **others)

    for option in reversed(_OPTIONS):
        with_request = option(with_request)
    return connection_options(with_request)


_OPTIONS = (
    click.option(
        "--store",
        "store_uri",
        required=True,
        metavar="URI",
        help="s3://BUCKET?endpoint=URL&region=R&pathStyle=true or file:///DIR. Give credentials in"
        " AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
    ),
    click.option(
        "--node",
        "node_ids",
        type=click.IntRange(0, NODE_ID_MAX),
        multiple=True,
        metavar="ID",
        help="Set objects of this node; may be repeated.",
    ),
    click.option("--all", "every_node", is_flag=True, help="Set objects of every node."),
    click.option(
        "--gone", is_flag=True, help="Set objects of nodes that have departed or are fenced."
    ),
    click.option(
        "--force-split",
        is_flag=True,
        help="Take set objects apart whatever their age: each stream gets objects of its own.",
    ),
    click.option(
        "--budget",
        type=ByteCount(),
        default=DEFAULT_BUDGET,
        show_default=True,
        metavar="SIZE",
        help="Memory for what is being copied.",
    ),
    click.option(
        "--split-size",
        type=ByteCount(),
        default=DEFAULT_SPLIT_SIZE,
        show_default=True,
        metavar="SIZE",
        help="A stream with more than this gets a stream object of its own.",
    ),
    click.option(
        "--growth",
        type=click.FloatRange(1, 1000),
        default=DEFAULT_GROWTH,
        show_default=True,
        help="Merge neighbours once they are together so many times as large as the largest:"
        " larger rewrites less, smaller leaves fewer objects.",
    ),
    click.option(
        "--rate",
        type=ByteCount(),
        default="0B",
        metavar="SIZE",
        help="Read, and write, at most so much a second.  [default: as fast as it goes]",
    ),
)
