"""Rules of methods, in a second table by role; namespaces of keys; bounds of epochs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from streammeta.controller.errors import ErrorCode, InvalidRequestError
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.tables.epochs import FREE_MAX, STEP_MAX
from streammeta.controller.metadata.tables.values import INT64_MAX, NodeIdentity
from streammeta.controller.records import record as rec
from streammeta.controller.trust.authenticator import (
    ANONYMOUS,
    NAMESPACE_OF,
    RPC_RULES,
    Authenticator,
    Caller,
)
from streammeta.controller.trust.namespaces import require_namespaces
from streammeta.controller.trust.policy import RESERVED_NAMESPACES, parse_policy
from streammeta.controller.trust.refusals import NotYourNamespaceError, RoleLacksCallError
from streammeta.rpc.contract import SERVICES
from streammeta.tls.identity import Principal, Role
from tests.trust.trusted_server import CLUSTER, shown

OF_GRPC = (health_pb2, reflection_pb2)

CONTRACT = Path(__file__).resolve().parents[2] / "proto" / "streammeta" / "v1"

CALLERS = {
    "p": Principal(CLUSTER, Role.CONTROLLER, "3"),
    "b": Principal(CLUSTER, Role.BROKER, "1007"),
    "n": Principal(CLUSTER, Role.BROKER, "new"),
    "c": Principal(CLUSTER, Role.COMPACTOR, "night"),
    "r": Principal(CLUSTER, Role.READER, "spark"),
    "x": Principal(CLUSTER, Role.RECONCILER, "weekly"),
    "k": Principal(CLUSTER, Role.BACKUP, "hourly"),
    "a": Principal(CLUSTER, Role.ADMIN, "alice"),
    "m": Principal(CLUSTER, Role.MONITOR, "prometheus"),
    "u": Principal(CLUSTER, Role.USER, "bob"),
}

WHO_MAY = {
    "AddVoter": "a",
    "RemoveVoter": "a",
    "DescribeQuorum": "pbncrxka",
    "DescribeCluster": "pbncrxka",
    "StateHash": "prxka",
    "TakeSnapshot": "ka",
    "TransferLeadership": "a",
    "UpdateFeatureLevel": "a",
    "AdoptObjects": "a",
    "FinishRestore": "a",
    "RegisterNode": "b",
    "Heartbeat": "b",
    "UnregisterNode": "ba",
    "GetNextNodeId": "na",
    "GetNodes": "bcrxa",
    "ListStreamSetObjects": "bcrxa",
    "ListStreamObjects": "bcrxa",
    "LockNode": "a",
    "UnlockNode": "a",
    "CreateStreams": "ba",
    "OpenStreams": "b",
    "CloseStreams": "b",
    "TrimStreams": "b",
    "DeleteStreams": "ba",
    "GetOpeningStreams": "b",
    "AbandonUploads": "a",
    "IssueProducerIds": "b",
    "DescribeStreams": "bcrxa",
    "FindStreams": "bcrxa",
    "PrepareObjects": "bc",
    "CommitStreamSetObject": "bc",
    "CommitStreamObject": "bc",
    "CommitPipeline": "bc",
    "GetObjects": "bcrxa",
    "DescribeObjects": "bcrxa",
    "CheckObjects": "bcxa",
    "CommitNamedObjects": "b",
    "DeleteNamedObjects": "ba",
    "DescribeNamedObjects": "bcrxa",
    "GetKVs": "brxa",
    "ListKVs": "bra",
    "PutKVs": "bxa",
    "DeleteKVs": "ba",
    "Watch": "bcrxka",
    "GetSnapshot": "rxka",
}
EVERY_CALLER = "".join(CALLERS)

HELD_TO_A_NODE = {
    "RegisterNode", "Heartbeat", "UnregisterNode", "CreateStreams", "OpenStreams", "CloseStreams",
    "TrimStreams", "DeleteStreams", "GetOpeningStreams", "IssueProducerIds", "PrepareObjects",
    "CommitStreamSetObject", "CommitStreamObject", "CommitPipeline", "CommitNamedObjects",
    "DeleteNamedObjects",
}  # fmt: skip


def methods() -> Iterator[tuple[str, str]]:
    """Yield full name and the callers, of each method of each service that a controller serves."""
    for service in SERVICES.values():
        for method in service.methods:
            yield method.full_name, WHO_MAY[method.name]
    for module in OF_GRPC:
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield method.full_name, EVERY_CALLER


def may_call(method: str, principal: Principal) -> bool:
    try:
        Authenticator(CLUSTER).authenticate(method, shown(principal))
    except RoleLacksCallError:
        return False
    return True


def test_every_method_is_called_by_those_who_may_and_by_no_other() -> None:
    found = {
        method: "".join(letter for letter, caller in CALLERS.items() if may_call(method, caller))
        for method, _ in methods()
    }
    assert found == dict(methods())


def test_every_rule_is_of_a_method() -> None:
    assert set(RPC_RULES) == {method for method, _ in methods()}


def test_brokers_are_held_to_their_node_where_requests_name_one() -> None:
    held = {name.rpartition(".")[2] for name, rule in RPC_RULES.items() if rule.binds_brokers}
    assert held == HELD_TO_A_NODE


def test_the_comments_of_the_contract_name_the_roles_that_may_call() -> None:
    said = {}
    for path in CONTRACT.glob("*.proto"):
        for roles, method in re.findall(
            r"^  // Roles: ([^;.]*).*\n  rpc (\w+)", path.read_text(), re.M
        ):
            said[method] = set(roles.split(", "))
    names = {letter: str(caller.role) for letter, caller in CALLERS.items()}
    names["n"] = "broker/new"
    described = {"DescribeCluster", "DescribeQuorum"}  # the frame of the contract names it once
    assert said == {
        method: {names[letter] for letter in may if letter != "n" or method not in described}
        for method, may in WHO_MAY.items()
    }


@pytest.mark.parametrize("letter", CALLERS)
def test_a_method_without_a_rule_is_called_by_nobody(letter: str) -> None:
    with pytest.raises(RoleLacksCallError, match="NewService/New"):
        Authenticator(CLUSTER).authenticate("streammeta.v1.NewService.New", shown(CALLERS[letter]))


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


def caller_with(role: Role, name: str = "1") -> Caller:
    roles = frozenset((role,))
    return Caller(Principal("test", role, name), roles, allowed_by=roles, policy=POLICY)


def naming(namespace: str, *before: str) -> list[object]:
    """Return requests of every kind whose last key is in a namespace."""
    names = (*before, namespace)
    puts = tuple(requests.KVToPut(key="k", value=b"v", namespace=name) for name in names)
    keys = tuple(requests.KVKey(key="k", namespace=name) for name in names)
    owned = tuple(
        requests.NamedObjectToCommit(
            object_id=0, name="n", object_size=0, owner_key=requests.OwnerKey(name, "k")
        )
        for name in names
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
        requests.DeleteNamedObjects(node=NODE, owner_key=requests.OwnerKey(namespace, "k")),
    ]


def may(who: Caller, request: object) -> bool:
    try:
        require_namespaces(who, request)
    except NotYourNamespaceError:
        return False
    return True


@pytest.mark.parametrize("request_", naming("team/x", "free"), ids=lambda call: type(call).__name__)
def test_a_namespace_is_its_owners_and_admins_alone(request_: object) -> None:
    assert may(caller_with(Role.BROKER), request_)
    assert may(caller_with(Role.ADMIN), request_)
    assert may(ANONYMOUS, request_)
    assert not may(caller_with(Role.BROKER, "2"), request_)
    assert not may(caller_with(Role.READER), request_)


@pytest.mark.parametrize("request_", naming("free"), ids=lambda request: type(request).__name__)
def test_a_namespace_that_nobody_owns_is_for_all_that_may_use_keys(request_: object) -> None:
    assert may(caller_with(Role.BROKER, "2"), request_)
    assert not may(caller_with(Role.RECONCILER), request_), "its own namespace alone"


@pytest.mark.parametrize(
    "request_", naming(f"{RESERVED_NAMESPACES}any"), ids=lambda request: type(request).__name__
)
def test_reserved_namespaces_are_admins_alone(request_: object) -> None:
    assert may(caller_with(Role.ADMIN), request_)
    assert not may(caller_with(Role.BROKER), request_)
    assert not may(caller_with(Role.RECONCILER), request_)


def test_a_reconciler_has_its_own_namespace() -> None:
    for request in naming(NAMESPACE_OF[Role.RECONCILER]):
        assert may(caller_with(Role.RECONCILER), request)
        assert not may(caller_with(Role.BROKER), request)


OWNER = NodeIdentity(1007, 1)
NANOSECONDS_IN_2100 = 4_102_444_800 * 10**9


def written(cluster_metadata: ClusterMetadata, request: requests.WriteRequest) -> ErrorCode:
    """Decide and replay a request; return its outcome."""
    offset = cluster_metadata.applied_end_offset
    decision = cluster_metadata.decide(request, 0, offset)
    cluster_metadata.apply(offset, decision.records)
    answer = decision.answer
    if isinstance(request, requests.OpenStreams):
        (stream,) = answer.streams  # type: ignore[attr-defined]
        answer = stream
    error: ErrorCode = answer.error  # type: ignore[attr-defined]
    return error


def with_stream() -> ClusterMetadata:
    cluster_metadata = ClusterMetadata()
    written(cluster_metadata, requests.RegisterNode(node=OWNER))
    new = requests.CreateStreams(request_id="new", node=OWNER, streams=(requests.NewStream(),))
    written(cluster_metadata, new)
    return cluster_metadata


def registration(epoch: int) -> requests.WriteRequest:
    return requests.RegisterNode(node=NodeIdentity(1007, epoch))


def recovery(epoch: int) -> requests.WriteRequest:
    return requests.GetOpeningStreams(node=NodeIdentity(1007, epoch))


def opening(epoch: int) -> requests.WriteRequest:
    return requests.OpenStreams(
        node=NodeIdentity(1007, INT64_MAX), streams=(requests.StreamToOpen(0, epoch),)
    )


@pytest.mark.parametrize("ask", [registration, recovery, opening])
def test_epochs_may_be_counters_and_times_of_any_unit(
    ask: Callable[[int], requests.WriteRequest],
) -> None:
    for epoch in (2, 1_763_000_000, 1_763_000_000_000, 1_763 * 10**15, NANOSECONDS_IN_2100):
        cluster_metadata = with_stream()
        assert written(cluster_metadata, ask(epoch)) is ErrorCode.NONE


@pytest.mark.parametrize("ask", [registration, recovery, opening])
def test_after_the_largest_epoch_that_is_taken_comes_a_larger_one(
    ask: Callable[[int], requests.WriteRequest],
) -> None:
    cluster_metadata = with_stream()
    before = cluster_metadata.state_hash()
    for epoch in (INT64_MAX, FREE_MAX + STEP_MAX + 1, FREE_MAX + 1):
        with pytest.raises(InvalidRequestError, match=f"{FREE_MAX}"):
            written(cluster_metadata, ask(epoch))
    assert cluster_metadata.state_hash() == before
    for epoch in (FREE_MAX, FREE_MAX + 1, FREE_MAX + 1 + STEP_MAX):
        assert written(cluster_metadata, close(ask(epoch), cluster_metadata)) is ErrorCode.NONE
    with pytest.raises(InvalidRequestError, match=f"{FREE_MAX + 1 + 2 * STEP_MAX}"):
        written(cluster_metadata, close(ask(INT64_MAX), cluster_metadata))


def close(
    request: requests.WriteRequest, cluster_metadata: ClusterMetadata
) -> requests.WriteRequest:
    """Return the request, with its stream closed if it is an opening."""
    if isinstance(request, requests.OpenStreams):
        asked = cluster_metadata.query(requests.DescribeStreams(stream_ids=(0,)))
        (stream,) = asked.streams  # type: ignore[attr-defined]
        if stream.epoch >= 0:
            epoch = requests.StreamToClose(0, stream.epoch)
            written_close = requests.CloseStreams(
                node=NodeIdentity(1007, INT64_MAX), streams=(epoch,)
            )
            offset = cluster_metadata.applied_end_offset
            cluster_metadata.apply(
                offset, cluster_metadata.decide(written_close, 0, offset).records
            )
    return request


def test_records_of_the_past_are_replayed_whatever_their_epoch() -> None:
    cluster_metadata = with_stream()
    record = rec.NodeEpochSet(node_id=1007, node_epoch=INT64_MAX, failover=False)
    cluster_metadata.apply(cluster_metadata.applied_end_offset, (record,))
    node = cluster_metadata.node(1007)
    assert node is not None
    assert node.node_epoch == INT64_MAX
