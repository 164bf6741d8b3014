"""Admission of a plan: what must hold before any of its candidates is touched.

Compares what a plan says of itself with the clock and with what apply was given. Asks no one else:
controllers and bucket are the business of `identity`.
"""

from __future__ import annotations

from pathlib import Path

from streammeta.reconcile.errors import ConfigurationError, PlanError
from streammeta.reconcile.identity import ClusterIdentity
from streammeta.reconcile.plan_folder import PlanResult
from streammeta.reconcile.store_address import place_of
from streammeta.storage.object_store.address import without_secrets

GRACE_FLOOR_MS = 15 * 60 * 1000
"""Shortest grace period without --unsafe-grace, in milliseconds."""

PLAN_LIFE_MS = 24 * 3600 * 1000
"""Time since the listing began after which a plan is refused, in milliseconds."""

CLOCK_SKEW_MS = 10 * 60 * 1000
"""Largest difference between two machines' clocks that is put up with, in milliseconds."""


def check_grace(grace_ms: int, *, is_unsafe: bool) -> None:
    """Raise `ConfigurationError` on a grace period that is negative, or short by accident."""
    if grace_ms < 0:
        raise ConfigurationError(f"the grace period is {grace_ms} ms, wanted 0 or more")
    if grace_ms < GRACE_FLOOR_MS and not is_unsafe:
        raise ConfigurationError(
            f"--grace is {grace_ms // 1000} s, wanted at least {GRACE_FLOOR_MS // 60_000}m: what a"
            " broker has just written may look like an orphan; --unsafe-grace takes less, for"
            " clusters without writers"
        )


def check_plan(folder: Path, plan: PlanResult, now_ms: int) -> None:
    """Refuse a plan that is a report only, too old, of the future, or without a grace period.

    Raises:
        PlanError: the plan must not be applied, with the reason.
    """
    if plan.failed_guards:
        reasons = "; ".join(f"{guard.name}: {guard.detail}" for guard in plan.failed_guards)
        raise PlanError(f"the plan {folder} is a report only, its guards failed: {reasons}")
    if plan.next_object_id is None:
        raise PlanError(f"the plan {folder} was made without a copy of the map; make a new plan")
    earliest = min(plan.created_at_ms, plan.listing_started_ms)
    latest = max(plan.created_at_ms, plan.listing_started_ms)
    if now_ms - earliest > PLAN_LIFE_MS:
        raise PlanError(
            f"the plan {folder} is {(now_ms - earliest) // 3_600_000} h old, wanted at most"
            f" {PLAN_LIFE_MS // 3_600_000} h; make a new plan"
        )
    if latest - now_ms > CLOCK_SKEW_MS:
        raise PlanError(
            f"the plan {folder} is dated {(latest - now_ms) // 1000} s in the future; set this"
            " machine's clock right, or make a new plan"
        )
    try:
        check_grace(plan.listing_started_ms - plan.young_from_ms, is_unsafe=plan.unsafe_grace)
    except ConfigurationError as error:
        raise PlanError(f"the plan {folder} can't be applied ({error}); make a new plan") from error


def check_store(store: str, plan: PlanResult) -> None:
    """Raise `PlanError` unless `store` is the plan's bucket at the plan's endpoint."""
    place = place_of(store)
    if place != plan.place:
        raise PlanError(
            f"the plan is of the store {plan.place}, but {without_secrets(store)} is {place};"
            " give --store of the same bucket and endpoint, or make a plan of this one"
        )


def check_identity(found: ClusterIdentity, plan: PlanResult, connect: tuple[str, ...]) -> None:
    """Raise `PlanError` unless the controllers are of the plan's cluster."""
    if found != plan.identity:
        raise PlanError(
            f"the plan is of {plan.identity.described()}, but {', '.join(connect)} is"
            f" {found.described()}; apply it with --connect of its own cluster"
        )
