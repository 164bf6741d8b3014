"""Rules of all methods: which roles may call each, and to what their callers are held.

A method without a rule is refused to all. Knows neither certificates nor requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from streammeta.storage.cluster_files import reconcile_runs
from streammeta.tls.identity import Role

PEER, BROKER, COMPACTOR, READER, RECONCILER, BACKUP, ADMIN = (
    Role.CONTROLLER,
    Role.BROKER,
    Role.COMPACTOR,
    Role.READER,
    Role.RECONCILER,
    Role.BACKUP,
    Role.ADMIN,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Roles that may call a method, and what holds of their calls."""

    roles: frozenset[Role]
    binds_brokers: bool = False
    """Whether a broker calls in the name of its own node alone, or of one assigned to it."""
    new_brokers: bool = False
    """Whether a broker without a node id yet may call."""


def _may(*roles: Role, binds_brokers: bool = False, new_brokers: bool = False) -> Rule:
    return Rule(roles=frozenset(roles), binds_brokers=binds_brokers, new_brokers=new_brokers)


_ALL = _may(*Role, new_brokers=True)
_ADMIN = _may(ADMIN)
_OWNER = _may(BROKER, binds_brokers=True)
_OWNER_OR_ADMIN = _may(BROKER, ADMIN, binds_brokers=True)
_WRITER = _may(BROKER, COMPACTOR, binds_brokers=True)
_LOOK = _may(BROKER, COMPACTOR, READER, RECONCILER, ADMIN)
_DESCRIBE = _may(PEER, BROKER, COMPACTOR, READER, RECONCILER, BACKUP, ADMIN, new_brokers=True)

_BY_SERVICE: Mapping[str, Mapping[str, Rule]] = {
    "streammeta.v1.QuorumService": {
        "AddVoter": _ADMIN,
        "RemoveVoter": _ADMIN,
        "DescribeQuorum": _DESCRIBE,
    },
    "streammeta.v1.AdminService": {
        "DescribeCluster": _DESCRIBE,
        "StateHash": _may(PEER, READER, RECONCILER, BACKUP, ADMIN),
        "TakeSnapshot": _may(BACKUP, ADMIN),
        "TransferLeadership": _ADMIN,
        "UpdateFeatureLevel": _ADMIN,
        "AdoptObjects": _ADMIN,
        "FinishRestore": _ADMIN,
    },
    "streammeta.v1.NodeService": {
        "RegisterNode": _OWNER,
        "Heartbeat": _OWNER,
        "UnregisterNode": _OWNER_OR_ADMIN,
        # Without a node id there is nothing to be held to; with one there is nothing to ask for.
        "GetNextNodeId": Rule(roles=frozenset((ADMIN,)), new_brokers=True),
        "GetNodes": _LOOK,
        "ListStreamSetObjects": _LOOK,
        "LockNode": _ADMIN,
        "UnlockNode": _ADMIN,
    },
    "streammeta.v1.StreamService": {
        "CreateStreams": _OWNER_OR_ADMIN,
        "OpenStreams": _OWNER,
        "CloseStreams": _OWNER,
        "TrimStreams": _OWNER,
        "DeleteStreams": _OWNER_OR_ADMIN,
        "GetOpeningStreams": _OWNER,
        "AbandonUploads": _ADMIN,
        "DescribeStreams": _LOOK,
    },
    "streammeta.v1.ObjectService": {
        "PrepareObjects": _WRITER,
        "CommitStreamSetObject": _WRITER,
        "CommitStreamObject": _WRITER,
        "CommitPipeline": _WRITER,
        "GetObjects": _LOOK,
        "DescribeObjects": _LOOK,
        "CommitNamedObjects": _OWNER,
        "DeleteNamedObjects": _OWNER_OR_ADMIN,
        "DescribeNamedObjects": _LOOK,
        "CheckObjects": _may(BROKER, COMPACTOR, RECONCILER, ADMIN),
    },
    "streammeta.v1.KVService": {
        "GetKVs": _may(BROKER, READER, RECONCILER, ADMIN),
        "ListKVs": _may(BROKER, READER, ADMIN),
        "PutKVs": _may(BROKER, RECONCILER, ADMIN),
        "DeleteKVs": _may(BROKER, ADMIN),
    },
    "streammeta.v1.MetadataService": {
        "Watch": _may(BROKER, COMPACTOR, READER, RECONCILER, BACKUP, ADMIN),
        "GetSnapshot": _may(READER, RECONCILER, BACKUP, ADMIN),
    },
    "grpc.health.v1.Health": {"Check": _ALL, "List": _ALL, "Watch": _ALL},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": _ALL},
}

RULES: Mapping[str, Rule] = {
    f"{service}.{method}": rule
    for service, rules in _BY_SERVICE.items()
    for method, rule in rules.items()
}
"""The rules by full name of the method, e.g. `streammeta.v1.KVService.PutKVs`."""

HTTP_RULES: Mapping[str, Rule] = {
    "streammeta.http.livez": _ALL,
    "streammeta.http.readyz": _ALL,
    "streammeta.http.metrics": _may(PEER, READER, ADMIN, Role.MONITOR),
    "streammeta.http.status": _may(PEER, READER, ADMIN, Role.MONITOR),
}
"""The rules of pages of the listener for HTTP; a controller's own certificate reads all of them."""

NAMESPACE_OF: Mapping[Role, str] = {RECONCILER: reconcile_runs.NAMESPACE}
"""The reserved namespace of a role; where no other role allows a call of keys, all they are."""

DELETIONS_HELD_BY = frozenset((RECONCILER, BACKUP, ADMIN))
"""Roles for whose snapshots deletions are held: a hold stops all of them, for up to a week."""

WAL_CONFIG_SHOWN_TO = frozenset((BROKER, COMPACTOR, RECONCILER, ADMIN))
"""Roles that GetNodes shows where brokers' write-ahead logs are, which may hold secrets."""
