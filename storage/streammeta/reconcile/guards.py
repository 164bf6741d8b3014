"""Guards: reasons not to trust a plan as a whole, however sure each of its verdicts is.

Pure: counts in, findings out. A plan with a failed guard is still written, as a report; apply
refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from streammeta.reconcile.classify import Verdict

MISSING_SHARE = 0.01
"""Largest fraction of the map's objects that may be missing or of another size, 0..1."""

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


@dataclass(frozen=True, slots=True)
class GuardResult:
    """One guard's finding; `detail` gives the numbers and, if it failed, what to do."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """The limits chosen by the user; `max_share` is a fraction 0..1, `max_candidates` in keys."""

    max_share: float
    max_candidates: int
    allow_empty_map: bool


@dataclass(frozen=True, slots=True)
class Evidence:
    """Counts of a plan: keys per verdict, committed objects of the map, bounds of issued ids.

    The map issues ids below `issued_below`; the bucket's claims reach `claimed_below`.
    """

    counts: Mapping[Verdict, int]
    map_objects: int
    issued_below: int
    claimed_below: int

    def keys(self, *verdicts: Verdict) -> int:
        """The number of keys with one of these verdicts."""
        return sum(self.counts.get(verdict, 0) for verdict in verdicts)


def check_guards(found: Evidence, settings: GuardSettings) -> tuple[GuardResult, ...]:
    """Every guard's finding."""
    return (
        _empty_map(found, settings),
        _missing_objects(found),
        _not_issued(found),
        _map_age(found),
        _share(found, settings),
        _candidates(found, settings),
    )


def without_map(reason: str) -> tuple[GuardResult, ...]:
    """The finding on a listing that could not be compared with the map."""
    return (
        GuardResult("map_copied", False, f"{reason}; make a new plan once the controllers answer"),
    )


def _empty_map(found: Evidence, settings: GuardSettings) -> GuardResult:
    own = found.keys(*_IN_BUCKET_AND_OURS)
    detail = (
        f"the map has {found.map_objects} committed objects, the bucket {own} keys of this cluster"
    )
    passed = found.map_objects > 0 or own == 0 or settings.allow_empty_map
    if not passed:
        detail += (
            "; check that --connect names the right cluster, then give --allow-empty-map if every"
            " object was really destroyed"
        )
    return GuardResult("empty_map", passed, detail)


def _missing_objects(found: Evidence) -> GuardResult:
    missing = found.keys(Verdict.MISSING)
    mismatched = found.keys(Verdict.SIZE_MISMATCH)
    expected = missing + mismatched + found.keys(Verdict.LIVE)
    share = (missing + mismatched) / expected if expected else 0.0
    detail = (
        f"of {expected} objects that the map expects, {missing} are missing in the bucket and"
        f" {mismatched} have another size: {share:.1%}, allowed {MISSING_SHARE:.0%}"
    )
    passed = share <= MISSING_SHARE
    if not passed:
        detail += (
            "; nothing may be deleted before this is explained: look the keys up in the plan's"
            " verdicts and restore the objects, or find out who else deletes in the bucket"
        )
    return GuardResult("missing_objects", passed, detail)


def _not_issued(found: Evidence) -> GuardResult:
    keys = found.keys(Verdict.NOT_ISSUED)
    detail = f"{keys} keys of this cluster have ids that the map never issued"
    if keys:
        detail += (
            "; the map is older than the bucket or another cluster writes under this namespace:"
            " find out which before anything is deleted"
        )
    return GuardResult("not_issued", keys == 0, detail)


def _map_age(found: Evidence) -> GuardResult:
    detail = (
        f"the map issues object ids below {found.issued_below}, the bucket's claims reach"
        f" {found.claimed_below}"
    )
    passed = found.claimed_below <= found.issued_below
    if not passed:
        detail += "; the map was restored to an earlier state: nothing may be deleted by it"
    return GuardResult("map_age", passed, detail)


def _share(found: Evidence, settings: GuardSettings) -> GuardResult:
    own = found.keys(*_IN_BUCKET_AND_OURS)
    candidates = found.keys(Verdict.ORPHAN)
    share = candidates / own if own else 0.0
    detail = (
        f"{candidates} of {own} keys of this cluster are candidates: {share:.1%},"
        f" allowed {settings.max_share:.1%}"
    )
    passed = share <= settings.max_share
    if not passed:
        detail += "; look at the candidates, then plan again with a larger --max-share"
    return GuardResult("max_share", passed, detail)


def _candidates(found: Evidence, settings: GuardSettings) -> GuardResult:
    candidates = found.keys(Verdict.ORPHAN)
    detail = f"{candidates} candidates, allowed {settings.max_candidates}"
    passed = candidates <= settings.max_candidates
    if not passed:
        detail += "; look at the candidates, then plan again with a larger --max-candidates"
    return GuardResult("max_candidates", passed, detail)
