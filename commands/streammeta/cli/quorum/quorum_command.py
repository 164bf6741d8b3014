"""`streammeta quorum`: describe leader, voters and lag, change voters, transfer leadership."""

from __future__ import annotations

from collections.abc import Iterator

import click

from streammeta.cli.framework.client import ControllerClient, leaders_view
from streammeta.cli.framework.connecting import connection_options, with_client
from streammeta.cli.framework.output import CommandError, Output, with_output
from streammeta.cli.quorum.quorum_views import (
    QuorumViews,
    find_replica,
    gather_views,
    live_observers,
    role_of,
)
from streammeta.controller.config import CONTROLLER_ID_MAX, check_reachable
from streammeta.shell.documents import field_value, iso_time
from streammeta.tls.files import CallerFiles
from streammeta.v1 import admin_pb2, admin_pb2_grpc, quorum_pb2_grpc
from streammeta.v1 import quorum_pb2 as pb

CHANGE_TIMEOUT_S = 60.0
"""Timeout in seconds of slow changes: a new voter catches up, a snapshot writes all metadata."""

_SHARE_OF_TIMEOUT = 0.9
"""The controller's timeout is a little shorter than this command's, so that its reason arrives."""

_REPLICA_COLUMNS = (
    *("node_id", "role", "endpoint", "peer_endpoint", "end_offset", "lag"),
    *("last_fetch_ms", "last_caught_up_ms", "directory_id"),
)
_CONTROLLER_COLUMNS = (
    *("node_id", "role", "epoch", "log_start", "log_end", "high_watermark"),
    *("snapshot_end", "repairing", "disk_full"),
)

_POLICY_COLUMNS = ("node_id", "sha256", "loaded")

node_id_option = click.option(
    "--node-id",
    type=click.IntRange(0, CONTROLLER_ID_MAX),
    required=True,
    help="Id of the controller.",
)
directory_id_option = click.option(
    "--directory-id",
    metavar="UUID",
    help="Id of its data directory. [default: the id that the leader knows]",
)


@click.group()
def quorum() -> None:
    """Show and change the voters and the leader.

    \b
    Example:
      streammeta quorum describe --connect 127.0.0.1:9091
    """


@quorum.command()
@connection_options()
@with_output
def describe(
    connect: tuple[str, ...], tls: CallerFiles | None, timeout_s: float, output: Output
) -> None:
    """Show a summary of the quorum, every replica as the leader sees it, and every controller.

    Lag is the number of offsets between a replica and the leader. Times are milliseconds since the
    replica last fetched, and since it last had all entries. Controllers report whether they repair
    damage (and do not vote meanwhile), whether their disk is full, and which policy they use.

    \b
    Example:
      streammeta quorum describe --connect 127.0.0.1:9091,127.0.0.1:9092
    """
    _say(output, gather_views(connect, timeout_s, tls))


def _say(output: Output, views: QuorumViews) -> None:
    newest, leader = views.newest, views.leader
    output.summary(
        {
            "cluster_id": newest.cluster_id,
            "leader_id": leader.node_id if leader else None,
            "epoch": newest.epoch,
            "high_watermark": newest.high_watermark,
            "voter_ids": [voter.key.node_id for voter in newest.voters],
            "observer_ids": [observer.key.node_id for observer in live_observers(newest)],
            "policy": _agreement(views),
        }
    )

    output.note("")
    output.rows("replicas", _REPLICA_COLUMNS, _replica_rows(newest))
    output.note("")
    output.rows("controllers", _CONTROLLER_COLUMNS, _controller_rows(views))
    # Without any policy the table would only have blanks.
    if any(view.policy_sha256 for view in views.answers.values()):
        output.note("")
        output.rows("policies", _POLICY_COLUMNS, _policy_rows(views))
    if silent := [*_silent_rows(views)]:
        output.note("")
        output.rows("silent", ("endpoint", "reason"), silent)


def _replica_rows(view: pb.DescribeQuorumResponse) -> Iterator[tuple[object, ...]]:
    for role, replicas in (("follower", view.voters), ("observer", live_observers(view))):
        for replica in replicas:
            # An end offset of 0 is not the same as an unknown one.
            end_offset = replica.end_offset if replica.HasField("end_offset") else None
            yield (
                replica.key.node_id,
                "leader" if replica.key.node_id == view.leader_id else role,
                replica.endpoint or None,
                replica.peer_endpoint or None,
                end_offset,
                # A replica may have progressed since the leader's end offset was read. A lag is
                # never negative.
                None if end_offset is None else max(0, view.end_offset - end_offset),
                field_value(replica, "last_fetch_age_ms"),
                field_value(replica, "last_caught_up_age_ms"),
                replica.key.directory_id or None,
            )


def _controller_rows(views: QuorumViews) -> Iterator[tuple[object, ...]]:
    for node_id, view in sorted(views.answers.items()):
        yield (
            node_id,
            role_of(view),
            view.epoch,
            view.log_start_offset,
            view.end_offset,
            view.high_watermark,
            view.snapshot_id.end_offset if view.HasField("snapshot_id") else None,
            view.repairing,
            view.disk_full,
        )


def _agreement(views: QuorumViews) -> str:
    """Return whether all answering controllers use one policy."""
    policies = {view.policy_sha256 for view in views.answers.values()}
    if policies == {""}:
        return "none"
    return "equal" if len(policies) == 1 else "DIFFERENT"


def _policy_rows(views: QuorumViews) -> Iterator[tuple[object, ...]]:
    for node_id, view in sorted(views.answers.items()):
        loaded = view.policy_loaded_ms if view.HasField("policy_loaded_ms") else None
        yield node_id, view.policy_sha256 or None, None if loaded is None else iso_time(loaded)


def _silent_rows(views: QuorumViews) -> Iterator[tuple[object, ...]]:
    """Return controllers that did not answer, and voters that could not be asked."""
    for endpoint, failure in views.silent.items():
        yield endpoint, failure.message
    # Some voters are known by their peer address only, where clients get no answer.
    for voter in views.newest.voters:
        if not voter.endpoint and voter.key.node_id not in views.answers:
            where = voter.peer_endpoint
            yield (
                None,
                (f"voter {voter.key.node_id}, {where} to its peers, has no known client address"),
            )


@quorum.command("add-voter")
@with_client(CHANGE_TIMEOUT_S)
@node_id_option
@click.option(
    "--endpoint",
    required=True,
    metavar="HOST:PORT",
    help="Address of the controller for its peers: its --peer-advertise.",
)
@directory_id_option
@with_output
def add_voter(
    *,
    client: ControllerClient,
    node_id: int,
    endpoint: str,
    directory_id: str | None,
    output: Output,
) -> None:
    """Make a running observer a voter, and wait for the commit.

    Start the controller first, on a directory formatted with --join: it becomes an observer.
    Repeating the command is harmless.

    \b
    Example:
      streammeta quorum add-voter --connect 127.0.0.1:9091 --node-id 4 --endpoint 127.0.0.1:9104
    """
    # A wrong endpoint would be committed with the voter set, and peers could not reach the voter.
    check_reachable("endpoint", endpoint)
    view = leaders_view(client)
    # Look among the voters first: after a repeated command the node is no longer an observer.
    if directory_id is None:
        directory_id = _voting_disk(view, node_id, endpoint)
    if directory_id is None:
        observer = find_replica(node_id, None, live_observers(view), "observer")
        directory_id = observer.key.directory_id
    key = pb.ReplicaKey(node_id=node_id, directory_id=directory_id)
    answer = client.call(
        lambda channel: quorum_pb2_grpc.QuorumServiceStub(channel).AddVoter,
        pb.AddVoterRequest(
            cluster_id=view.cluster_id,
            voter=pb.Voter(key=key, endpoint=endpoint),
            timeout_ms=_controllers_timeout_ms(client),
        ),
    )

    output.summary(
        {"added": node_id, "directory_id": directory_id, "end_offset": answer.end_offset}
    )


def _voting_disk(view: pb.DescribeQuorumResponse, node_id: int, endpoint: str) -> str | None:
    """Return the disk of this node if it already votes, else None.

    A disk means that the command was repeated, unless endpoint or disk differ.

    Raises:
        CommandError: another replica of the node votes. The message is the controller's.
    """
    observers = [observer for observer in live_observers(view) if observer.key.node_id == node_id]
    for voter in view.voters:
        if voter.key.node_id != node_id:
            continue
        # With an observer of the same node the user means another disk, which is not a repetition.
        if voter.peer_endpoint == endpoint and voter.key.directory_id and not observers:
            return voter.key.directory_id
        raise CommandError(
            "DUPLICATE_VOTER",
            f"node {node_id} already votes, at {voter.peer_endpoint}",
            "nothing was changed. To replace its disk, remove this voter first: "
            f"streammeta quorum remove-voter --node-id {node_id}",
        )
    return None


@quorum.command("remove-voter")
@with_client(CHANGE_TIMEOUT_S)
@node_id_option
@directory_id_option
@with_output
def remove_voter(
    *,
    client: ControllerClient,
    node_id: int,
    directory_id: str | None,
    output: Output,
) -> None:
    """Remove a voter, and wait for the commit.

    The controller may run or be lost. A running one remains an observer until it is stopped. The
    leader may be removed too and transfers leadership first. Repeating the command is harmless:
    `was_voter` is false for a node that does not vote.

    \b
    Example:
      streammeta quorum remove-voter --connect 127.0.0.1:9091 --node-id 3
    """
    view = leaders_view(client)
    # A node that does not vote is sent as well. The leader answers a repetition like the first
    # call.
    was_voter = any(voter.key.node_id == node_id for voter in view.voters)
    key = pb.ReplicaKey(node_id=node_id, directory_id=directory_id or "")
    if was_voter:
        key = find_replica(node_id, directory_id, view.voters, "voter").key
    answer = client.call(
        lambda channel: quorum_pb2_grpc.QuorumServiceStub(channel).RemoveVoter,
        pb.RemoveVoterRequest(
            cluster_id=view.cluster_id, key=key, timeout_ms=_controllers_timeout_ms(client)
        ),
    )

    output.summary(
        {
            "removed": node_id,
            "was_voter": was_voter,
            "directory_id": key.directory_id or None,
            "end_offset": answer.end_offset,
        }
    )


@quorum.command()
@with_client()
@click.option(
    "--to",
    type=click.IntRange(0, CONTROLLER_ID_MAX),
    help="The next leader. [default: the voter with the highest end offset]",
)
@with_output
def transfer(client: ControllerClient, to: int | None, output: Output) -> None:
    """Transfer leadership to another voter, and wait until it leads.

    \b
    Example:
      streammeta quorum transfer --connect 127.0.0.1:9091 --to 2
    """
    before = leaders_view(client).leader_id
    if to != before:  # so that a repeated command does no harm
        client.call(
            lambda channel: admin_pb2_grpc.AdminServiceStub(channel).TransferLeadership,
            admin_pb2.TransferLeadershipRequest(to_node_id=to),
        )

    # The call returns once the old leader has stepped down. Only another look shows the result.
    after = leaders_view(client)
    if to not in (None, after.leader_id):
        raise CommandError(
            "ANOTHER_LEADS",
            f"controller {after.leader_id} was elected, not {to}",
            "check its lag with `streammeta quorum describe`, then repeat",
        )
    output.summary({"leader_before": before, "leader_id": after.leader_id, "epoch": after.epoch})


@quorum.command()
@connection_options(CHANGE_TIMEOUT_S)
@with_output
def snapshot(
    connect: tuple[str, ...], tls: CallerFiles | None, timeout_s: float, output: Output
) -> None:
    """Write a snapshot now, at each controller that --connect names.

    Controllers write snapshots automatically. Use this before an upgrade or a backup.

    \b
    Example:
      streammeta quorum snapshot --connect 127.0.0.1:9091
    """
    rows = []
    # A snapshot belongs to one controller. A client with several endpoints would ask the leader.
    for endpoint in connect:
        with ControllerClient([endpoint], timeout_s, tls) as client:
            taken = client.call(
                lambda channel: admin_pb2_grpc.AdminServiceStub(channel).TakeSnapshot,
                admin_pb2.TakeSnapshotRequest(),
            )
        rows.append((taken.answered_by, endpoint, taken.end_offset, taken.epoch))
    output.rows("snapshots", ("node_id", "endpoint", "end_offset", "epoch"), rows)


def _controllers_timeout_ms(client: ControllerClient) -> int:
    return max(1, int(client.timeout_s * 1000 * _SHARE_OF_TIMEOUT))
