"""Identity of a caller: cluster, role and name, as stated in a certificate.

A certificate carries them as one URI among its alternative names, `streammeta://CLUSTER/ROLE/NAME`,
as SPIFFE does. The common name is only for people. The module knows neither certificates nor the
permissions of a role.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

SCHEME = "streammeta"

NEW_BROKER = "new"
"""Name of a broker that has no node id yet and may request one."""

NODE_ID_MAX = (1 << 31) - 1

_CLUSTER = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
# No leading zeros, so that a node has a single identity.
_NODE_ID = re.compile(r"0|[1-9][0-9]{0,9}")


class IdentityError(ValueError):
    """A URI, or a set of URIs, contains no identity. The message shows the expected form."""


class Role(StrEnum):
    """Part of the system to which a certificate or a token belongs."""

    CONTROLLER = "controller"
    BROKER = "broker"
    COMPACTOR = "compactor"
    READER = "reader"
    RECONCILER = "reconciler"
    BACKUP = "backup"
    ADMIN = "admin"
    MONITOR = "monitor"
    USER = "user"
    """Person whose roles are granted elsewhere: by a token's claims, or by name."""


USER_ROLES = tuple(role for role in Role if role not in (Role.CONTROLLER, Role.BROKER))
"""Roles of people and jobs, with free names. Controllers and brokers are named by node ids."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Identity in one cluster. Logs show it as `str()`: `broker/1007`."""

    cluster_id: str
    role: Role
    name: str

    def __post_init__(self) -> None:
        """Validate the parts.

        Raises:
            IdentityError: a part is not allowed in the URI.
        """
        if not _CLUSTER.fullmatch(self.cluster_id):
            raise IdentityError(
                f"cluster id {self.cluster_id!r}, must be 1 to 64 letters, digits, '-' and '_'"
            )
        if self.role in USER_ROLES:
            if not _NAME.fullmatch(self.name):
                raise IdentityError(
                    f"name {self.name!r}, must be 1 to 64 letters, digits, '.', '_', '@' and '-'"
                )
        elif self.node_id is None and (self.role, self.name) != (Role.BROKER, NEW_BROKER):
            raise IdentityError(
                f"name {self.name!r} of a {self.role}, must be its node id, 0 to {NODE_ID_MAX}"
            )

    @property
    def node_id(self) -> int | None:
        """Node id of a controller or broker, None for others."""
        if self.role in USER_ROLES or not _NODE_ID.fullmatch(self.name):
            return None
        node_id = int(self.name)
        return node_id if node_id <= NODE_ID_MAX else None

    @property
    def uri(self) -> str:
        """URI for a certificate."""
        return f"{SCHEME}://{self.cluster_id}/{self.role}/{self.name}"

    def __str__(self) -> str:
        return f"{self.role}/{self.name}"

    @classmethod
    def parse(cls, uri: str) -> Principal:
        """Return the identity of a URI.

        Raises:
            IdentityError: the URI has another form.
        """
        scheme, _, rest = uri.partition("://")
        parts = rest.split("/")
        if scheme != SCHEME or len(parts) != 3:
            raise IdentityError(f"{uri!r}, must be {SCHEME}://CLUSTER/ROLE/NAME")
        cluster_id, role, name = parts
        if role not in list(Role):
            raise IdentityError(f"{uri!r}: role {role!r}, must be one of {', '.join(Role)}")
        try:
            return cls(cluster_id, Role(role), name)
        except IdentityError as error:
            raise IdentityError(f"{uri!r}: {error}") from None


@dataclass(frozen=True, slots=True)
class KnownClusters:
    """Clusters whose identities one cluster accepts: its own, and the one that it continues.

    A restored cluster has a new id and the namespace of the old one. Brokers, users and controllers
    keep their certificates, so that nobody has to issue new ones during a disaster.
    """

    own: str
    former: str | None = None

    def accept(self, principal: Principal) -> Principal | None:
        """Return a principal as one of this cluster, None if it belongs to another one."""
        if principal.cluster_id not in (self.own, self.former):
            return None
        return replace(principal, cluster_id=self.own)


def principal_of(uris: Iterable[str]) -> Principal:
    """Return the identity among a certificate's URIs. Other schemes are ignored.

    Raises:
        IdentityError: the certificate contains none, or several.
    """
    ours = [uri for uri in uris if uri.startswith(f"{SCHEME}://")]
    # With several identities it would be unclear who calls.
    if len(ours) != 1:
        found = f"{len(ours)} of them" if ours else "none"
        raise IdentityError(
            f"expected one alternative name {SCHEME}://CLUSTER/ROLE/NAME, found {found}"
        )
    return Principal.parse(ours[0])
