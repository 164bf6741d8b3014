"""Rules of methods: a table of callers and calls, written anew, against every method and role."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from streammeta.controller.trust.access_rules import RPC_RULES
from streammeta.controller.trust.authenticator import Authenticator
from streammeta.controller.trust.refusals import RoleLacksCallError
from streammeta.rpc.contract import SERVICES
from streammeta.tls.identity import Principal, Role
from tests.trust.callers import CLUSTER, shown

OF_GRPC = (health_pb2, reflection_pb2)

CONTRACT = Path(__file__).resolve().parents[2] / "proto" / "streammeta" / "v1"

ROLES_OF_METHOD = r"^  // Roles: ([^;.]*).*\n  rpc (\w+)"

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
    "LockNode": "a",
    "UnlockNode": "a",
    "CreateStreams": "ba",
    "OpenStreams": "b",
    "CloseStreams": "b",
    "TrimStreams": "b",
    "DeleteStreams": "ba",
    "GetOpeningStreams": "b",
    "AbandonUploads": "a",
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
    "TrimStreams", "DeleteStreams", "GetOpeningStreams", "PrepareObjects", "CommitStreamSetObject",
    "CommitStreamObject", "CommitPipeline", "CommitNamedObjects", "DeleteNamedObjects",
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
    names = {letter: str(one.role) for letter, one in CALLERS.items()}
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
