"""Views of the quorum, gathered from every known controller. Read-only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import grpc

from streammeta.cli.framework import client, output
from streammeta.rpc import connections, failures
from streammeta.tls.files import CallerFiles
from streammeta.v1 import quorum_pb2 as pb
from streammeta.v1.quorum_pb2_grpc import QuorumServiceStub

ANSWER_TIMEOUT_S = 3.0
"""Timeout in seconds for one controller, so that a hanging one does not hide the others."""


LIVE_MS = 10_000
"""Milliseconds without a fetch after which an observer counts as stopped."""


@dataclass(slots=True)
class QuorumViews:
    """Answers by node id, and the endpoints without an answer with the reason."""

    answers: dict[int, pb.DescribeQuorumResponse] = field(default_factory=dict)
    silent: dict[str, failures.RpcFailure] = field(default_factory=dict)

    @property
    def leader(self) -> pb.DescribeQuorumResponse | None:
        """Answer of the leader. If several controllers claim leadership, the highest epoch wins."""
        claims = [answer for answer in self.answers.values() if answer.role == "leader"]
        return max(claims, key=lambda answer: answer.epoch, default=None)

    @property
    def newest(self) -> pb.DescribeQuorumResponse:
        """The leader's answer, or the one with the highest epoch. There must be an answer."""
        return self.leader or max(self.answers.values(), key=lambda answer: answer.epoch)


def gather_views(
    endpoints: Sequence[str], timeout_s: float, tls: CallerFiles | None = None
) -> QuorumViews:
    """Ask the given controllers, and the voters they name, all at once.

    Without `tls` the client uses plain text. Raises CallError if no controller answers.
    """
    views = QuorumViews()
    asked: set[str] = set()
    waiting = set(endpoints)
    # A new answer may name further voters, for example after a change of the voters.
    while waiting:
        asked |= waiting
        _ask(sorted(waiting), min(timeout_s, ANSWER_TIMEOUT_S), tls, views)
        known = {voter.endpoint for answer in views.answers.values() for voter in answer.voters}
        waiting = known - asked - {""}
    if not views.answers:
        raise client.no_controller_error(
            views.silent, "start one, or correct --connect", over_tls=tls is not None
        )
    return views


def _ask(
    endpoints: Sequence[str], timeout_s: float, tls: CallerFiles | None, views: QuorumViews
) -> None:
    channels = {endpoint: connections.operator_channel(endpoint, tls) for endpoint in endpoints}
    # All calls run at once, so that timeouts of silent controllers do not add up.
    calls = {
        endpoint: QuorumServiceStub(channel).DescribeQuorum.future(
            pb.DescribeQuorumRequest(), timeout=timeout_s
        )
        for endpoint, channel in channels.items()
    }

    for endpoint, call in calls.items():
        try:
            answer = call.result()
        except grpc.RpcError as error:
            views.silent[endpoint] = failures.read_failure(error, over_tls=tls is not None)
        else:
            views.answers[answer.node_id] = answer

    # Closing a channel cancels its calls, so this comes last.
    for channel in channels.values():
        channel.close()


def find_replica(
    node_id: int, directory_id: str | None, among: Sequence[pb.ReplicaStatus], what: str
) -> pb.ReplicaStatus:
    """Return the replica of this node, and of this disk if it is given.

    `what` is the kind of replica: "voter" or "observer".

    Raises:
        CommandError: no replica matches, or several with different disks.
    """
    of_node = [replica for replica in among if replica.key.node_id == node_id]
    found = [replica for replica in of_node if directory_id in (None, replica.key.directory_id)]
    if len(found) == 1:
        return found[0]
    if not found:
        disk = f" with directory {directory_id}" if directory_id else ""
        there = ", ".join(_names(among)) or "none"
        raise output.CommandError(
            f"{what.upper()}_NOT_FOUND",
            f"node {node_id}{disk} is not a {what}. The leader knows these: {there}",
            _MISSING_HINTS[what],
        )

    # Never guess: a change for the wrong disk could cost the majority.
    disks = ", ".join(replica.key.directory_id or "unknown" for replica in found)
    raise output.CommandError(
        "SEVERAL_DIRECTORIES",
        f"node {node_id} has several directories: {disks}",
        "select one with --directory-id",
    )


_MISSING_HINTS = {
    "observer": "start that controller with --seeds naming this cluster, and check that it"
    " fetches: `streammeta quorum describe`",
    "voter": "`streammeta quorum describe` lists the voters",
}


def live_observers(view: pb.DescribeQuorumResponse) -> list[pb.ReplicaStatus]:
    """Return the observers that fetch. A leader remembers stopped ones for a while."""
    return [
        observer
        for observer in view.observers
        if observer.key.directory_id
        and observer.HasField("last_fetch_age_ms")
        and observer.last_fetch_age_ms < LIVE_MS
    ]


def role_of(view: pb.DescribeQuorumResponse) -> str:
    """Return a controller's role in its own view. A follower that does not vote is an observer."""
    votes = any(voter.key.node_id == view.node_id for voter in view.voters)
    return view.role if votes or view.role == "leader" else "observer"


def _names(replicas: Sequence[pb.ReplicaStatus]) -> Iterator[str]:
    for replica in replicas:
        directory = f" ({replica.key.directory_id})" if replica.key.directory_id else ""
        yield f"node {replica.key.node_id}{directory}"
