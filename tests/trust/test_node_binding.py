"""Binding of brokers to nodes: a recovery and a compaction are assigned apart from each other."""

from __future__ import annotations

import pytest

from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.registries.nodes import Node
from streammeta.controller.metadata.tables.values import NodeIdentity, column
from streammeta.controller.trust.node_binding import NodeBinding, require_own_node
from streammeta.controller.trust.refusals import NotYourNodeError
from streammeta.tls.identity import Principal, Role

GONE = NodeIdentity(1, 5)
NODE = Node(node_id=1, node_epoch=5, failover=True, recovered_by=2)
OWNER, RECOVERER, COMPACTOR = (Principal("test", Role.BROKER, name) for name in "123")
BINDING = NodeBinding(compacted_by=lambda _: 3)


def commit(*, failover: bool, compacted: tuple[int, ...] = ()) -> requests.CommitStreamSetObject:
    return requests.CommitStreamSetObject(
        node=GONE,
        object_id=7,
        order_id=7,
        object_size=1,
        failover=failover,
        compacted_object_ids=column(compacted),
    )


UPLOAD = commit(failover=True)
COMPACTION = commit(failover=True, compacted=(4,))
OWN_UPLOAD = commit(failover=False)
OWN_COMPACTION = commit(failover=False, compacted=(4,))


@pytest.mark.parametrize(
    ("caller", "allowed"),
    [
        (OWNER, (UPLOAD, COMPACTION, OWN_UPLOAD, OWN_COMPACTION)),
        (RECOVERER, (UPLOAD,)),
        (COMPACTOR, (COMPACTION,)),
    ],
    ids=["owner", "recoverer", "compactor"],
)
def test_a_broker_makes_only_the_commits_that_are_assigned_to_it(
    caller: Principal, allowed: tuple[requests.CommitStreamSetObject, ...]
) -> None:
    for request in (UPLOAD, COMPACTION, OWN_UPLOAD, OWN_COMPACTION):
        if request in allowed:
            BINDING.require(caller, [request], lambda _: NODE)
        else:
            with pytest.raises(NotYourNodeError):
                BINDING.require(caller, [request], lambda _: NODE)


def test_all_requests_of_a_batch_are_judged() -> None:
    with pytest.raises(NotYourNodeError):
        BINDING.require(RECOVERER, [UPLOAD, COMPACTION], lambda _: NODE)


@pytest.mark.parametrize("request_", [UPLOAD, COMPACTION])
def test_nobody_speaks_for_a_node_that_is_not_known(
    request_: requests.CommitStreamSetObject,
) -> None:
    for caller in (RECOVERER, COMPACTOR):
        with pytest.raises(NotYourNodeError):
            BINDING.require(caller, [request_], lambda _: None)


def test_a_call_of_a_broker_is_for_its_own_node() -> None:
    require_own_node(OWNER, 1)
    with pytest.raises(NotYourNodeError):
        require_own_node(OWNER, 2)
