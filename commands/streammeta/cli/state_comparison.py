"""Asks all members of a cluster for the hash of their map at one and the same offset.

A member's map goes on changing, so the offset is one that all of them can still reach: ahead of
the leader by what is likely to be written meanwhile, or the present end when nothing is written.
Misjudging that costs another attempt, never a wrong answer.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import grpc

from streammeta.cli.client import CallError, ControllerClient
from streammeta.cli.quorum_views import QuorumViews, gather_views, leaders_view, live_observers
from streammeta.rpc.connections import operator_channel
from streammeta.rpc.failures import RpcFailure, read_failure
from streammeta.v1 import admin_pb2
from streammeta.v1.admin_pb2_grpc import AdminServiceStub

RATE_SAMPLE_S = 0.25
"""How long the leader is watched to see whether, and how fast, it is written to."""

FIRST_LEAD_S = 0.5
"""How far ahead the first offset lies, in time at the rate seen; doubled with each attempt."""

STALLED_S = 1.0
"""When the leader has not moved for so long, an offset ahead of it is given up."""

_POLL_S = 0.1
_PASSED = "OFFSET_PASSED"
_TRY_AGAIN = frozenset({_PASSED, "CANCELLED"})


class Verdict(StrEnum):
    """How a member compares."""

    OK = "ok"
    DIFFERENT = "DIFFERENT"
    NO_ANSWER = "no answer"
    NOT_ASKED = "not asked"


@dataclass(frozen=True, slots=True)
class Member:
    """A controller: voter or observer; `endpoint` is empty if it is not known."""

    node_id: int | None
    endpoint: str
    is_leader: bool = False


@dataclass(frozen=True, slots=True)
class MemberState:
    """What a member said of its map, or why it did not; hashes are in hex."""

    member: Member
    verdict: Verdict
    state_hash: str = ""
    log_hash: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All members at one offset."""

    cluster_id: str
    at_offset: int
    members: tuple[MemberState, ...]

    def of(self, verdict: Verdict) -> list[MemberState]:
        """Return the members of this verdict."""
        return [each for each in self.members if each.verdict is verdict]


Answer = admin_pb2.StateHashResponse | RpcFailure


def compare_members(endpoints: Sequence[str], timeout_s: float) -> Comparison:
    """Compare the maps of the given controllers, and of all voters that their leader names.

    Raises:
        CallError: no leader was found, or no offset that all members reach within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    views = gather_views(endpoints, timeout_s)
    with ControllerClient(endpoints, timeout_s) as client:
        silent = _silent_members(views, client)
        asked = sorted(_answering_endpoints(views, endpoints))
        lead_s = FIRST_LEAD_S
        while True:
            at_offset = _choose_offset(client, lead_s)
            answers = _ask(client, asked, at_offset, deadline)
            if not any(_is_to_be_repeated(answer) for answer in answers.values()):
                break
            if time.monotonic() > deadline:
                raise CallError(
                    "NO_COMMON_OFFSET",
                    f"within {timeout_s:g} s there was no offset that all members reached",
                    "raise --timeout, or repeat when less is written",
                )
            lead_s *= 2
        leader_id = leaders_view(client).leader_id
    states = judge(answers, leader_id)
    return Comparison(views.newest.cluster_id, at_offset, (*states, *silent))


def judge(answers: Mapping[str, Answer], leader_id: int) -> list[MemberState]:
    """Compare with what most say, and in case of doubt with the leader; one row a member."""
    said = {
        answer.answered_by: (endpoint, answer)
        for endpoint, answer in answers.items()
        if isinstance(answer, admin_pb2.StateHashResponse)
    }
    wanted_hash = _most_common({node: one.hash for node, (_, one) in said.items()}, leader_id)
    wanted_log = _most_common(
        {node: one.log_hash for node, (_, one) in said.items() if one.log_hash}, leader_id
    )
    rows = []
    for node_id, (endpoint, one) in sorted(said.items()):
        is_equal = one.hash == wanted_hash and one.log_hash in (wanted_log, b"")
        rows.append(
            MemberState(
                Member(node_id, endpoint, is_leader=node_id == leader_id),
                Verdict.OK if is_equal else Verdict.DIFFERENT,
                one.hash.hex(),
                one.log_hash.hex(),
            )
        )
    rows += [
        MemberState(Member(None, endpoint), Verdict.NO_ANSWER, problem=answer.message)
        for endpoint, answer in sorted(answers.items())
        if isinstance(answer, RpcFailure)
    ]
    return rows


def _most_common(hashes: Mapping[int, bytes], leader_id: int) -> bytes:
    counts = Counter(hashes.values())
    most = max(counts.values(), default=0)
    leaders = hashes.get(leader_id, b"")
    if counts[leaders] == most:
        return leaders
    return next((value for value, count in counts.items() if count == most), b"")


def _answering_endpoints(views: QuorumViews, endpoints: Sequence[str]) -> set[str]:
    voters = {voter.endpoint for voter in views.newest.voters if voter.endpoint}
    return (set(endpoints) | voters) - set(views.silent)


def _silent_members(views: QuorumViews, client: ControllerClient) -> list[MemberState]:
    """Name voters and observers that won't be asked, because they do not answer."""
    leader = leaders_view(client)
    silent = []
    for voter in leader.voters:
        if voter.key.node_id not in views.answers:
            failure = views.silent.get(voter.endpoint)
            problem = failure.message if failure else "its address is not known"
            member = Member(voter.key.node_id, voter.endpoint)
            silent.append(MemberState(member, Verdict.NO_ANSWER, problem=problem))
    for observer in live_observers(leader):
        if observer.key.node_id not in views.answers:
            member = Member(observer.key.node_id, observer.endpoint)
            problem = "observers are asked only where --connect names them"
            silent.append(MemberState(member, Verdict.NOT_ASKED, problem=problem))
    named = {state.member.endpoint for state in silent}
    for endpoint, failure in views.silent.items():
        if endpoint not in named:
            member = Member(None, endpoint)
            silent.append(MemberState(member, Verdict.NO_ANSWER, problem=failure.message))
    return silent


def _choose_offset(client: ControllerClient, lead_s: float) -> int:
    began = time.monotonic()
    first = leaders_view(client)
    time.sleep(RATE_SAMPLE_S)
    second = leaders_view(client)
    written = second.end_offset - first.end_offset
    if written <= 0 and second.high_watermark == second.end_offset:
        return second.end_offset
    per_second = written / (time.monotonic() - began)
    return int(second.end_offset) + 1 + math.ceil(per_second * lead_s)


def _ask(
    client: ControllerClient, endpoints: Sequence[str], at_offset: int, deadline: float
) -> dict[str, Answer]:
    """Ask all at once; what waits for an offset that is not reached any more is given up."""
    channels = {endpoint: operator_channel(endpoint) for endpoint in endpoints}
    request = admin_pb2.StateHashRequest(at_offset=at_offset)
    timeout_s = max(1.0, deadline - time.monotonic())
    calls = {
        endpoint: AdminServiceStub(channel).StateHash.future(request, timeout=timeout_s)
        for endpoint, channel in channels.items()
    }
    moved_at, end_offset = time.monotonic(), -1
    try:
        while not all(call.done() for call in calls.values()):
            time.sleep(_POLL_S)
            if end_offset < at_offset:
                now_at = leaders_view(client).end_offset
                if now_at > end_offset:
                    moved_at, end_offset = time.monotonic(), now_at
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


def _is_to_be_repeated(answer: Answer) -> bool:
    return isinstance(answer, RpcFailure) and answer.reason in _TRY_AGAIN
