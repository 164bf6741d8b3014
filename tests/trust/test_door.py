"""The authenticator: identities, and rejections before a request is read or a leader is named."""

from __future__ import annotations

import hashlib
from typing import Any

import grpc
import pytest

from streammeta.controller.rpc.calls.error_mapping import classify
from streammeta.controller.rpc.calls.interceptors import CallPipeline
from streammeta.controller.trust import authenticator as authenticator_module
from streammeta.controller.trust.authenticator import (
    ANONYMOUS,
    Authenticator,
    Caller,
    current_caller,
)
from streammeta.controller.trust.policy import parse_policy
from streammeta.controller.trust.refusals import NoIdentityError, RoleLacksCallError
from streammeta.tls.identity import Principal, Role
from streammeta.v1 import common_pb2
from tests.trust.callers import CLUSTER, PLAIN_TEXT, ShownContext, shown

GET_KVS = "streammeta.v1.KVService.GetKVs"
HEALTH = "grpc.health.v1.Health.Check"
BROKER = Principal(CLUSTER, Role.BROKER, "1007")
MONITOR = Principal(CLUSTER, Role.MONITOR, "prometheus")


def test_a_caller_has_the_principal_and_the_fingerprint_of_its_certificate() -> None:
    caller = Authenticator(CLUSTER).authenticate(GET_KVS, shown(BROKER, certificate=b"leaf"))
    assert caller.principal == BROKER
    assert caller.name == "broker/1007"
    assert caller.fingerprint == hashlib.sha256(b"leaf").hexdigest()
    assert current_caller() is caller


def test_uris_of_others_are_passed_over() -> None:
    assert (
        Authenticator(CLUSTER).authenticate(GET_KVS, shown("spiffe://x/y", BROKER)).principal
        == BROKER
    )


@pytest.mark.parametrize(
    ("context", "why"),
    [
        (shown(), "found none"),
        (shown("spiffe://x/y"), "found none"),
        (shown(BROKER, MONITOR), "found 2"),
        (shown("streammeta://test/lord/x"), "role 'lord'"),
        (shown(Principal("other", Role.ADMIN, "eve")), "another cluster"),
        (ShownContext({"transport_security_type": [b"ssl"]}), "the client showed none"),
        (ShownContext({}), "the client showed none"),
    ],
)
def test_no_identity_of_this_cluster_is_no_way_in(context: ShownContext, why: str) -> None:
    authenticator = Authenticator(CLUSTER)
    for _ in range(2):
        with pytest.raises(NoIdentityError, match=why) as refused:
            authenticator.authenticate(GET_KVS, context)
    code, reason, metadata = classify(refused.value)
    assert (code, reason, metadata) == (grpc.StatusCode.UNAUTHENTICATED, "NO_IDENTITY", {})


def test_whoever_comes_in_plain_text_is_let_in_and_held_to_nothing() -> None:
    authenticator = Authenticator(CLUSTER)
    assert (
        authenticator.authenticate("streammeta.v1.QuorumService.RemoveVoter", PLAIN_TEXT)
        is ANONYMOUS
    )
    assert ANONYMOUS.held_to is None
    assert ANONYMOUS.name == "anonymous"


def test_a_refused_role_hears_who_may() -> None:
    with pytest.raises(RoleLacksCallError) as refused:
        Authenticator(CLUSTER).authenticate(GET_KVS, shown(MONITOR))
    code, reason, metadata = classify(refused.value)
    assert (code, reason) == (grpc.StatusCode.PERMISSION_DENIED, "ROLE_LACKS_CALL")
    assert metadata == {
        "principal": "monitor/prometheus",
        "needs": "role admin or broker or reader or reconciler",
    }
    assert str(refused.value) == (
        "monitor/prometheus may not call KVService/GetKVs: it needs role admin or broker or reader"
        " or reconciler"
    )


def test_a_broker_is_held_to_its_node_and_a_compactor_is_not() -> None:
    authenticator, commit = Authenticator(CLUSTER), "streammeta.v1.ObjectService.CommitPipeline"
    assert authenticator.authenticate(commit, shown(BROKER)).held_to == BROKER
    compactor = Principal(CLUSTER, Role.COMPACTOR, "night")
    assert authenticator.authenticate(commit, shown(compactor)).held_to is None
    assert authenticator.authenticate(GET_KVS, shown(BROKER)).held_to is None


class RefusedContext(ShownContext):
    """A context that tells how the call was ended."""

    async def abort(self, code: grpc.StatusCode, message: str, trailer: Any) -> None:
        raise AbortedError(code, message)


class AbortedError(Exception):
    pass


async def test_a_refused_call_does_not_reach_its_handler() -> None:
    reached = []

    answer = common_pb2.Tag(key="answer")

    async def handler(data: bytes, _: Any) -> common_pb2.Tag:
        reached.append(data)
        return answer

    wrapped: Any = CallPipeline(Authenticator(CLUSTER)).wrap(GET_KVS, handler)
    with pytest.raises(AbortedError) as ended:
        await wrapped(b"request", RefusedContext(shown(MONITOR).proven))
    assert ended.value.args[0] is grpc.StatusCode.PERMISSION_DENIED
    assert not reached
    data = await wrapped(b"request", RefusedContext(shown(BROKER).proven))
    assert data == answer.SerializeToString()
    assert reached == [b"request"]


def test_a_caller_that_was_let_in_is_judged_again_by_another_policy() -> None:
    authenticator, context = Authenticator(CLUSTER), shown(MONITOR)
    assert authenticator.authenticate(HEALTH, context).principal == MONITOR
    authenticator.use_policy(
        parse_policy('[deny]\nprincipals = ["monitor/prometheus"]', CLUSTER, "p")
    )
    with pytest.raises(NoIdentityError, match="denied"):
        authenticator.authenticate(HEALTH, context)
    authenticator.use_policy(parse_policy("", CLUSTER, "p"))
    assert authenticator.authenticate(HEALTH, context).principal == MONITOR


def test_what_is_known_of_callers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authenticator_module, "_KNOWN_MAX", 3)
    authenticator = Authenticator(CLUSTER)
    for number in range(20):
        authenticator.authenticate(HEALTH, shown(MONITOR, certificate=b"%d" % number))
        assert len(authenticator._known) <= 3


def test_what_is_known_of_a_caller_is_of_its_method_and_its_certificate() -> None:
    authenticator = Authenticator(CLUSTER)
    assert authenticator.authenticate(HEALTH, shown(MONITOR)).principal == MONITOR
    with pytest.raises(RoleLacksCallError):
        authenticator.authenticate("streammeta.v1.KVService.PutKVs", shown(MONITOR))
    assert authenticator.authenticate(HEALTH, shown(BROKER)).principal == BROKER


def test_part_of_a_call_may_need_another_role() -> None:
    admins = frozenset((Role.ADMIN,))
    ANONYMOUS.require_any(admins, "all of it")
    Caller(MONITOR, frozenset((Role.MONITOR, Role.ADMIN))).require_any(admins, "all of it")
    with pytest.raises(RoleLacksCallError):
        Caller(MONITOR, frozenset((Role.MONITOR,))).require_any(admins, "all of it")
