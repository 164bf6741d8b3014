"""Who recovers the data of brokers that are gone: the plan, made of what is known of nodes alone.

A node's data has to be recovered when the node is fenced and has open streams or owes uploads; a
locked node's data may lie where nobody else can reach it, so it waits for the node itself. Pure;
looks at nodes, never at streams.
"""

from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence

from streammeta.controller.lifecycle.sessions import NodeState, Sessions
from streammeta.controller.metadata.answers import NodeDescription
from streammeta.controller.metadata.requests import RecoveryTarget

NOBODY = -1
"""The target of a recovery that is over."""


def owes(node: NodeDescription) -> bool:
    """Whether data would be missing if the node's process ended for good."""
    return node.has_opening_streams or node.pending_upload_count > 0


def plan_recoveries(
    nodes: Sequence[NodeDescription], sessions: Sessions, per_target: int
) -> tuple[RecoveryTarget, ...]:
    """Return what has to change so that all failed nodes are recovered by active ones.

    Assignments that can go on stay. A target gets at most `per_target` nodes, the least busy first,
    in turn from the first failed node's id on, so that a node's neighbours are not always the ones.
    What finds no target waits. Deterministic; `nodes` are in id order.
    """
    failed = {node.node_id for node in nodes if _has_failed(node, sessions)}
    targets = [
        node.node_id
        for node in nodes
        if sessions.state(node.node_id) is NodeState.ACTIVE and node.node_id not in failed
    ]
    load = dict.fromkeys(targets, 0)
    kept = set()
    for node in nodes:
        if node.node_id in failed and load.get(node.recovered_by, per_target) < per_target:
            load[node.recovered_by] += 1
            kept.add(node.node_id)
    slots = _slots(targets, load, per_target, min(failed - kept, default=NOBODY))
    changes = []
    for node in nodes:
        if node.node_id in kept:
            continue
        target = next(slots, NOBODY) if node.node_id in failed else NOBODY
        if target != node.recovered_by:
            changes.append(RecoveryTarget(node.node_id, node.node_epoch, target))
    return tuple(changes)


def _has_failed(node: NodeDescription, sessions: Sessions) -> bool:
    if not owes(node) or node.locked:
        return False
    if sessions.state(node.node_id) is NodeState.FENCED:
        return True
    # A recovery begun under an earlier leader goes on: it fences the process, or was to.
    begun = node.failover or node.recovered_by != NOBODY
    return begun and node.supervised and not sessions.is_heard(node.node_id)


def _slots(
    targets: Sequence[int], load: Mapping[int, int], per_target: int, after: int
) -> Iterator[int]:
    """Yield targets as often as they have room, one level of load after the other."""
    turn = bisect(targets, after)
    in_turn = [*targets[turn:], *targets[:turn]]
    return (one for level in range(per_target) for one in in_turn if load[one] <= level)
