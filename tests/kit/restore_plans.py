"""Plans of restores, as `streammeta restore plan` would make them."""

import uuid
from dataclasses import replace

from streammeta.controller.backup import restoring
from streammeta.controller.backup.replaying import Replayed
from streammeta.controller.backup.restoring import RestorePlan
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata

CREATED_MS = 1_701_000_000_000
"""Time of every plan. Leases and waits of a restored cluster begin with it."""


def planned(
    replayed: Replayed, claimed_below: int = 0, cluster_metadata: ClusterMetadata | None = None
) -> RestorePlan:
    """Return the plan of a cluster `after` that is restored from a replayed backup."""
    cluster_metadata = cluster_metadata or replayed.cluster_metadata
    view = cluster_metadata.freeze()
    plan = RestorePlan(
        from_cluster_id="before",
        from_cluster_uuid=str(uuid.UUID(int=1)),
        from_end_offset=replayed.position.end_offset,
        committed_by_ms=replayed.last_ms,
        cluster_id="after",
        cluster_uuid=str(uuid.UUID(int=7)),
        namespace="_streammeta_after",
        voters="1@127.0.0.1:9091",
        end_offset=replayed.position.end_offset + restoring.OFFSET_JUMP,
        epoch=replayed.epoch + restoring.EPOCH_JUMP,
        next_object_id=restoring.jump_object_id(cluster_metadata.next_object_id, claimed_below),
        undecided_from=restoring.first_undecided_id(view, cluster_metadata.next_object_id),
        generation=2,
        created_ms=CREATED_MS,
        state_hash="",
    )
    return replace(plan, state_hash=restoring.state_hash(view, plan))
