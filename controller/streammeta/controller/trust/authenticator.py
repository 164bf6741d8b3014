"""Authenticator: a call's principal, and whether its role may make the call.

Authenticates every call before its request is parsed and before a leader is named. A certificate
names the caller, or a token on a connection that requests no certificate. A plain-text connection
has no principal, and all its calls are accepted. Restrictions other than roles are validated with
the request. A method or HTTP page without a rule is rejected for every caller.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from streammeta.controller.errors import ApiError
from streammeta.controller.trust.policy import Policy, Quota
from streammeta.controller.trust.refusals import (
    BadTokenError,
    NoIdentityError,
    RoleLacksCallError,
)
from streammeta.rpc.method_facts import Access
from streammeta.rpc.methods import SERVED_METHODS
from streammeta.storage.cluster_files import reconcile_runs
from streammeta.tls.identity import IdentityError, KnownClusters, Principal, Role

if TYPE_CHECKING:
    from streammeta.controller.trust.tokens import IssuerKey, Proof, TokenVerifier

RPC_RULES: Mapping[str, Access] = {name: facts.access for name, facts in SERVED_METHODS.items()}
"""Rules by full name of the method, e.g. `streammeta.v1.KVService.PutKVs`."""

_EVERYONE = Access(roles=frozenset(Role), new_brokers=True)
_STATUS_READERS = Access(roles=frozenset((Role.CONTROLLER, Role.READER, Role.ADMIN, Role.MONITOR)))

HTTP_RULES: Mapping[str, Access] = {
    "streammeta.http.livez": _EVERYONE,
    "streammeta.http.readyz": _EVERYONE,
    "streammeta.http.metrics": _STATUS_READERS,
    "streammeta.http.status": _STATUS_READERS,
}
"""Rules of the pages of the HTTP listener. A controller's own certificate reads all of them."""

NAMESPACE_OF: Mapping[Role, str] = {Role.RECONCILER: reconcile_runs.NAMESPACE}
"""Reserved namespace of a role. A caller without another role uses only that namespace."""

WAL_CONFIG_SHOWN_TO = frozenset((Role.BROKER, Role.COMPACTOR, Role.RECONCILER, Role.ADMIN))
"""Roles to which GetNodes shows the brokers' `wal_config`, which may contain secrets."""


_PLAIN_TEXT = b"insecure"
_KNOWN_MAX = 10_000
_PEM_BEGIN = b"-----BEGIN CERTIFICATE-----"
_PEM_END = b"-----END CERTIFICATE-----"

AUTHORIZATION = "authorization"
"""Metadata of a call that carries its token."""


class CallContext(Protocol):
    """The part of a call's context that names the caller."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Return what the connection's handshake has proven, by name."""
        ...

    def invocation_metadata(self) -> Iterable[Any] | None:
        """Return the caller's metadata, as pairs."""
        ...


NO_POLICY = Policy()


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller. On a plain-text connection it has no principal."""

    principal: Principal | None = None
    roles: frozenset[Role] = frozenset()
    """The role in its certificate, and the roles that the policy grants."""
    fingerprint: str = ""
    """SHA-256 of its certificate in hexadecimal, empty without one."""
    allowed_by: frozenset[Role] = frozenset()
    """Those of its roles that may make this call."""
    held_to: Principal | None = None
    """The broker whose node alone it may speak for in this call, and those assigned to it."""
    policy: Policy = NO_POLICY
    """The policy that it was let in by."""
    expires_at: float | None = None
    """End of its token in seconds since 1970, None without one."""

    @property
    def holder(self) -> str | None:
        """Name under which its quotas are counted, None in plain text, which has no quotas."""
        return None if self.principal is None else str(self.principal)

    @property
    def name(self) -> str:
        """Name in logs and refusals."""
        return "anonymous" if self.principal is None else str(self.principal)

    def has_any(self, roles: frozenset[Role]) -> bool:
        """Whether it has one of these roles, or came in plain text."""
        return self.principal is None or not self.roles.isdisjoint(roles)

    def require_any(self, roles: frozenset[Role], what: str) -> None:
        """Require one of these roles for part of a call. Raises RoleLacksCallError."""
        if not self.has_any(roles):
            raise RoleLacksCallError(self.name, what, _named(roles))


ANONYMOUS = Caller()

_caller: ContextVar[Caller] = ContextVar("caller")


def fingerprint_shown(context: CallContext) -> str:
    """Return the fingerprint of a call's certificate, empty without one that can be read."""
    pem = b"".join(context.auth_context().get("x509_pem_cert", ()))
    try:
        # The fingerprint is of the DER form, as `openssl` and the deny list of the policy have it.
        return hashlib.sha256(_der(pem)).hexdigest() if pem else ""
    # Used for the audit line of a rejected call, which must not fail because of it.
    except NoIdentityError:
        return ""


def current_caller() -> Caller:
    """Return the caller of the call under way in this task.

    Raises:
        LookupError: no caller was admitted.
    """
    return _caller.get()


class LongCall:
    """A call in flight for a long time. `ended_by` is the reason of its end, once it ends."""

    def __init__(self, method: str, context: CallContext) -> None:
        self.method = method
        self.context = context
        self.ended_by: ApiError | None = None

    def uncancel(self) -> None:
        """Clear the cancellation of the current task, so that it can end by itself."""
        task = asyncio.current_task()
        assert task is not None
        # The task ends by an answer of its own, which a pending cancellation would interrupt.
        task.uncancel()


def came_by_token() -> bool:
    """Whether this task's caller, if there is one, has shown a token."""
    caller = _caller.get(None)
    return caller is not None and caller.expires_at is not None


def current_holder() -> str | None:
    """Return what the quotas of this task's caller are counted under, None if there are none."""
    caller = _caller.get(None)
    return None if caller is None else caller.holder


def current_quota() -> Quota:
    """Return the policy's quota of the current caller. Plain text has no limits."""
    caller = _caller.get(None)
    if caller is None or caller.principal is None:
        return Quota()
    return caller.policy.quota_of(caller.principal)


class Authenticator:
    """Lets the callers of one cluster in, by the rules of methods and by the policy in force."""

    def __init__(
        self,
        cluster: str | KnownClusters,
        policy: Policy = NO_POLICY,
        rules: Mapping[str, Access] = RPC_RULES,
    ) -> None:
        self._clusters = KnownClusters(cluster) if isinstance(cluster, str) else cluster
        self._policy = policy
        self._rules = rules
        self._tokens: TokenVerifier | None = None
        self.learn_keys: Callable[[], Awaitable[None]] = _learn_nothing
        """Asks for keys of tokens, after an UnknownKeyError."""
        self._known: dict[tuple[str, bytes], Caller] = {}
        self._long_calls: dict[asyncio.Task[Any], LongCall] = {}

    def authenticate(self, method: str, context: CallContext) -> Caller:
        """Authenticate a call of `method`, e.g.

        `streammeta.v1.KVService.PutKVs`, and remember its caller.

        Raises:
            NoIdentityError: its certificate or token names no caller of this cluster, or is denied.
            RoleLacksCallError: the caller's role may not make it.
        """
        caller = self._check(method, context)
        _caller.set(caller)
        return caller

    @contextlib.contextmanager
    def long_call(self, method: str, context: CallContext) -> Iterator[LongCall]:
        """Cancel the current task if the policy stops admitting its caller.

        The task is also cancelled when its token expires or the token's key is removed. The call
        then states the reason.
        """
        task = asyncio.current_task()
        assert task is not None
        call = self._long_calls[task] = LongCall(method, context)
        timer = self._schedule_end(task, call)
        try:
            yield call
        finally:
            del self._long_calls[task]
            if timer is not None:
                timer.cancel()

    def use_policy(self, policy: Policy) -> None:
        """Apply another policy from now on, and end the calls in flight that it rejects."""
        self._policy = policy
        self._recheck_calls()

    def accept_tokens(
        self, verifier: TokenVerifier, learn_keys: Callable[[], Awaitable[None]]
    ) -> None:
        """Take tokens that `verifier` finds good, over connections that ask for no certificate.

        `learn_keys` asks for keys that the issuer may have begun to use, and calls `use_keys`.
        """
        self._tokens = verifier
        self.learn_keys = learn_keys

    def use_keys(self, keys: Mapping[str, IssuerKey]) -> None:
        """Validate tokens by other keys, and end the calls in flight whose tokens fail."""
        assert self._tokens is not None
        self._tokens.use(keys)
        self._recheck_calls()

    def _recheck_calls(self) -> None:
        self._known.clear()
        for task, call in self._long_calls.items():
            self._recheck_call(task, call)

    def _recheck_call(self, task: asyncio.Task[Any], call: LongCall) -> None:
        try:
            self._check(call.method, call.context)
        except ApiError as error:
            # Before the cancellation, so that the call knows the reason when it is resumed.
            call.ended_by = error
            task.cancel()

    def _schedule_end(self, task: asyncio.Task[Any], call: LongCall) -> asyncio.TimerHandle | None:
        """Arrange the end of a call when the token of its caller expires."""
        expires_at = _caller.get(ANONYMOUS).expires_at
        # Certificates are not limited here: the connection ends at its maximum age.
        if expires_at is None or self._tokens is None:
            return None
        left_s = self._tokens.seconds_until(expires_at)
        return asyncio.get_running_loop().call_later(left_s, _expire, task, call)

    def _check(self, method: str, context: CallContext) -> Caller:
        proven = context.auth_context()
        # Exactly this value. A missing or unknown one must not open the way for anonymous callers.
        if list(proven.get("transport_security_type", ())) == [_PLAIN_TEXT]:
            return ANONYMOUS

        pem = b"".join(proven.get("x509_pem_cert", ()))
        # Only a listener for tokens takes connections without a certificate.
        proof = None if pem or self._tokens is None else self._tokens.verified(_token(context))
        # The whole proof is the key: two certificates may name the same principal, and one be
        # denied.
        known_by = (method, pem if proof is None else proof.digest)
        caller = self._known.get(known_by)
        if caller is None:
            if proof is None:
                caller = self._authenticate_certificate(method, pem, proven)
            else:
                caller = self._authenticate_token(method, proof)
            # Cleared as a whole: the cost is one more check for each caller, and no order is kept.
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[known_by] = caller

        return caller

    def _authenticate_token(self, method: str, proof: Proof) -> Caller:
        try:
            principal = self._policy.principal_of_token(proof.claims, self._clusters.own)
        except IdentityError as error:
            raise BadTokenError(str(error)) from None

        # Denials come before roles, so that no grant can outweigh them.
        if self._policy.denials.cover(principal):
            raise BadTokenError(f"{principal} is denied by the policy")

        roles, rule = self._policy.roles_of_token(principal, proof.claims), self._rules.get(method)
        if rule is None or roles.isdisjoint(rule.roles):
            raise RoleLacksCallError(str(principal), _short(method), _needs(rule))

        return Caller(
            principal,
            roles,
            allowed_by=roles & rule.roles,
            policy=self._policy,
            expires_at=proof.expires_at,
        )

    def _authenticate_certificate(
        self, method: str, pem: bytes, proven: Mapping[str, Iterable[bytes]]
    ) -> Caller:
        principal, certificate = self._read(pem, proven), _der(pem)
        if self._policy.denials.cover(principal, certificate):
            raise NoIdentityError(f"that of {principal} is denied by the policy")
        roles, rule = self._policy.roles_of(principal), self._rules.get(method)
        is_new = principal.role is Role.BROKER and principal.node_id is None
        allowing = roles & rule.roles if rule is not None else frozenset[Role]()
        if is_new:
            # A new broker has no node id, so nothing it names could be its own node.
            allowing -= {Role.BROKER}
        if rule is None or not (allowing or (is_new and rule.new_brokers)):
            raise RoleLacksCallError(str(principal), _short(method), _needs(rule))
        # A second role that may make the call frees the caller from its node.
        is_held = rule.binds_brokers and allowing == {Role.BROKER}
        held_to = principal if is_held else None
        fingerprint = hashlib.sha256(certificate).hexdigest()
        return Caller(principal, roles, fingerprint, allowing, held_to, self._policy)

    def _read(self, pem: bytes, proven: Mapping[str, Iterable[bytes]]) -> Principal:
        if not pem:
            raise NoIdentityError("the client showed none: configure its certificate and key")

        common_name = "".join(_texts(proven, "x509_common_name"))
        try:
            principal = self._policy.principal_of(
                _texts(proven, "peer_uri"), _texts(proven, "peer_dns"), common_name
            )
        except IdentityError as error:
            raise NoIdentityError(str(error)) from None

        accepted = self._clusters.accept(principal)
        if accepted is None:
            raise NoIdentityError(
                f"{principal.uri} is of another cluster, this one is {self._clusters.own!r}"
            )

        return accepted


async def _learn_nothing() -> None:
    """Know no issuer."""


def _expire(task: asyncio.Task[Any], call: LongCall) -> None:
    call.ended_by = BadTokenError("it has expired")
    task.cancel()


def _texts(proven: Mapping[str, Iterable[bytes]], name: str) -> Sequence[str]:
    return [text.decode(errors="replace") for text in proven.get(name, ())]


def _short(method: str) -> str:
    return "/".join(method.split(".")[-2:])


def _needs(rule: Access | None) -> str:
    if rule is None:
        return "nothing that can be given: the method has no rule"
    more = ("broker/new",) if rule.new_brokers and Role.BROKER not in rule.roles else ()
    return _named(rule.roles, *more)


def _named(roles: Iterable[Role], *more: str) -> str:
    return "role " + " or ".join((*sorted(str(role) for role in roles), *more))


def _token(context: CallContext) -> str:
    """Return the token of a call. Raises BadTokenError."""
    # Two tokens are ambiguous: which one counts must not depend on the order of the metadata.
    given = [value for key, value in context.invocation_metadata() or () if key == AUTHORIZATION]
    scheme, _, token = str(given[0]).partition(" ") if len(given) == 1 else ("", "", "")
    if scheme.lower() != "bearer" or not token:
        wanted = f"metadata must have `{AUTHORIZATION}: Bearer TOKEN` once"
        raise BadTokenError(f"{wanted}, and has it {len(given)} times" if given else wanted)
    return token.strip()


def _der(pem: bytes) -> bytes:
    _, _, rest = pem.partition(_PEM_BEGIN)
    body, _, _ = rest.partition(_PEM_END)
    try:
        return base64.b64decode(b"".join(body.split()), validate=True)
    except binascii.Error:
        raise NoIdentityError("it can't be read") from None
