"""The door: who calls, and whether its role may make the call.

Judges every call before its request is parsed and before a leader is named. A connection in plain
text has no principal, and all that comes by it is let in: whoever opened such a listener said so.
Knows no request; what a caller is held to beside its role is judged where requests are.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from streammeta.controller.trust.method_rules import RULES, Rule
from streammeta.controller.trust.refusals import NoIdentityError, RoleLacksCallError
from streammeta.rpc.identity import IdentityError, Principal, Role, principal_of

_PLAIN_TEXT = b"insecure"
_KNOWN_CERTIFICATES_MAX = 10_000
_PEM_BEGIN = b"-----BEGIN CERTIFICATE-----"
_PEM_END = b"-----END CERTIFICATE-----"


class CallContext(Protocol):
    """The part of a call's context that says who calls."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Return what the connection's handshake has proven, by name."""
        ...


@dataclass(frozen=True, slots=True)
class Caller:
    """One who was let in; without a principal by a connection in plain text."""

    principal: Principal | None = None
    roles: frozenset[Role] = frozenset()
    """Its certificate's role."""
    fingerprint: str = ""
    """SHA-256 of its certificate, hexadecimal."""
    held_to: Principal | None = None
    """The broker whose node alone it may speak for in this call, and those assigned to it."""

    @property
    def holder(self) -> str | None:
        """What its quotas are counted under; None in plain text, where there are none."""
        return None if self.principal is None else str(self.principal)

    @property
    def name(self) -> str:
        """What logs and refusals name it by."""
        return "anonymous" if self.principal is None else str(self.principal)

    def has_any(self, roles: frozenset[Role]) -> bool:
        """Whether it has one of these roles, or came in plain text."""
        return self.principal is None or not self.roles.isdisjoint(roles)


ANONYMOUS = Caller()

_caller: ContextVar[Caller] = ContextVar("caller")


def current_caller() -> Caller:
    """Return the caller of the call under way in this task.

    Raises:
        LookupError: none was let in.
    """
    return _caller.get()


@dataclass(frozen=True, slots=True)
class _Certificate:
    principal: Principal
    fingerprint: str


class Door:
    """Lets the callers of one cluster in, by the rules of all methods."""

    def __init__(self, cluster_id: str, rules: Mapping[str, Rule] = RULES) -> None:
        self._cluster_id = cluster_id
        self._rules = rules
        self._known: dict[bytes, _Certificate] = {}

    def enter(self, method: str, context: CallContext) -> Caller:
        """Judge a call of `method`, e.g. `streammeta.v1.KVService.PutKVs`; remember its caller.

        Raises:
            NoIdentityError: its certificate names no caller of this cluster.
            RoleLacksCallError: the caller's role may not make it.
        """
        proven = context.auth_context()
        if list(proven.get("transport_security_type", ())) == [_PLAIN_TEXT]:
            caller = ANONYMOUS
        else:
            caller = self._judge(method, self._certificate(proven))
        _caller.set(caller)
        return caller

    def _judge(self, method: str, certificate: _Certificate) -> Caller:
        principal, rule = certificate.principal, self._rules.get(method)
        roles = frozenset((principal.role,))
        if rule is None or not _may_call(principal, roles, rule):
            call = "/".join(method.split(".")[-2:])
            raise RoleLacksCallError(str(principal), call, _needs(rule))
        others = (roles & rule.roles) - {Role.BROKER}
        held = principal if rule.binds_brokers and not others else None
        return Caller(principal, roles, certificate.fingerprint, held)

    def _certificate(self, proven: Mapping[str, Iterable[bytes]]) -> _Certificate:
        pem = b"".join(proven.get("x509_pem_cert", ()))
        known = self._known.get(pem)
        if known is None:
            known = self._read(pem, proven)
            if len(self._known) >= _KNOWN_CERTIFICATES_MAX:
                self._known.clear()
            self._known[pem] = known
        return known

    def _read(self, pem: bytes, proven: Mapping[str, Iterable[bytes]]) -> _Certificate:
        if not pem:
            raise NoIdentityError("none was shown; give the client a certificate and its key")
        uris = [uri.decode(errors="replace") for uri in proven.get("peer_uri", ())]
        try:
            principal = principal_of(uris)
        except IdentityError as error:
            raise NoIdentityError(str(error)) from None
        if principal.cluster_id != self._cluster_id:
            raise NoIdentityError(
                f"{principal.uri} is of another cluster; this one is {self._cluster_id!r}"
            )
        return _Certificate(principal, _fingerprint(pem))


def _may_call(principal: Principal, roles: frozenset[Role], rule: Rule) -> bool:
    if principal.role is Role.BROKER and principal.node_id is None:
        return rule.new_brokers
    return not roles.isdisjoint(rule.roles)


def _needs(rule: Rule | None) -> str:
    if rule is None:
        return "nothing that can be given: the method has no rule"
    names = sorted(str(role) for role in rule.roles)
    if rule.new_brokers and Role.BROKER not in rule.roles:
        names.append("broker/new")
    return "role " + " or ".join(names)


def _fingerprint(pem: bytes) -> str:
    _, _, rest = pem.partition(_PEM_BEGIN)
    body, _, _ = rest.partition(_PEM_END)
    try:
        der = base64.b64decode(b"".join(body.split()), validate=True)
    except binascii.Error:
        raise NoIdentityError("it can't be read") from None
    return hashlib.sha256(der).hexdigest()
