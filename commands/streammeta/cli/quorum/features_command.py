"""`streammeta features`: describe the feature level of a cluster, raise it, lower it."""

from __future__ import annotations

from collections.abc import Iterator

import click

from streammeta.cli.framework.client import (
    ControllerClient,
    add_options,
    describe_cluster,
    leaders_view,
)
from streammeta.cli.framework.connecting import with_client
from streammeta.cli.framework.output import CommandError, Output, with_output
from streammeta.controller.features import ADDED, BASE_LEVEL
from streammeta.shell.documents import field_value
from streammeta.v1 import admin_pb2, admin_pb2_grpc

_CONTROLLER_COLUMNS = ("node_id", "voter", "endpoint", "version", "lowest", "highest")
_LEVEL_COLUMNS = ("level", "in_force", "adds")


@click.group()
def features() -> None:
    """Show and change the feature level of the cluster's log and checkpoints.

    A new version runs at the level of the previous one, so that each controller can return to its
    older version. Raise the level once all controllers run the new version without problems.

    \b
    Example:
      streammeta features describe --connect 127.0.0.1:9091
    """


@features.command()
@with_client()
@with_output
def describe(client: ControllerClient, output: Output) -> None:
    """Show the current level, the versions of all controllers and their levels.

    The version of a controller that is not connected to the leader is unknown.

    \b
    Example:
      streammeta features describe --connect 127.0.0.1:9091
    """
    leader_id = leaders_view(client).leader_id
    seen = describe_cluster(client)

    # Leadership may move between the two calls. A follower does not know the others' versions.
    if seen.answered_by != leader_id:
        raise CommandError(
            "ANOTHER_LEADS",
            f"controller {seen.answered_by} answered, and controller {leader_id} led before",
            "repeat the command: only the leader knows the versions of the others",
        )

    output.summary({"cluster_id": seen.cluster_id, "level": seen.feature_level})
    output.note("")
    output.rows("controllers", _CONTROLLER_COLUMNS, map(_controller_row, seen.controllers))
    output.note("")
    output.rows("levels", _LEVEL_COLUMNS, _level_rows(seen.feature_level))


def _controller_row(controller: admin_pb2.Controller) -> tuple[object, ...]:
    return (
        controller.node_id,
        controller.voter,
        controller.endpoint or None,
        controller.version or None,
        field_value(controller, "lowest_level"),
        field_value(controller, "highest_level"),
    )


def _level_rows(in_force: int) -> Iterator[tuple[object, ...]]:
    # The cluster's level may be newer than this program and missing in ADDED.
    for level in sorted({*ADDED, in_force}):
        yield level, level <= in_force, ADDED.get(level)


_change_options = add_options(
    click.option(
        "--to",
        "level",
        type=click.IntRange(min=BASE_LEVEL),
        required=True,
        metavar="LEVEL",
        help="New level.",
    ),
    click.option("--dry-run", is_flag=True, help="Only check whether the change is possible."),
)


@features.command()
@with_client()
@_change_options
@with_output
def upgrade(client: ControllerClient, level: int, dry_run: bool, output: Output) -> None:
    """Raise the level, and wait for the commit. Exit 1 if a controller does not support it.

    Every voter must be connected to the leader. Remove a lost voter first. Older versions can't be
    started again afterwards: they reject the directory, and name the level.

    \b
    Example:
      streammeta features upgrade --connect 127.0.0.1:9091 --to 2 --dry-run
    """
    _change(client, level, output, is_lower=False, dry_run=dry_run)


@features.command()
@with_client()
@_change_options
@with_output
def downgrade(client: ControllerClient, level: int, dry_run: bool, output: Output) -> None:
    """Lower the level, so that older versions can start. Exit 1 if they could not read all data.

    The controllers reject the change if log or checkpoints contain entries of the higher level.
    Before the level was raised no downgrade is needed: start the older version.

    \b
    Example:
      streammeta features downgrade --connect 127.0.0.1:9091 --to 1 --dry-run
    """
    _change(client, level, output, is_lower=True, dry_run=dry_run)


def change_level(
    client: ControllerClient, level: int, *, is_lower: bool = False, dry_run: bool = False
) -> admin_pb2.UpdateFeatureLevelResponse:
    """Set the cluster's feature level, or only check it with `dry_run`. Raises `CallError`."""
    return client.call(
        lambda channel: admin_pb2_grpc.AdminServiceStub(channel).UpdateFeatureLevel,
        admin_pb2.UpdateFeatureLevelRequest(level=level, dry_run=dry_run, lower=is_lower),
    )


def _change(
    client: ControllerClient, level: int, output: Output, *, is_lower: bool, dry_run: bool
) -> None:
    answer = change_level(client, level, is_lower=is_lower, dry_run=dry_run)
    output.summary({"level_before": answer.before, "level": answer.level, "dry_run": dry_run})
