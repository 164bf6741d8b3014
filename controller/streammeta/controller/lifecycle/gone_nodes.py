"""Who compacts the set objects of brokers that are gone, planned from what is known of nodes alone.

A node is gone once it has departed, was fenced by its recovery, or is silent for longer than its
session lasts. Others compact in its name from the moment when nothing of it is to be recovered any
more; a locked node's objects wait for the node itself. Nothing of this is replicated: the map takes
compactions in a gone node's name from anybody, and of two it takes the first. So a new leader plans
anew, and all that moves is work. Pure; looks at nodes, never at objects.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b

from streammeta.controller.lifecycle.recoveries import NOBODY, owes
from streammeta.controller.lifecycle.sessions import NodeState, Sessions
from streammeta.controller.metadata.answers import NodeDescription


def plan_compactions(
    nodes: Sequence[NodeDescription], sessions: Sessions, current: Mapping[int, int]
) -> dict[int, int]:
    """Return which node compacts for which gone one, gone -> target.

    What is assigned stays where it is while its target is heard and has no more than its share.
    All else goes to the least busy, of equals to the one that a hash of both ids puts first: with
    the same nodes every leader begins with the same plan. Deterministic; `nodes` are in id order.
    """
    left = [node.node_id for node in nodes if _is_left(node, sessions)]
    targets = [node.node_id for node in nodes if _is_there(node, sessions)]
    if not left or not targets:
        return {}
    share = -(-len(left) // len(targets))
    load = dict.fromkeys(targets, 0)
    plan: dict[int, int] = {}
    for node_id in left:
        target = current.get(node_id, NOBODY)
        if load.get(target, share) < share:
            load[target] += 1
            plan[node_id] = target
    for node_id in left:
        if node_id not in plan:
            target = _least_busy(load, node_id)
            load[target] += 1
            plan[node_id] = target
    return plan


def _is_left(node: NodeDescription, sessions: Sessions) -> bool:
    """Whether a node has left set objects behind that others are to compact."""
    if not node.stream_set_object_count or node.locked:
        return False
    if owes(node) or node.recovered_by != NOBODY:
        return False
    is_fenced = node.failover or sessions.state(node.node_id) is NodeState.FENCED
    return node.departed or is_fenced


def _is_there(node: NodeDescription, sessions: Sessions) -> bool:
    if node.departed or node.failover or not sessions.is_heard(node.node_id):
        return False
    return sessions.state(node.node_id) is NodeState.ACTIVE


def _least_busy(load: Mapping[int, int], gone: int) -> int:
    return min(load, key=lambda target: (load[target], _rank(gone, target)))


@lru_cache(maxsize=1 << 16)
def _rank(gone: int, target: int) -> bytes:
    return blake2b(b"%d of %d" % (target, gone), digest_size=8).digest()
