"""The policy of a controller: what an operator adds to the rules of methods, or takes away.

Names the callers of certificates that state none, adds roles, says what the claims of tokens stand
for, denies callers and certificates, gives namespaces of keys to some, and sets quotas. Reads the
text of a file, and no file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from streammeta.storage.parsing import DocumentError, parse_toml
from streammeta.tls.identity import SCHEME, IdentityError, Principal, Role, principal_of

RESERVED_NAMESPACES = "_streammeta/"
"""Prefix of the product's own namespaces. Of all callers only admins use them."""

ALL_OF_A_ROLE = "*"

NAME_CLAIM = "sub"
"""Claim of a token that names its caller, unless a policy says another."""

_KINDS = ("uri:", "dns:", "cn:")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_SERIAL = re.compile(r"[0-9a-f]{1,42}")
# Roles of cluster members come from certificates only: a policy must not turn a user into one.
_GRANTABLE = tuple(role for role in Role if role not in (Role.CONTROLLER, Role.BROKER, Role.USER))

TOKEN_ROLES = frozenset((Role.READER, Role.RECONCILER, Role.BACKUP, Role.ADMIN, Role.MONITOR))
"""Roles that tokens may grant, for people. A compactor commits in the name of any node."""


class PolicyError(Exception):
    """Error in a policy. The message names file, line and the expected content."""


@dataclass(frozen=True, slots=True)
class Selector:
    """One principal, or with the name `*` all of a role."""

    role: Role
    name: str

    def covers(self, principal: Principal) -> bool:
        """Whether it names a principal."""
        return self.role is principal.role and self.name in (ALL_OF_A_ROLE, principal.name)


@dataclass(frozen=True, slots=True)
class Denials:
    """Callers and certificates that are denied, whatever their roles."""

    fingerprints: frozenset[str] = frozenset()
    """SHA-256 of certificates, hexadecimal."""
    serials: frozenset[int] = frozenset()
    principals: Sequence[Selector] = ()

    def cover(self, principal: Principal, certificate: bytes = b"") -> bool:
        """Return whether a caller is denied.

        `certificate` is its certificate as DER, empty for a token.

        A certificate that can't be read is denied.
        """
        if any(selector.covers(principal) for selector in self.principals):
            return True
        if not certificate:
            return False
        if hashlib.sha256(certificate).hexdigest() in self.fingerprints:
            return True
        if not self.serials:
            return False
        from streammeta.tls.certificates import CertificateError, serial_of  # slow to import

        try:
            return serial_of(certificate) in self.serials
        # A serial that cannot be read may be a denied one, so the certificate is denied.
        except CertificateError:
            return True


@dataclass(frozen=True, slots=True)
class ClaimGrant:
    """Roles of tokens whose claim is a value, or a list that holds it."""

    claim: str
    value: str
    roles: frozenset[Role]

    def covers(self, claims: Mapping[str, Any]) -> bool:
        """Whether a token with these claims gets the roles."""
        found = claims.get(self.claim)
        return self.value in found if isinstance(found, list) else self.value == found


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits of one principal. None: the default without a policy."""

    requests_per_s: int | None = None
    rows_per_s: int | None = None
    pipelines: int | None = None
    watches: int | None = None
    snapshots: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Grants and limits in addition to the rules. An empty policy has none."""

    principals: Mapping[str, Principal] = field(default_factory=dict)
    """Callers by what their certificates have: `uri:...`, `dns:...` or `cn:...`."""
    grants: Sequence[tuple[Selector, frozenset[Role]]] = ()
    name_claim: str = NAME_CLAIM
    """The claim of a token that names its caller."""
    claim_grants: Sequence[ClaimGrant] = ()
    denials: Denials = Denials()
    namespaces: Sequence[tuple[str, Sequence[Selector]]] = ()
    """Callers that may use the namespaces with a prefix, the longest prefix first."""
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    """Quotas by principal, such as `broker/1007`, or of a whole role by `broker/*`."""
    digest: str = ""
    """SHA-256 of the text in hexadecimal, empty without a text."""

    def principal_of(
        self, uris: Sequence[str], dns_names: Iterable[str], common_name: str
    ) -> Principal:
        """Return the caller that a certificate states, or stands for.

        Raises:
            IdentityError: it is of none, or of several.
        """
        # A stated identity wins, so that a policy can never rename a member of the cluster.
        if any(uri.startswith(f"{SCHEME}://") for uri in uris) or not self.principals:
            return principal_of(uris)

        names = [f"uri:{uri}" for uri in uris] + [f"dns:{name}" for name in dns_names]
        found = {
            self.principals[name]
            for name in (*names, f"cn:{common_name}")
            if name in self.principals
        }
        # Several entries for one certificate would make its roles depend on their order.
        if len(found) != 1:
            several = ", ".join(sorted(map(str, found))) or "none"
            raise IdentityError(
                f"expected one alternative name {SCHEME}://CLUSTER/ROLE/NAME, or one of "
                f"[principals] in the policy, found {several}"
            )

        return found.pop()

    def principal_of_token(self, claims: Mapping[str, Any], cluster_id: str) -> Principal:
        """Return the caller that a token's claims name.

        Raises:
            IdentityError: they name none.
        """
        name = claims.get(self.name_claim)
        if not isinstance(name, str):
            raise IdentityError(f"its claim {self.name_claim!r} must be a text that names a caller")
        return Principal(cluster_id, Role.USER, name)

    def roles_of(self, principal: Principal) -> frozenset[Role]:
        """Return the role of a principal, and all roles granted to it."""
        granted = (roles for selector, roles in self.grants if selector.covers(principal))
        return frozenset((principal.role,)).union(*granted)

    def roles_of_token(self, principal: Principal, claims: Mapping[str, Any]) -> frozenset[Role]:
        """Return the roles of a token's caller: by its claims and by its name, of `TOKEN_ROLES`."""
        granted = (grant.roles for grant in self.claim_grants if grant.covers(claims))
        roles = self.roles_of(principal).union(*granted)
        # A grant to a principal by name may contain roles that a token must not have.
        return roles & (TOKEN_ROLES | {Role.USER})

    def owners_of(self, namespace: str) -> Sequence[Selector] | None:
        """Return the callers of a namespace other than admins.

        None: all callers that may use keys.
        """
        # Before the prefixes of the policy, of which an empty one would cover these too.
        if namespace.startswith(RESERVED_NAMESPACES):
            return ()
        return next(
            (owners for prefix, owners in self.namespaces if namespace.startswith(prefix)), None
        )

    def quota_of(self, principal: Principal) -> Quota:
        """Return the quota of a principal: its own, else its role's, else none."""
        of_role = self.quotas.get(f"{principal.role}/{ALL_OF_A_ROLE}", Quota())
        return self.quotas.get(str(principal), of_role)


def parse_policy(text: str, cluster_id: str, name: str) -> Policy:
    """Return the policy in a TOML text from the file `name`.

    Raises:
        PolicyError: the text is not a valid policy.
    """
    try:
        content = parse_toml(text)
    except DocumentError as error:
        raise PolicyError(f"{name}: {error}") from None
    return _Reader(text, cluster_id, name).policy(content)


class _Reader:
    """Reader of the tables of one text, which knows their lines for error messages."""

    def __init__(self, text: str, cluster_id: str, name: str) -> None:
        self._lines = text.splitlines()
        self._text = text
        self._cluster_id = cluster_id
        self._name = name

    def policy(self, content: Mapping[str, Any]) -> Policy:
        known = {"principals", "grant", "tokens", "deny", "namespace", "quota"}
        for table in content:
            if table not in known:
                self._fail((table,), table, "unknown, must be one of " + ", ".join(sorted(known)))
        return Policy(
            principals=dict(self._principals(content)),
            grants=tuple(self._grants(content)),
            name_claim=self._name_claim(content),
            claim_grants=tuple(self._claim_grants(content)),
            denials=self._denials(content),
            # The longest prefix comes first, because the first match decides.
            namespaces=sorted(self._namespaces(content), key=lambda one: -len(one[0])),
            quotas=dict(self._quotas(content)),
            digest=hashlib.sha256(self._text.encode()).hexdigest(),
        )

    def _principals(self, content: Mapping[str, Any]) -> Iterator[tuple[str, Principal]]:
        for key, value in self._table(content, "principals").items():
            at = ("principals", 0, key)
            if not key.startswith(_KINDS):
                self._fail(at, key, "must begin with uri:, dns: or cn:")
            if key.startswith(f"uri:{SCHEME}://"):
                self._fail(at, key, "states an identity by itself, remove this entry")
            yield key, self._principal(at, key, value)

    def _principal(self, at: tuple[Any, ...], key: str, value: Any) -> Principal:
        role, _, name = value.partition("/") if isinstance(value, str) else ("", "", "")
        try:
            return Principal.parse(f"{SCHEME}://{self._cluster_id}/{role}/{name}")
        except IdentityError:
            self._fail(at, key, f"{value!r}, must be ROLE/NAME, such as 'broker/1007'")

    def _grants(self, content: Mapping[str, Any]) -> Iterator[tuple[Selector, frozenset[Role]]]:
        for at, table in self._tables(content, "grant", ("principal", "roles")):
            selector = self._selector((*at, "principal"), "principal", table["principal"])
            yield selector, self._roles(at, table["roles"], _GRANTABLE)

    def _roles(self, at: tuple[Any, ...], value: Any, known: Collection[Role]) -> frozenset[Role]:
        roles = self._texts((*at, "roles"), "roles", value)
        for role in roles:
            if role not in known:
                wanted = "must be one of " + ", ".join(role for role in Role if role in known)
                self._fail((*at, "roles"), "roles", f"{role!r}; {wanted}")
        return frozenset(map(Role, roles))

    def _name_claim(self, content: Mapping[str, Any]) -> str:
        table = self._table(content, "tokens")
        for key in table:
            if key not in ("name_claim", "grant"):
                self._fail(("tokens", 0, key), key, "unknown, must be one of name_claim, grant")
        claim = table.get("name_claim", NAME_CLAIM)
        if not isinstance(claim, str) or not claim:
            self._fail(("tokens", 0, "name_claim"), "name_claim", f"{claim!r}, must be a text")
        return claim

    def _claim_grants(self, content: Mapping[str, Any]) -> Iterator[ClaimGrant]:
        tables = {"tokens.grant": self._table(content, "tokens").get("grant", [])}
        for at, table in self._tables(tables, "tokens.grant", ("claim", "value", "roles")):
            for key in ("claim", "value"):
                if not isinstance(table[key], str):
                    self._fail((*at, key), key, f"{table[key]!r}, must be a text")
            roles = self._roles(at, table["roles"], TOKEN_ROLES)
            yield ClaimGrant(table["claim"], table["value"], roles)

    def _denials(self, content: Mapping[str, Any]) -> Denials:
        table = self._table(content, "deny")
        known = tuple(part.name for part in fields(Denials))
        for key in table:
            if key not in known:
                wanted = "must be one of " + ", ".join(known)
                self._fail(("deny", 0, key), key, f"unknown; {wanted}")

        fingerprints = self._hexadecimal(
            table, "fingerprints", _FINGERPRINT, "a SHA-256, 64 hexadecimal digits"
        )
        serials = self._hexadecimal(
            table, "serials", _SERIAL, "a certificate's serial number, up to 42 hexadecimal digits"
        )
        at = ("deny", 0, "principals")
        names = self._texts(at, "principals", table.get("principals", []))
        return Denials(
            frozenset(fingerprints),
            frozenset(int(text, 16) for text in serials),
            tuple(self._selector(at, "principals", name) for name in names),
        )

    def _hexadecimal(
        self, table: Mapping[str, Any], key: str, form: re.Pattern[str], what: str
    ) -> Iterator[str]:
        at = ("deny", 0, key)
        for text in self._texts(at, key, table.get(key, [])):
            # Tools print fingerprints with colons and in capitals.
            digits = text.replace(":", "").lower()
            if not form.fullmatch(digits):
                self._fail(at, key, f"{text!r}; must be {what}, see `streammeta certs show`")
            yield digits

    def _namespaces(self, content: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[Selector]]]:
        seen = set()
        for at, table in self._tables(content, "namespace", ("prefix", "principals")):
            prefix = table["prefix"]
            if not isinstance(prefix, str) or prefix in seen:
                self._fail((*at, "prefix"), "prefix", f"{prefix!r}, must be a text, given once")
            if prefix.startswith(RESERVED_NAMESPACES):
                self._fail((*at, "prefix"), "prefix", f"{prefix!r}; is reserved")
            seen.add(prefix)
            names = self._texts((*at, "principals"), "principals", table["principals"])
            owners = [self._selector((*at, "principals"), "principals", name) for name in names]
            yield prefix, tuple(owners)

    def _quotas(self, content: Mapping[str, Any]) -> Iterator[tuple[str, Quota]]:
        known = tuple(part.name for part in fields(Quota))
        for at, table in self._tables(content, "quota", ("principal",), known):
            selector = self._selector((*at, "principal"), "principal", table["principal"])
            limits = {key: value for key, value in table.items() if key != "principal"}
            for key, value in limits.items():
                # A TOML boolean is an int in Python.
                if type(value) is not int or value < 0:
                    self._fail((*at, key), key, f"{value!r}, must be a number, 0 or more")
            yield f"{selector.role}/{selector.name}", Quota(**limits)

    def _selector(self, at: tuple[Any, ...], key: str, value: Any) -> Selector:
        role, _, name = value.partition("/") if isinstance(value, str) else ("", "", "")
        if role in list(Role) and name == ALL_OF_A_ROLE:
            return Selector(Role(role), name)
        principal = self._principal(at, key, value)
        return Selector(principal.role, principal.name)

    def _texts(self, at: tuple[Any, ...], key: str, value: Any) -> Sequence[str]:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self._fail(at, key, "must be a list of texts")
        return value

    def _table(self, content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        table: Any = content.get(name, {})
        if not isinstance(table, dict):
            self._fail((name,), name, f"must be a table, [{name}]")
        return table

    def _tables(
        self,
        content: Mapping[str, Any],
        name: str,
        needed: Sequence[str],
        optional: Sequence[str] = (),
    ) -> Iterator[tuple[tuple[Any, ...], Mapping[str, Any]]]:
        tables = content.get(name, [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            self._fail((name,), name, f"must be tables, [[{name}]]")
        for index, table in enumerate(tables):
            at = (name, index)
            for key in table:
                if key not in (*needed, *optional):
                    wanted = ", ".join((*needed, *optional))
                    self._fail((*at, key), key, f"unknown, must be one of {wanted}")
            for key in needed:
                if key not in table:
                    self._fail(at, f"[[{name}]]", f"has no {key}; give it")
            yield at, table

    def _fail(self, at: tuple[Any, ...], key: str, problem: str) -> NoReturn:
        raise PolicyError(f"{self._name}, line {self._line(*at)}: {key}: {problem}")

    def _line(self, table: str, index: int = 0, key: str = "") -> int:
        """Return the line of a key, else the line of its table's header, counted from 1."""
        # tomllib gives no positions, so the line is searched in the text. It is only used in
        # errors.
        header = re.compile(
            rf"\s*\[{{1,2}}\s*[\"']?{re.escape(table)}[\"']?\s*\]|\s*{re.escape(table)}\s*[.=]"
        )
        headers = [number for number, line in enumerate(self._lines) if header.match(line)]
        if not headers:
            return 1

        first = headers[min(index, len(headers) - 1)]
        wanted = re.compile(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=")
        if key:
            for number in range(first, len(self._lines)):
                if number > first and self._lines[number].lstrip().startswith("["):
                    break
                if wanted.match(self._lines[number]):
                    return number + 1

        return first + 1
