"""The door: a call's principal, and whether its role may make the call.

Judges every call before its request is parsed and before a leader is named. A connection in plain
text has no principal, and all that comes by it is let in: opening such a listener says so.
Knows no request; what a caller is held to beside its role is judged where requests are.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from streammeta.controller.errors import ApiError
from streammeta.controller.trust.method_rules import RULES, Rule
from streammeta.controller.trust.policy import Policy, Quota
from streammeta.controller.trust.refusals import NoIdentityError, RoleLacksCallError
from streammeta.rpc.identity import IdentityError, Principal, Role

_PLAIN_TEXT = b"insecure"
_KNOWN_MAX = 10_000
_PEM_BEGIN = b"-----BEGIN CERTIFICATE-----"
_PEM_END = b"-----END CERTIFICATE-----"


class CallContext(Protocol):
    """The part of a call's context that names the caller."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Return what the connection's handshake has proven, by name."""
        ...


NO_POLICY = Policy()


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller that was let in; without a principal by a connection in plain text."""

    principal: Principal | None = None
    roles: frozenset[Role] = frozenset()
    """Its certificate's role, and those that the policy grants it."""
    fingerprint: str = ""
    """SHA-256 of its certificate, hexadecimal."""
    held_to: Principal | None = None
    """The broker whose node alone it may speak for in this call, and those assigned to it."""
    policy: Policy = NO_POLICY
    """The policy that it was let in by."""

    @property
    def holder(self) -> str | None:
        """Name that its quotas are counted under; None in plain text, where there are none."""
        return None if self.principal is None else str(self.principal)

    @property
    def name(self) -> str:
        """Name in logs and refusals."""
        return "anonymous" if self.principal is None else str(self.principal)

    def has_any(self, roles: frozenset[Role]) -> bool:
        """Whether it has one of these roles, or came in plain text."""
        return self.principal is None or not self.roles.isdisjoint(roles)

    def require_any(self, roles: frozenset[Role], what: str) -> None:
        """Require one of these roles for part of a call; raises RoleLacksCallError."""
        if not self.has_any(roles):
            raise RoleLacksCallError(self.name, what, _named(roles))


ANONYMOUS = Caller()

_caller: ContextVar[Caller] = ContextVar("caller")


def fingerprint_shown(context: CallContext) -> str:
    """Return the fingerprint of a call's certificate, empty without one that can be read."""
    pem = b"".join(context.auth_context().get("x509_pem_cert", ()))
    try:
        return _fingerprint(pem) if pem else ""
    except NoIdentityError:
        return ""


def current_caller() -> Caller:
    """Return the caller of the call under way in this task.

    Raises:
        LookupError: none was let in.
    """
    return _caller.get()


class Stay:
    """A call under way for long; `ended_by` is why it is to end, once it is."""

    def __init__(self, method: str, proven: Mapping[str, Iterable[bytes]]) -> None:
        self.method = method
        self.proven = proven
        self.ended_by: ApiError | None = None

    def let_end(self) -> None:
        """Let the cancelled task go on to its end."""
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()


def current_holder() -> str | None:
    """Return what the quotas of this task's caller are counted under, None if there are none."""
    caller = _caller.get(None)
    return None if caller is None else caller.holder


def current_quota() -> Quota:
    """Return the quota of this task's caller by its policy; in plain text nothing is limited."""
    caller = _caller.get(None)
    if caller is None or caller.principal is None:
        return Quota()
    return caller.policy.quota_of(caller.principal)


class Door:
    """Lets the callers of one cluster in, by the rules of methods and by the policy in force."""

    def __init__(
        self, cluster_id: str, policy: Policy = NO_POLICY, rules: Mapping[str, Rule] = RULES
    ) -> None:
        self._cluster_id = cluster_id
        self._policy = policy
        self._rules = rules
        self._known: dict[tuple[str, bytes], Caller] = {}
        self._stays: dict[asyncio.Task[Any], Stay] = {}

    def enter(self, method: str, context: CallContext) -> Caller:
        """Judge a call of `method`, e.g. `streammeta.v1.KVService.PutKVs`; remember its caller.

        Raises:
            NoIdentityError: its certificate names no caller of this cluster, or is denied.
            RoleLacksCallError: the caller's role may not make it.
        """
        caller = self._judge(method, context.auth_context())
        _caller.set(caller)
        return caller

    @contextlib.contextmanager
    def staying(self, method: str, context: CallContext) -> Iterator[Stay]:
        """Cancel the present task while the block runs once the policy lets its caller in no more.

        The stay then says why.
        """
        task = asyncio.current_task()
        assert task is not None
        stay = self._stays[task] = Stay(method, context.auth_context())
        try:
            yield stay
        finally:
            del self._stays[task]

    def take(self, policy: Policy) -> None:
        """Judge by another policy from now on, and end the calls under way that it refuses."""
        self._policy = policy
        self._known.clear()
        for task, stay in self._stays.items():
            try:
                self._judge(stay.method, stay.proven)
            except ApiError as error:
                stay.ended_by = error
                task.cancel()

    def _judge(self, method: str, proven: Mapping[str, Iterable[bytes]]) -> Caller:
        if list(proven.get("transport_security_type", ())) == [_PLAIN_TEXT]:
            return ANONYMOUS
        pem = b"".join(proven.get("x509_pem_cert", ()))
        caller = self._known.get((method, pem))
        if caller is None:
            caller = self._let_in(method, pem, proven)
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[method, pem] = caller
        return caller

    def _let_in(self, method: str, pem: bytes, proven: Mapping[str, Iterable[bytes]]) -> Caller:
        principal, fingerprint = self._read(pem, proven), _fingerprint(pem)
        if fingerprint in self._policy.denied:
            raise NoIdentityError(f"that of {principal} is denied by the policy")
        roles, rule = self._policy.roles_of(principal), self._rules.get(method)
        is_new = principal.role is Role.BROKER and principal.node_id is None
        allowing = roles & rule.roles if rule is not None else frozenset[Role]()
        if is_new:
            allowing -= {Role.BROKER}
        if rule is None or not (allowing or (is_new and rule.new_brokers)):
            raise RoleLacksCallError(str(principal), _short(method), _needs(rule))
        is_held = rule.binds_brokers and allowing == {Role.BROKER}
        held_to = principal if is_held else None
        return Caller(principal, roles, fingerprint, held_to, self._policy)

    def _read(self, pem: bytes, proven: Mapping[str, Iterable[bytes]]) -> Principal:
        if not pem:
            raise NoIdentityError("none was shown; give the client a certificate and its key")
        common_name = "".join(_texts(proven, "x509_common_name"))
        try:
            principal = self._policy.principal_of(
                _texts(proven, "peer_uri"), _texts(proven, "peer_dns"), common_name
            )
        except IdentityError as error:
            raise NoIdentityError(str(error)) from None
        if principal.cluster_id != self._cluster_id:
            raise NoIdentityError(
                f"{principal.uri} is of another cluster; this one is {self._cluster_id!r}"
            )
        return principal


def _texts(proven: Mapping[str, Iterable[bytes]], name: str) -> Sequence[str]:
    return [text.decode(errors="replace") for text in proven.get(name, ())]


def _short(method: str) -> str:
    return "/".join(method.split(".")[-2:])


def _needs(rule: Rule | None) -> str:
    if rule is None:
        return "nothing that can be given: the method has no rule"
    more = ("broker/new",) if rule.new_brokers and Role.BROKER not in rule.roles else ()
    return _named(rule.roles, *more)


def _named(roles: Iterable[Role], *more: str) -> str:
    return "role " + " or ".join((*sorted(str(role) for role in roles), *more))


def _fingerprint(pem: bytes) -> str:
    _, _, rest = pem.partition(_PEM_BEGIN)
    body, _, _ = rest.partition(_PEM_END)
    try:
        der = base64.b64decode(b"".join(body.split()), validate=True)
    except binascii.Error:
        raise NoIdentityError("it can't be read") from None
    return hashlib.sha256(der).hexdigest()
