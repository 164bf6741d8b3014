"""Admission: which plans are not applied, whatever their candidates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streammeta.reconcile.errors import ConfigurationError, PlanError
from streammeta.reconcile.identity import ClusterIdentity
from streammeta.reconcile.plan_folder import (
    CLOCK_SKEW_MS,
    GRACE_FLOOR_MS,
    check_grace,
    check_identity,
    check_plan,
    check_store,
)
from streammeta.reconcile.verdicts import GuardResult
from tests.reconcile.plans import HOUR_MS, example_plan

FOLDER = Path("p")
NOW = 1_000 * HOUR_MS
AT_THE_FLOOR = NOW - 60_000 - GRACE_FLOOR_MS


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"listing_started_ms": NOW - 24 * HOUR_MS, "young_from_ms": NOW - 25 * HOUR_MS},
        {"created_at_ms": NOW + CLOCK_SKEW_MS},
        {"young_from_ms": AT_THE_FLOOR},
        {"young_from_ms": NOW - 60_000, "unsafe_grace": True},
    ],
)
def test_what_may_be_applied(changes: dict[str, Any]) -> None:
    check_plan(FOLDER, example_plan(NOW, **changes), NOW)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"created_at_ms": 0}, "1000 h old"),
        ({"listing_started_ms": 0, "young_from_ms": -HOUR_MS}, "1000 h old"),
        (
            {"listing_started_ms": NOW - 24 * HOUR_MS - 1, "young_from_ms": 0},
            "24 h old, wanted at most 24 h; make a new plan",
        ),
        ({"created_at_ms": NOW + CLOCK_SKEW_MS + 1}, "600 s in the future"),
        (
            {"listing_started_ms": NOW + HOUR_MS, "young_from_ms": NOW - HOUR_MS},
            "3600 s in the future",
        ),
        ({"young_from_ms": AT_THE_FLOOR + 1}, "--grace is 899 s, wanted at least 15m"),
        ({"young_from_ms": NOW, "unsafe_grace": True}, "wanted 0 or more"),
        ({"next_object_id": None}, "without a copy of the map"),
        (
            {"guards": (GuardResult("not_issued", False, "7 keys"),)},
            "report only, its guards failed: not_issued: 7 keys",
        ),
    ],
)
def test_what_may_not_be_applied(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        check_plan(FOLDER, example_plan(NOW, **changes), NOW)


@pytest.mark.parametrize(
    ("grace_ms", "is_unsafe"), [(GRACE_FLOOR_MS, False), (0, True), (HOUR_MS, True)]
)
def test_grace_periods_that_are_taken(grace_ms: int, is_unsafe: bool) -> None:
    check_grace(grace_ms, is_unsafe=is_unsafe)


@pytest.mark.parametrize(
    ("grace_ms", "is_unsafe"), [(GRACE_FLOOR_MS - 1, False), (0, False), (-1, True)]
)
def test_grace_periods_that_are_refused(grace_ms: int, is_unsafe: bool) -> None:
    with pytest.raises(ConfigurationError, match="grace"):
        check_grace(grace_ms, is_unsafe=is_unsafe)


def test_the_same_bucket_at_another_endpoint_is_another_store() -> None:
    plan = example_plan(place="s3://b at http://127.0.0.1:9000")
    check_store("s3://b?endpoint=http://127.0.0.1:9000/&accessKey=a&secretKey=SK", plan)
    with pytest.raises(
        PlanError, match=r"plan is of the store s3://b at http://127.0.0.1:9000, but"
    ):
        check_store("s3://b?endpoint=http://127.0.0.1:9001&accessKey=a&secretKey=SK", plan)
    with pytest.raises(PlanError, match="Amazon S3"):
        check_store("s3://b", plan)


@pytest.mark.parametrize(
    "found",
    [
        ClusterIdentity("c2", "uuid-1", "_streammeta_c1"),
        ClusterIdentity("c1", "uuid-2", "_streammeta_c1"),
        ClusterIdentity("c1", "uuid-1", "_streammeta_c2"),
    ],
)
def test_a_plan_of_another_cluster_is_not_applied(found: ClusterIdentity) -> None:
    check_identity(ClusterIdentity("c1", "uuid-1", "_streammeta_c1"), example_plan(), ("h:1",))
    with pytest.raises(PlanError, match=f"the plan is of cluster 'c1'.*h:1 is {found.described()}"):
        check_identity(found, example_plan(), ("h:1",))
