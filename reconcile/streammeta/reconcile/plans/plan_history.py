"""Earlier plans of the same bucket, in the folders beside a plan: what the bucket held then.

Only what the plans say of themselves is read. A folder without a plan that this version can read is
passed over, as is one of another cluster or place.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from streammeta.reconcile.plans.plan_folder import PLAN_FILE, PlanResult, read_plan_file
from streammeta.reconcile.vocabulary.errors import PlanError

PLANS_SHOWN = 30
_FOLDERS_READ = 300


def earlier_plans(folder: Path, plan: PlanResult) -> tuple[PlanResult, ...]:
    """Return the last plans before `plan`, which lies in `folder` or will; the oldest first.

    Of very many folders those are looked at whose plans were written last.
    """
    files = [(_written(path), path) for path in folder.absolute().parent.glob(f"*/{PLAN_FILE}")]
    found: list[PlanResult] = []
    for _, path in sorted(files, reverse=True)[:_FOLDERS_READ]:
        with suppress(PlanError):
            found.append(read_plan_file(path.parent))
    same = [
        one
        for one in found
        if (one.identity, one.place) == (plan.identity, plan.place)
        and one.listing_started_ms < plan.listing_started_ms
        and one.next_object_id is not None
    ]
    return tuple(sorted(same, key=lambda one: one.listing_started_ms)[-PLANS_SHOWN:])


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # deleted meanwhile
        return 0.0
