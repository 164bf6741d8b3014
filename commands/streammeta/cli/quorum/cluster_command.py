"""`streammeta cluster` and `streammeta health`: queries to members of a cluster.

`cluster hash` asks all members for the hash of their metadata at one offset. Members keep changing,
so the offset must be one that all can still reach: ahead of the leader by the writes that are
expected meanwhile, or the present end when nothing is written. A wrong guess costs another attempt,
never a wrong result.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from streammeta.cli.framework.client import (
    CallError,
    ControllerClient,
    leaders_view,
    no_controller_error,
)
from streammeta.cli.framework.connecting import Endpoints, connecting, connection_options
from streammeta.cli.framework.output import CommandError, Output, with_output
from streammeta.cli.quorum import quorum_views
from streammeta.rpc.connections import operator_channel
from streammeta.rpc.failures import RpcFailure, read_failure
from streammeta.tls.files import CallerFiles
from streammeta.v1 import admin_pb2
from streammeta.v1.admin_pb2_grpc import AdminServiceStub

SERVICES = ("serving", "leader")


@click.command()
@connecting(Endpoints.ONE)
@click.option(
    "--service",
    type=click.Choice(SERVICES),
    default="serving",
    help="serving: the controller answers requests. leader: it leads and accepts writes.",
)
@click.option("--timeout", "timeout_s", default=3.0, help="Timeout in seconds.")
@with_output
def health(
    *,
    connect: tuple[str, ...],
    tls: CallerFiles | None,
    service: str,
    timeout_s: float,
    output: Output,
) -> None:
    """Exit 0 if a controller is healthy, 1 if not.

    \b
    Example:
      streammeta health --connect 127.0.0.1:9090 --service leader
    """
    (endpoint,) = connect
    status = _health_of(endpoint, tls, service, timeout_s)
    if status != "SERVING":
        raise CommandError(
            status, f"{endpoint} answers {status} for {service}", "see the controller's log"
        )
    output.summary({"endpoint": endpoint, "service": service, "status": status})


def _health_of(endpoint: str, tls: CallerFiles | None, service: str, timeout_s: float) -> str:
    # No search for the leader, because the question is about this controller.
    with operator_channel(endpoint, tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            raise no_controller_error(
                {endpoint: read_failure(error, over_tls=tls is not None)},
                "start it, or correct --connect",
                over_tls=tls is not None,
            ) from error
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name


RATE_SAMPLE_S = 0.25
"""Seconds over which the leader's write rate is measured."""

FIRST_LEAD_S = 0.5
"""Lead of the first offset, in seconds at the measured rate. Each attempt doubles it."""

STALLED_S = 1.0
"""Seconds without writes after which an offset ahead of the leader is abandoned."""

_POLL_S = 0.1
_PASSED = "OFFSET_PASSED"
# CANCELLED: this client gave up on an offset that was not reached.
_TRY_AGAIN = frozenset({_PASSED, "CANCELLED"})


class Verdict(StrEnum):
    """Result for a member."""

    OK = "ok"
    DIFFERENT = "DIFFERENT"
    NO_ANSWER = "no answer"
    NOT_ASKED = "not asked"


@dataclass(frozen=True, slots=True)
class MemberState:
    """Controller with the hashes of its metadata in hex, or the reason why they are missing.

    `node_id` is None and texts are empty while they are unknown.
    """

    node_id: int | None
    endpoint: str
    verdict: Verdict
    is_leader: bool = False
    state_hash: str = ""
    log_hash: str = ""
    problem: str = ""

    @property
    def name(self) -> str:
        """Name of the member for people."""
        return self.endpoint if self.node_id is None else f"controller {self.node_id}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """All members at one offset."""

    cluster_id: str
    at_offset: int
    members: tuple[MemberState, ...]

    def of(self, verdict: Verdict) -> list[MemberState]:
        """Return the members with this verdict."""
        return [member for member in self.members if member.verdict is verdict]


Answer = admin_pb2.StateHashResponse | RpcFailure


def compare_members(
    endpoints: Sequence[str], timeout_s: float, tls: CallerFiles | None = None
) -> Comparison:
    """Compare the metadata of the given controllers and of all voters that their leader names.

    Without `tls` the client uses plain text.

    Raises:
        CallError: no leader was found, or no offset that all members reach within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    views = quorum_views.gather_views(endpoints, timeout_s, tls)

    with ControllerClient(endpoints, timeout_s, tls) as client:
        silent = _silent_members(views, client)
        # Members that did not answer at first are not asked again. Each would cost the whole
        # timeout.
        asked = sorted(_answering_endpoints(views, endpoints))
        lead_s = FIRST_LEAD_S
        while True:
            at_offset = _choose_offset(client, lead_s)
            answers = _ask(client, asked, at_offset, deadline)
            # A single member without the offset makes the other answers incomparable.
            if not any(_needs_retry(answer) for answer in answers.values()):
                break
            if time.monotonic() > deadline:
                raise CallError(
                    "NO_COMMON_OFFSET",
                    f"no offset that all members reached was found within {timeout_s:g} s",
                    "raise --timeout, or repeat when the write rate is lower",
                )
            # Writes were faster than the requests. Aim further ahead.
            lead_s *= 2
        # Leadership may have moved during the attempts, so look at the end.
        leader_id = leaders_view(client).leader_id

    states = judge(answers, leader_id)
    return Comparison(views.newest.cluster_id, at_offset, (*states, *silent))


def judge(answers: Mapping[str, Answer], leader_id: int) -> list[MemberState]:
    """Compare with the majority's hashes, on a tie with the leader's. Return one row per member."""
    # Two addresses of one controller count once.
    said = {
        answer.answered_by: (endpoint, answer)
        for endpoint, answer in answers.items()
        if isinstance(answer, admin_pb2.StateHashResponse)
    }
    wanted_hash = _most_common({node: hashes.hash for node, (_, hashes) in said.items()}, leader_id)
    # A log hash may be missing, which is not a difference.
    wanted_log = _most_common(
        {node: hashes.log_hash for node, (_, hashes) in said.items() if hashes.log_hash}, leader_id
    )
    rows = []

    for node_id, (endpoint, hashes) in sorted(said.items()):
        is_equal = hashes.hash == wanted_hash and hashes.log_hash in (wanted_log, b"")
        rows.append(
            MemberState(
                node_id,
                endpoint,
                Verdict.OK if is_equal else Verdict.DIFFERENT,
                node_id == leader_id,
                hashes.hash.hex(),
                hashes.log_hash.hex(),
            )
        )

    rows += [
        MemberState(None, endpoint, Verdict.NO_ANSWER, problem=answer.message)
        for endpoint, answer in sorted(answers.items())
        if isinstance(answer, RpcFailure)
    ]
    return rows


def _most_common(hashes: Mapping[int, bytes], leader_id: int) -> bytes:
    counts = Counter(hashes.values())
    most = max(counts.values(), default=0)
    leaders = hashes.get(leader_id, b"")
    # On a tie the leader's hash wins, because clients read its metadata.
    if counts[leaders] == most:
        return leaders
    return next((value for value, count in counts.items() if count == most), b"")


def _answering_endpoints(views: quorum_views.QuorumViews, endpoints: Sequence[str]) -> set[str]:
    given = set(endpoints) - set(views.silent)
    voters = {voter.endpoint for voter in views.newest.voters if voter.endpoint}
    return given | voters - set(views.silent)


def _silent_members(views: quorum_views.QuorumViews, client: ControllerClient) -> list[MemberState]:
    """Return voters and observers that are not asked, because they do not answer."""
    leader = leaders_view(client)
    silent = []

    for voter in leader.voters:
        if voter.key.node_id not in views.answers:
            failure = views.silent.get(voter.endpoint)
            problem = failure.message if failure else "its address is unknown"
            member = (voter.key.node_id, voter.endpoint)
            silent.append(MemberState(*member, Verdict.NO_ANSWER, problem=problem))

    for observer in quorum_views.live_observers(leader):
        if observer.key.node_id not in views.answers:
            member = (observer.key.node_id, observer.endpoint)
            problem = "observers are only asked if --connect names them"
            silent.append(MemberState(*member, Verdict.NOT_ASKED, problem=problem))

    # Silent endpoints of voters are listed with their voter already.
    named = {state.endpoint for state in silent}
    silent += [
        MemberState(None, endpoint, Verdict.NO_ANSWER, problem=failure.message)
        for endpoint, failure in views.silent.items()
        if endpoint not in named
    ]
    return silent


def _choose_offset(client: ControllerClient, lead_s: float) -> int:
    began = time.monotonic()
    first = leaders_view(client)
    time.sleep(RATE_SAMPLE_S)
    second = leaders_view(client)
    written = second.end_offset - first.end_offset
    # Nothing is being written, and all is committed: every member can reach this end.
    if written <= 0 and second.high_watermark == second.end_offset:
        return second.end_offset
    per_second = written / (time.monotonic() - began)
    # Ahead of the leader by the expected writes, so that no member passes it before it is asked.
    return int(second.end_offset) + 1 + math.ceil(per_second * lead_s)


def _ask(
    client: ControllerClient, endpoints: Sequence[str], at_offset: int, deadline: float
) -> dict[str, Answer]:
    """Ask all members at once. Cancel calls for an offset that some member can't reach."""
    channels = {endpoint: operator_channel(endpoint, client.tls) for endpoint in endpoints}
    request = admin_pb2.StateHashRequest(at_offset=at_offset)
    # An attempt with less time would only fail.
    timeout_s = max(1.0, deadline - time.monotonic())
    calls = {
        endpoint: AdminServiceStub(channel).StateHash.future(request, timeout=timeout_s)
        for endpoint, channel in channels.items()
    }
    moved_at, end_offset = time.monotonic(), -1

    try:
        while not all(call.done() for call in calls.values()):
            time.sleep(_POLL_S)
            # Once the leader has reached the offset, members only need time to compute their
            # hashes.
            if end_offset < at_offset:
                now_at = leaders_view(client).end_offset
                if now_at > end_offset:
                    moved_at, end_offset = time.monotonic(), now_at
            # Writes have stopped before the offset, so that nobody will reach it.
            if end_offset < at_offset and time.monotonic() - moved_at > STALLED_S:
                for call in calls.values():
                    call.cancel()
        return {endpoint: _result(call) for endpoint, call in calls.items()}
    finally:
        for channel in channels.values():
            channel.close()


def _result(call: grpc.Future[admin_pb2.StateHashResponse]) -> Answer:
    try:
        return call.result()
    except grpc.FutureCancelledError:
        return RpcFailure(grpc.StatusCode.CANCELLED, "the offset was not reached", "CANCELLED")
    except grpc.RpcError as error:
        return read_failure(error)


def _needs_retry(answer: Answer) -> bool:
    return isinstance(answer, RpcFailure) and answer.reason in _TRY_AGAIN


HASH_TIMEOUT_S = 60.0
"""Timeout in seconds. Every member hashes its whole metadata, which takes seconds if it is large.

"""

_COLUMNS = ("node_id", "leader", "endpoint", "verdict", "state_hash", "log_hash", "problem")


@click.group()
def cluster() -> None:
    """Show all members of a cluster at once.

    \b
    Example:
      streammeta cluster hash --connect 127.0.0.1:9091
    """


@cluster.command("hash")
@connection_options(HASH_TIMEOUT_S)
@with_output
def hash_command(
    connect: tuple[str, ...], tls: CallerFiles | None, timeout_s: float, output: Output
) -> None:
    """Compare the metadata of all members at one offset of the log. Exit 1 unless all are equal.

    The command asks the leader's voters and the controllers that --connect names, while writes
    continue. The state hash covers the metadata, the log hash every record that led to it.
    Observers that --connect does not name are listed as `not asked`, because their addresses are
    unknown. They are not a failure.

    \b
    Example:
      streammeta cluster hash --connect 127.0.0.1:9091,127.0.0.1:9092
    """
    compared = compare_members(connect, timeout_s, tls)
    problem = _problem(compared)
    output.summary(
        {
            "cluster_id": compared.cluster_id,
            "at_offset": compared.at_offset,
            "verdict": "ok" if problem is None else problem.code,
        }
    )

    output.note("")
    output.rows("members", _COLUMNS, _rows(compared))
    if problem is not None:
        # People see the rows above. json has them as details of the error.
        problem.details = output.collected
        raise problem


def _rows(compared: Comparison) -> Iterator[tuple[object, ...]]:
    for member in compared.members:
        texts = (member.state_hash or None, member.log_hash or None, member.problem or None)
        yield member.node_id, member.is_leader, member.endpoint or None, str(member.verdict), *texts


def _problem(compared: Comparison) -> CommandError | None:
    different = compared.of(Verdict.DIFFERENT)
    # A difference is a defect, and more serious than a missing answer.
    if different:
        names = ", ".join(member.name for member in different)
        return CommandError(
            "DIFFERENT",
            f"{names}: the metadata at offset {compared.at_offset} differs from the other members",
            "keep a copy of its data directory and report the defect. Then stop it and"
            " replace its disk as docs/operations/repair.md describes, so that it copies the"
            " metadata from the leader",
        )

    silent = compared.of(Verdict.NO_ANSWER)
    if silent:
        names = ", ".join(member.name for member in silent)
        return CommandError(
            "NO_ANSWER",
            f"{names}: did not answer and was not compared. The others are equal",
            "start it, or name its address in --connect, then repeat",
        )

    return None
