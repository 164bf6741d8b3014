"""Reasons not to trust a plan as a whole, however sure each of its verdicts is.

Pure: counts in, findings out. A plan with a failed guard is still written, as a report; apply
refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from storage.reconcile.classify import Verdict

_IN_BUCKET_AND_OURS = (
    Verdict.LIVE,
    Verdict.IN_FLIGHT,
    Verdict.DELETING,
    Verdict.ORPHAN,
    Verdict.TOO_YOUNG,
    Verdict.NOT_ISSUED,
    Verdict.SIZE_MISMATCH,
    Verdict.UNKNOWN_STATE,
)
_PRESENT_AND_WANTED = (Verdict.LIVE, Verdict.SIZE_MISMATCH)


@dataclass(frozen=True, slots=True)
class GuardResult:
    """One guard's finding; `detail` gives the numbers and, if it failed, what to do."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """The limits chosen by the user; `max_share` is a fraction 0..1."""

    max_share: float
    allow_empty_map: bool


def check_guards(
    counts: Mapping[Verdict, int], map_objects: int, settings: GuardSettings
) -> tuple[GuardResult, ...]:
    """Every guard's finding, from keys per verdict and the number of committed objects."""
    return (
        _empty_map(counts, map_objects, settings),
        _right_bucket(counts),
        _share(counts, settings),
    )


def _own_keys(counts: Mapping[Verdict, int]) -> int:
    return sum(counts.get(verdict, 0) for verdict in _IN_BUCKET_AND_OURS)


def _empty_map(
    counts: Mapping[Verdict, int], map_objects: int, settings: GuardSettings
) -> GuardResult:
    own = _own_keys(counts)
    detail = f"the map has {map_objects} committed objects, the bucket {own} keys of this cluster"
    passed = map_objects > 0 or own == 0 or settings.allow_empty_map
    if not passed:
        detail += (
            "; check that --connect names the right cluster, then give --allow-empty-map if every"
            " object was really destroyed"
        )
    return GuardResult("empty_map", passed, detail)


def _right_bucket(counts: Mapping[Verdict, int]) -> GuardResult:
    missing = counts.get(Verdict.MISSING, 0)
    present = sum(counts.get(verdict, 0) for verdict in _PRESENT_AND_WANTED)
    detail = f"{present} objects of the map are in the bucket, {missing} are not"
    passed = present > 0 or missing == 0
    if not passed:
        detail += "; check --store and --namespace: this is not where the cluster keeps its objects"
    return GuardResult("right_bucket", passed, detail)


def _share(counts: Mapping[Verdict, int], settings: GuardSettings) -> GuardResult:
    own = _own_keys(counts)
    candidates = counts.get(Verdict.ORPHAN, 0)
    share = candidates / own if own else 0.0
    detail = (
        f"{candidates} of {own} keys of this cluster are candidates: {share:.1%},"
        f" allowed {settings.max_share:.1%}"
    )
    passed = share <= settings.max_share
    if not passed:
        detail += "; look at the candidates, then plan again with a larger --max-share"
    return GuardResult("max_share", passed, detail)
