"""Assignments of failed brokers' work to active ones: recoveries and compactions.

Recoveries: a fenced node with open streams or pending uploads needs one. The plan is written to the
metadata, so assignments outlive the leader that made them.

Compactions: a node has departed, was fenced by its recovery, or has been silent for longer than its
session. Others compact its stream set objects once all of its data is recovered. This plan is not
replicated. The metadata accepts a compaction in such a node's name from any node, and the first of
two wins. A new leader makes a new plan, and only work moves.

Other nodes may be unable to reach a locked node's data, so it waits for the node itself. Pure
functions of node descriptions, which never read streams or objects.
"""

from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import lru_cache
from hashlib import blake2b

from streammeta.controller.ids import NONE_ID
from streammeta.controller.lifecycle.broker_sessions import NodeState, Sessions
from streammeta.controller.metadata.api.answers import NodeDescription
from streammeta.controller.metadata.api.requests import RecoveryTarget
from streammeta.storage.cluster_files.wal_config import NO_LOG


def has_unrecovered_data(node: NodeDescription) -> bool:
    """Whether data would be lost if the node's process never returned."""
    return node.has_opening_streams or node.pending_upload_count > 0


def plan_recoveries(
    nodes: Sequence[NodeDescription],
    sessions: Sessions,
    per_target: int,
    stalled: Set[int] = frozenset(),
) -> tuple[RecoveryTarget, ...]:
    """Return the changes of assignments with which active nodes recover all failed ones.

    Valid assignments stay. A target gets at most `per_target` nodes, the least busy first, in turn
    from the first failed node's id on, so that the load is not always on the same neighbours. A
    node without a target waits. Recoveries of `stalled` nodes stay without using a slot, so that an
    impossible one does not delay the others. Deterministic. `nodes` are in id order.
    """
    failed = {node.node_id for node in nodes if has_failed(node, sessions)}
    targets = [
        node.node_id
        for node in nodes
        if sessions.state(node.node_id) is NodeState.ACTIVE and node.node_id not in failed
    ]
    load = dict.fromkeys(targets, 0)
    kept = set()
    for node in nodes:
        if node.node_id in failed and load.get(node.recovered_by, per_target) < per_target:
            # A valid assignment stays, because moving it would interrupt a recovery in progress.
            load[node.recovered_by] += node.node_id not in stalled
            kept.add(node.node_id)

    slots = _slots(targets, load, per_target, min(failed - kept, default=NONE_ID))
    changes = []
    for node in nodes:
        if node.node_id in kept:
            continue
        target = next(slots, NONE_ID) if node.node_id in failed else NONE_ID
        if target != node.recovered_by:
            # With the epoch: if the node registers again meanwhile, the change does not apply.
            changes.append(RecoveryTarget(node.node_id, node.node_epoch, target))

    return tuple(changes)


def needs_no_recovery(node: NodeDescription) -> bool:
    """Whether a failed node needs no recovery, because only its streams have to be closed."""
    return node.wal_config == NO_LOG and node.pending_upload_count == 0


def has_successor(nodes: Sequence[NodeDescription], sessions: Sessions) -> bool:
    """Whether a node exists that could open the streams of a failed one.

    A node that never sent a heartbeat is not known to have failed, so it counts.
    """
    return any(
        sessions.state(node.node_id) in (NodeState.ACTIVE, NodeState.UNKNOWN)
        for node in nodes
        if not (node.failover or node.departed)
    )


def has_failed(node: NodeDescription, sessions: Sessions) -> bool:
    """Whether a node has failed and has open streams or pending uploads."""
    # A locked node waits for itself: only its own disk may have the data.
    if not has_unrecovered_data(node) or node.locked:
        return False
    if sessions.state(node.node_id) is NodeState.FENCED:
        return True
    # A recovery started under an earlier leader continues: it fences the process.
    begun = node.failover or node.recovered_by != NONE_ID
    return begun and node.supervised and not sessions.is_heard(node.node_id)


def _slots(
    targets: Sequence[int], load: Mapping[int, int], per_target: int, after: int
) -> Iterator[int]:
    """Yield targets as often as they have free slots, one level of load after another."""
    # The first failed node decides where the turn begins, so equal states give equal plans.
    turn = bisect(targets, after)
    in_turn = [*targets[turn:], *targets[:turn]]
    return (target for level in range(per_target) for target in in_turn if load[target] <= level)


def plan_compactions(
    nodes: Sequence[NodeDescription], sessions: Sessions, current: Mapping[int, int]
) -> dict[int, int]:
    """Return the compacting node of each departed or fenced node, as departed -> target.

    An assignment stays while its target sends heartbeats and has no more than its share. The others
    go to the least busy target, and among equals to the first by a hash of both ids, so that every
    leader starts with the same plan for the same nodes. Deterministic. `nodes` are in id order.
    """
    left = [node.node_id for node in nodes if _is_left(node, sessions)]
    targets = [node.node_id for node in nodes if _is_active(node, sessions)]
    if not left or not targets:
        return {}

    # Rounded up, so that all nodes fit.
    share = -(-len(left) // len(targets))
    load = dict.fromkeys(targets, 0)
    plan: dict[int, int] = {}
    for node_id in left:
        target = current.get(node_id, NONE_ID)
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
    """Whether a node left stream set objects that others should compact."""
    if not node.stream_set_object_count or node.locked:
        return False
    # Its objects may still change until the recovery ends.
    if has_unrecovered_data(node) or node.recovered_by != NONE_ID:
        return False
    is_fenced = node.failover or sessions.state(node.node_id) is NodeState.FENCED
    return node.departed or is_fenced


def _is_active(node: NodeDescription, sessions: Sessions) -> bool:
    if node.departed or node.failover or not sessions.is_heard(node.node_id):
        return False
    return sessions.state(node.node_id) is NodeState.ACTIVE


def _least_busy(load: Mapping[int, int], departed: int) -> int:
    return min(load, key=lambda target: (load[target], _rank(departed, target)))


@lru_cache(maxsize=1 << 16)
def _rank(departed: int, target: int) -> bytes:
    # A hash of both ids spreads the work, and all leaders compute the same one.
    return blake2b(b"%d of %d" % (target, departed), digest_size=8).digest()
