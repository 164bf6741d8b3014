"""Callers with tokens at the authenticator: names, roles, and the end of calls under way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
import structlog

from streammeta.controller.rpc.calls.error_mapping import classify
from streammeta.controller.rpc.calls.interceptors import CallPipeline
from streammeta.controller.trust.audit.auditor import Auditor, LeadershipState
from streammeta.controller.trust.authenticator import Authenticator, Caller
from streammeta.controller.trust.policy import TOKEN_ROLES, parse_policy
from streammeta.controller.trust.refusals import (
    BadTokenError,
    NoIdentityError,
    RoleLacksCallError,
    UnknownKeyError,
)
from streammeta.controller.trust.tokens import LEEWAY_S
from streammeta.tls.identity import Principal, Role
from tests.attack.direct_calls import AbortedError, DirectContext
from tests.kit.clock import ManualClock
from tests.trust.callers import CLUSTER, PLAIN_TEXT, ShownContext, shown
from tests.trust.test_audit_calls import MemoryWriter
from tests.trust.test_rules import methods
from tests.trust.token_issuer import Issuer, bearing

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
            with pytest.raises(RoleLacksCallError):
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
        with pytest.raises(BadTokenError, match=why):
            let_in(door_of(issuer, f'[tokens]\nname_claim = "{claim}"'), context)
    denied = f'{text}[deny]\nprincipals = ["user/alice@example.org"]'
    with pytest.raises(BadTokenError, match=r"user/alice@example\.org"):
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
        with pytest.raises(BadTokenError, match=why) as refused:
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
    with pytest.raises(NoIdentityError, match="cluster"):
        let_in(door_of(issuer), eve)
    plain = ShownContext(PLAIN_TEXT.proven, token.metadata)
    assert let_in(door_of(issuer), plain).principal is None


def test_a_door_that_knows_no_issuer_takes_no_token() -> None:
    with pytest.raises(NoIdentityError):
        let_in(Authenticator(CLUSTER), bearing(Issuer().token()))


def test_tokens_with_other_claims_are_other_callers() -> None:
    issuer = Issuer()
    authenticator = door_of(issuer)
    assert let_in(authenticator, bearing(issuer.token(groups=["storage-admins"])), GET_KVS)
    with pytest.raises(RoleLacksCallError, match=r"user/alice.*KVService/GetKVs"):
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
    with pytest.raises(UnknownKeyError):
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
            asyncio.create_task(entered(authenticator, lasts=True)(b"", each))
            for each in (gone, kept)
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
