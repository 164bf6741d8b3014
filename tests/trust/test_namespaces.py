"""Namespaces of keys: every request that names one is held to its owners."""

from __future__ import annotations

import pytest

from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.tables.values import NodeIdentity
from streammeta.controller.trust.access_rules import NAMESPACE_OF
from streammeta.controller.trust.authenticator import ANONYMOUS, Caller
from streammeta.controller.trust.namespaces import require_namespaces
from streammeta.controller.trust.policy import RESERVED_NAMESPACES, parse_policy
from streammeta.controller.trust.refusals import NotYourNamespaceError
from streammeta.tls.identity import Principal, Role

NODE = NodeIdentity(1, 1)
POLICY = parse_policy(
    """
    [[namespace]]
    prefix = "team/"
    principals = ["broker/1"]
    """,
    "test",
    "policy.toml",
)


def caller(role: Role, name: str = "1") -> Caller:
    roles = frozenset((role,))
    return Caller(Principal("test", role, name), roles, allowed_by=roles, policy=POLICY)


def naming(namespace: str, *before: str) -> list[object]:
    """Return requests of every kind whose last key is in a namespace."""
    names = (*before, namespace)
    puts = tuple(requests.KVToPut(key="k", value=b"v", namespace=one) for one in names)
    keys = tuple(requests.KVKey(key="k", namespace=one) for one in names)
    owned = tuple(
        requests.NamedObjectToCommit(
            object_id=0, name="n", object_size=0, owner_key=requests.OwnerKey(one, "k")
        )
        for one in names
    )
    return [
        requests.PutKVs(items=puts),
        requests.GetKVs(keys=keys),
        requests.DeleteKVs(keys=keys),
        requests.ListKVs(namespace=namespace),
        requests.CommitStreamSetObject(
            node=NODE, object_id=0, order_id=0, object_size=1, kv_puts=puts
        ),
        requests.CommitStreamObject(
            node=NODE, object_size=0, stream_id=0, stream_epoch=0, kv_puts=puts
        ),
        requests.CommitNamedObjects(node=NODE, objects=owned),
    ]


def may(who: Caller, request: object) -> bool:
    try:
        require_namespaces(who, request)
    except NotYourNamespaceError:
        return False
    return True


@pytest.mark.parametrize("request_", naming("team/x", "free"), ids=lambda one: type(one).__name__)
def test_a_namespace_is_its_owners_and_admins_alone(request_: object) -> None:
    assert may(caller(Role.BROKER), request_)
    assert may(caller(Role.ADMIN), request_)
    assert may(ANONYMOUS, request_)
    assert not may(caller(Role.BROKER, "2"), request_)
    assert not may(caller(Role.READER), request_)


@pytest.mark.parametrize("request_", naming("free"), ids=lambda one: type(one).__name__)
def test_a_namespace_that_nobody_owns_is_for_all_that_may_use_keys(request_: object) -> None:
    assert may(caller(Role.BROKER, "2"), request_)
    assert not may(caller(Role.RECONCILER), request_), "its own namespace alone"


@pytest.mark.parametrize(
    "request_", naming(f"{RESERVED_NAMESPACES}any"), ids=lambda one: type(one).__name__
)
def test_reserved_namespaces_are_admins_alone(request_: object) -> None:
    assert may(caller(Role.ADMIN), request_)
    assert not may(caller(Role.BROKER), request_)
    assert not may(caller(Role.RECONCILER), request_)


def test_a_reconciler_has_its_own_namespace() -> None:
    for request in naming(NAMESPACE_OF[Role.RECONCILER]):
        assert may(caller(Role.RECONCILER), request)
        assert not may(caller(Role.BROKER), request)
