"""A cluster that is restored from a point of a simulated one issues nothing of before again."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from streammeta.controller.backup import restoring
from streammeta.controller.backup.replaying import Replayed
from streammeta.controller.backup.restoring import RestorePlan
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.tables.values import ObjectState
from tests.sim.sim_time import check

if TYPE_CHECKING:
    from tests.sim.sim_ledger import Ledger

_CREATED_MS = 10**12


def check_jumps(replayed: Replayed, cluster_metadata: ClusterMetadata, ledger: Ledger) -> None:
    """Ids, offsets and epochs of a restored cluster are above all of the committed history."""
    view, committed = cluster_metadata.freeze(), ledger.store.map
    next_object = committed.next_object_id
    plan = RestorePlan(
        from_cluster_id="sim",
        from_cluster_uuid=str(uuid.UUID(int=1)),
        from_end_offset=replayed.position.end_offset,
        committed_by_ms=replayed.last_ms,
        cluster_id="after",
        cluster_uuid=str(uuid.UUID(int=2)),
        namespace="_streammeta_sim",
        voters="1@127.0.0.1:9091",
        end_offset=replayed.position.end_offset + restoring.OFFSET_JUMP,
        epoch=replayed.epoch + restoring.EPOCH_JUMP,
        next_object_id=restoring.jump_object_id(cluster_metadata.next_object_id, next_object),
        undecided_from=restoring.first_undecided_id(view, cluster_metadata.next_object_id),
        generation=2,
        created_ms=_CREATED_MS,
        state_hash="",
    )
    sections = restoring.restore_sections(view, plan)
    after = ClusterMetadata.from_sections(sections, plan.end_offset)
    check(after.next_object_id >= next_object, "object ids jump", f"{after.next_object_id}")
    counters, known = sections["counters"], committed.freeze().sections()["counters"]
    for name in ("next_stream_id", "last_node_id"):
        was, is_ = int(known[name][0]), int(counters[name][0])
        check(is_ > was, "ids of streams and brokers jump", f"{name}: {is_} after {was}")
    check(plan.end_offset > ledger.end, "offsets jump", f"{plan.end_offset}")
    _check_known(after, committed, plan.undecided_from)


def _check_known(after: ClusterMetadata, committed: ClusterMetadata, undecided_from: int) -> None:
    """An object that is committed now is known after the restore, or undecided."""
    described: Any = committed.query(r.DescribeObjects())
    ids = tuple(one.object_id for one in described.objects if one.object_id < undecided_from)
    if not ids:
        return
    states: Any = after.query(r.CheckObjects(object_ids=ids))
    for object_id, state in zip(ids, states.states, strict=True):
        known = f"object {object_id} below {undecided_from}"
        check(state is not ObjectState.REMOVED, "what lives is not taken for an orphan", known)
