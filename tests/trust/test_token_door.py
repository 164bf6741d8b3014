"""The authenticator: identities, tokens, rejections before a request is read, ended calls."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
import structlog

from streammeta.controller.rpc.calls.error_mapping import classify
from streammeta.controller.rpc.calls.interceptors import CallPipeline
from streammeta.controller.trust import authenticator as authenticator_module
from streammeta.controller.trust import refusals
from streammeta.controller.trust.audit.auditor import Auditor, LeadershipState
from streammeta.controller.trust.authenticator import (
    ANONYMOUS,
    Authenticator,
    Caller,
    current_caller,
)
from streammeta.controller.trust.policy import TOKEN_ROLES, parse_policy
from streammeta.controller.trust.tokens import LEEWAY_S
from streammeta.tls.identity import Principal, Role
from streammeta.v1 import common_pb2
from tests.attack.direct_calls import AbortedError, DirectContext
from tests.kit.waiting import ManualClock
from tests.trust.test_audit_calls import MemoryWriter
from tests.trust.test_rules import methods
from tests.trust.token_issuer import Issuer, bearing
from tests.trust.trusted_server import CLUSTER, PLAIN_TEXT, ShownContext, shown

GET_KVS = "streammeta.v1.KVService.GetKVs"
STATE_HASH = "streammeta.v1.AdminService.StateHash"
HEALTH = "grpc.health.v1.Health.Check"
POLICY = """
[[tokens.grant]]
claim = "groups"
value = "storage-admins"
roles = ["admin"]

[[tokens.grant]]
claim = "department"
value = "data"
roles = ["reader", "backup"]

[[grant]]
principal = "user/carol"
roles = ["reconciler", "compactor"]
"""


def door_of(issuer: Issuer, text: str = POLICY, now: Any = time.time) -> Authenticator:
    async def learn() -> None:
        authenticator.use_keys(issuer.keys)

    authenticator = Authenticator(CLUSTER, parse_policy(text, CLUSTER, "policy.toml"))
    authenticator.accept_tokens(issuer.verifier(now), learn)
    return authenticator


def let_in(authenticator: Authenticator, context: ShownContext, method: str = HEALTH) -> Caller:
    return authenticator.authenticate(method, context)


@pytest.mark.parametrize(
    ("claims", "roles"),
    [
        ({}, set()),
        ({"groups": ["staff", "storage-admins"]}, {Role.ADMIN}),
        ({"groups": "storage-admins"}, {Role.ADMIN}),
        ({"groups": "storage-admins staff"}, set()),
        ({"groups": {"storage-admins": True}}, set()),
        ({"groups": ["Storage-Admins"]}, set()),
        ({"department": "data", "groups": ["storage-admins"]}, {Role.READER, Role.BACKUP, "admin"}),
        ({"roles": ["admin"], "role": "admin", "scope": "admin"}, set()),
        ({"sub": "carol"}, {Role.RECONCILER}),
    ],
)
def test_a_token_gives_the_roles_that_the_policy_says(
    claims: dict[str, Any], roles: set[Role]
) -> None:
    issuer = Issuer()
    caller = let_in(door_of(issuer), bearing(issuer.token(**claims)))
    assert caller.roles == {Role.USER, *roles}
    assert caller.name == f"user/{claims.get('sub', 'alice')}"
    assert (caller.fingerprint, caller.held_to) == ("", None)


def test_no_token_makes_a_broker_or_a_controller() -> None:
    assert TOKEN_ROLES.isdisjoint((Role.BROKER, Role.CONTROLLER, Role.COMPACTOR))
    issuer = Issuer()
    text = "".join(
        f'[[tokens.grant]]\nclaim = "groups"\nvalue = "all"\nroles = ["{role}"]\n'
        for role in TOKEN_ROLES
    )
    authenticator, context = door_of(issuer, text), bearing(issuer.token(groups=["all"]))
    for method, letters in methods():
        if set(letters) & set("rxkamu"):
            assert let_in(authenticator, context, method).held_to is None
        else:
            with pytest.raises(refusals.RoleLacksCallError):
                let_in(authenticator, context, method)


def test_a_policy_says_which_claim_names_the_caller_and_may_deny_it() -> None:
    issuer = Issuer()
    context = bearing(issuer.token("auth0|17", email="alice@example.org", nick=7))
    text = '[tokens]\nname_claim = "email"\n'
    assert let_in(door_of(issuer, text), context).name == "user/alice@example.org"
    for claim, why in (
        ("sub", r"name 'auth0\|17', must be 1 to 64 letters"),
        ("nick", "its claim 'nick' must be a text that names a caller"),
        ("missing", "its claim 'missing' must be a text"),
    ):
        with pytest.raises(refusals.BadTokenError, match=why):
            let_in(door_of(issuer, f'[tokens]\nname_claim = "{claim}"'), context)
    denied = f'{text}[deny]\nprincipals = ["user/alice@example.org"]'
    with pytest.raises(refusals.BadTokenError, match=r"user/alice@example\.org"):
        let_in(door_of(issuer, denied), context)


@pytest.mark.parametrize(
    ("context", "why"),
    [
        (bearing(), "metadata must have `authorization: Bearer TOKEN` once"),
        (bearing("a.b.c", "a.b.c"), "once, and has it 2 times"),
        (bearing("", scheme="Bearer"), "once, and has it 1 times"),
        (bearing("YWxpY2U6", scheme="Basic"), "once, and has it 1 times"),
        (bearing("a.b.c"), "it is not a token"),
    ],
)
def test_without_a_good_token_there_is_no_way_in_to_anything(
    context: ShownContext, why: str
) -> None:
    authenticator = door_of(Issuer())
    for method, _ in methods():
        with pytest.raises(refusals.BadTokenError, match=why) as refused:
            let_in(authenticator, context, method)
    code, reason, metadata = classify(refused.value)
    assert (code.name, reason) == ("UNAUTHENTICATED", "NO_IDENTITY")
    assert metadata == {"shown": "token"}


def test_a_certificate_counts_and_a_token_beside_it_does_not() -> None:
    issuer = Issuer()
    token = bearing(issuer.token(groups=["storage-admins"]))
    reader = Principal(CLUSTER, Role.READER, "spark")
    both = ShownContext(shown(reader).proven, token.metadata)
    caller = let_in(door_of(issuer), both)
    assert caller.principal == reader
    assert caller.roles == {Role.READER}
    eve = ShownContext(shown(Principal("other", Role.ADMIN, "eve")).proven, token.metadata)
    with pytest.raises(refusals.NoIdentityError, match="cluster"):
        let_in(door_of(issuer), eve)
    plain = ShownContext(PLAIN_TEXT.proven, token.metadata)
    assert let_in(door_of(issuer), plain).principal is None


def test_a_door_that_knows_no_issuer_takes_no_token() -> None:
    with pytest.raises(refusals.NoIdentityError):
        let_in(Authenticator(CLUSTER), bearing(Issuer().token()))


def test_tokens_with_other_claims_are_other_callers() -> None:
    issuer = Issuer()
    authenticator = door_of(issuer)
    assert let_in(authenticator, bearing(issuer.token(groups=["storage-admins"])), GET_KVS)
    with pytest.raises(refusals.RoleLacksCallError, match=r"user/alice.*KVService/GetKVs"):
        let_in(authenticator, bearing(issuer.token()), GET_KVS)


def entered(
    authenticator: Authenticator, auditor: Auditor | None = None, *, lasts: bool = False
) -> Any:
    """Return a handler that answers at once, or lasts until it is ended."""

    async def handle(data: bytes, _: Any) -> bytes:
        if lasts:
            await asyncio.Event().wait()
        return data

    return CallPipeline(authenticator, auditor).wrap(STATE_HASH, handle, lasts=lasts)


def context_of(*tokens: str) -> DirectContext:
    made = bearing(*tokens)
    return DirectContext(made, metadata=made.metadata)


async def test_a_call_by_a_new_key_waits_until_the_key_is_known() -> None:
    issuer = Issuer()
    authenticator = door_of(issuer)
    issuer.add("k2")
    token = issuer.token(key_id="k2", groups=["storage-admins"])
    with pytest.raises(refusals.UnknownKeyError):
        let_in(authenticator, bearing(token))
    assert await entered(authenticator)(b"answer", context_of(token)) == b"answer"


async def ended(task: asyncio.Task[Any], context: DirectContext) -> tuple[str, str]:
    with pytest.raises(AbortedError):
        await asyncio.wait_for(task, 60)
    return context.code, context.message


async def test_a_long_call_ends_when_its_token_expires() -> None:
    issuer = Issuer()
    ahead = 0.0
    authenticator = door_of(issuer, now=lambda: time.time() + ahead)
    context = context_of(issuer.token(lasts_s=60, groups=["storage-admins"]))
    ahead = 60 + LEEWAY_S - 0.2
    code, message = await ended(
        asyncio.create_task(entered(authenticator, lasts=True)(b"", context)), context
    )
    assert (code, "it has expired" in message) == ("UNAUTHENTICATED", True)


async def test_a_call_that_has_ended_leaves_its_task_alone_when_the_token_expires() -> None:
    """A connection's task may serve other calls by then."""
    issuer = Issuer()
    ahead = 0.0
    authenticator = door_of(issuer, now=lambda: time.time() + ahead)
    context = bearing(issuer.token(lasts_s=60, groups=["storage-admins"]))
    let_in(authenticator, context)
    ahead = 60 + LEEWAY_S - 0.05
    with authenticator.long_call(HEALTH, context) as ended:
        pass
    with (
        authenticator.long_call(HEALTH, context) as stay,
        contextlib.suppress(asyncio.CancelledError),
    ):
        await asyncio.Event().wait()
    stay.uncancel()
    assert stay.ended_by is not None
    await asyncio.sleep(0)
    assert ended.ended_by is None
    assert not authenticator._long_calls


async def test_long_calls_end_when_their_key_is_removed_or_their_role_is_taken() -> None:
    for change in ("key", "policy", "denial"):
        issuer = Issuer()
        issuer.add("k2")
        authenticator = door_of(issuer)
        gone, kept = (
            context_of(issuer.token(name, key_id=key_id, groups=["storage-admins"]))
            for name, key_id in (("alice", "k1"), ("bob", "k2"))
        )
        tasks = [
            asyncio.create_task(entered(authenticator, lasts=True)(b"", token))
            for token in (gone, kept)
        ]
        await asyncio.sleep(0)  # a turn, in which they begin
        issuer.remove("k1")
        if change == "key":
            authenticator.use_keys(issuer.keys)
        elif change == "denial":
            authenticator.use_policy(
                parse_policy(f'{POLICY}[deny]\nprincipals = ["user/alice"]', CLUSTER, "")
            )
        else:
            authenticator.use_policy(
                parse_policy(POLICY.replace("storage-admins", "others"), CLUSTER, "")
            )
        code, _ = await ended(tasks[0], gone)
        assert code == ("PERMISSION_DENIED" if change == "policy" else "UNAUTHENTICATED")
        if change != "policy":
            assert not tasks[1].done()
            tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def tokens_of(issuer: Issuer) -> Sequence[str]:
    good = issuer.token(groups=["storage-admins"])
    return (
        good,
        issuer.token(),
        issuer.token(lasts_s=-1000),
        issuer.token(aud="other"),
        issuer.token("no/name"),
        f"{good[:-4]}AAAA",
        f"{good}AAAA",
    )


async def test_no_part_of_a_token_is_in_any_log_or_error(capfd: pytest.CaptureFixture[str]) -> None:
    issuer, writer = Issuer(), MemoryWriter()
    writer.durable.set()
    auditor = Auditor(writer, ManualClock(), lambda: LeadershipState(3, 7, leads=True))
    with structlog.testing.capture_logs() as caught:
        errors = []
        for token in tokens_of(issuer):
            context = context_of(token)
            try:
                await entered(door_of(issuer), auditor)(b"", context)
            except AbortedError:
                errors.append(f"{context.message} {context.trailing!r}")
    auditor.end_minute()
    audited = json.dumps([line.members() for line in writer.lines])
    said = f"{errors} {audited} {caught} {''.join(capfd.readouterr())}"
    for token in tokens_of(issuer):
        for part in token.split("."):
            assert part not in said
            assert part[-8:] not in said
    assert len(errors) == len(tokens_of(issuer)) - 1
    assert "user/alice" in audited


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
        with pytest.raises(refusals.NoIdentityError, match=why) as refused:
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
    with pytest.raises(refusals.RoleLacksCallError) as refused:
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
        raise StoppedError(code, message)


class StoppedError(Exception):
    pass


async def test_a_refused_call_does_not_reach_its_handler() -> None:
    reached = []

    answer = common_pb2.Tag(key="answer")

    async def handler(data: bytes, _: Any) -> common_pb2.Tag:
        reached.append(data)
        return answer

    wrapped: Any = CallPipeline(Authenticator(CLUSTER)).wrap(GET_KVS, handler)
    with pytest.raises(StoppedError) as ended:
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
    with pytest.raises(refusals.NoIdentityError, match="denied"):
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
    with pytest.raises(refusals.RoleLacksCallError):
        authenticator.authenticate("streammeta.v1.KVService.PutKVs", shown(MONITOR))
    assert authenticator.authenticate(HEALTH, shown(BROKER)).principal == BROKER


def test_part_of_a_call_may_need_another_role() -> None:
    admins = frozenset((Role.ADMIN,))
    ANONYMOUS.require_any(admins, "all of it")
    Caller(MONITOR, frozenset((Role.MONITOR, Role.ADMIN))).require_any(admins, "all of it")
    with pytest.raises(refusals.RoleLacksCallError):
        Caller(MONITOR, frozenset((Role.MONITOR,))).require_any(admins, "all of it")
