"""Earlier plans of the same bucket, in the folders next to a plan.

Reads only plan.json files. Skips folders without a readable plan, and plans of another cluster or
store.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from streammeta.reconcile.plans.plan_folder import PLAN_FILE, PlanResult, read_plan_file
from streammeta.reconcile.vocabulary.errors import PlanError

PLANS_SHOWN = 30
# A folder of `watch` may contain years of rounds.
_FOLDERS_READ = 300


def earlier_plans(folder: Path, plan: PlanResult) -> tuple[PlanResult, ...]:
    """Return the last plans before `plan`, oldest first. `folder` is the folder of `plan`.

    Of very many folders, only the most recently written plans are read.
    """
    files = [(_written_at(path), path) for path in folder.absolute().parent.glob(f"*/{PLAN_FILE}")]
    found: list[PlanResult] = []
    for _, path in sorted(files, reverse=True)[:_FOLDERS_READ]:
        # A draft, a damaged plan or one of another version only shortens the history.
        with suppress(PlanError):
            found.append(read_plan_file(path.parent))
    # A parent folder may contain plans of several clusters.
    same = [
        earlier
        for earlier in found
        if (earlier.identity, earlier.place) == (plan.identity, plan.place)
        and earlier.listing_started_ms < plan.listing_started_ms
        and earlier.next_object_id is not None
    ]
    return tuple(sorted(same, key=lambda earlier: earlier.listing_started_ms)[-PLANS_SHOWN:])


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # deleted meanwhile
        return 0.0
