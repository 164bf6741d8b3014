"""Access rules by method and HTTP page, and rules of roles that concern no single method.

A method without a rule is rejected for every caller.
"""

from __future__ import annotations

from collections.abc import Mapping

from streammeta.rpc.method_facts import Access
from streammeta.rpc.methods import SERVED_METHODS
from streammeta.storage.cluster_files import reconcile_runs
from streammeta.tls.identity import Role

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
