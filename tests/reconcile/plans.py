"""Plans for reconciliation tests that start no Spark."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from streammeta.reconcile.plan_folder import PlanResult, Tally
from streammeta.reconcile.verdicts import Verdict
from streammeta.storage.object_format.object_key import cluster_namespace

HOUR_MS = 3_600_000


def example_plan(made_at_ms: int = 1_000 * HOUR_MS, **changes: Any) -> PlanResult:
    """A plan of cluster c1 that may be applied, with every field set, and then `changes`."""
    plan = PlanResult(
        cluster_id="c1",
        cluster_uuid="uuid-1",
        store="s3://b",
        place="s3://b at Amazon S3",
        namespace=cluster_namespace("c1"),
        connect=("h:1", "h:2"),
        created_at_ms=made_at_ms,
        listing_started_ms=made_at_ms - 60_000,
        young_from_ms=made_at_ms - 60_000 - HOUR_MS,
        unsafe_grace=False,
        map_end_offset=9,
        map_epoch=4,
        next_object_id=100,
        map_objects=80,
        classes={Verdict.LIVE: Tally(80, 8000), Verdict.ORPHAN: Tally(20, 2000)},
        unfinished_uploads=2,
    )
    return replace(plan, **changes)
