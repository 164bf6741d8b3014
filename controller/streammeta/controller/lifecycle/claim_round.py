"""The protocol by which a leader claims object ids in the bucket, as steps without any I/O.

A round yields what is to be done next and is sent the result; the caller carries it out, and may
stop for good after any step. The order is the safety: a bound is committed in the log before it is
claimed in the bucket, and ids are issued below it only after that. So the claims in the bucket are
never above what the committed log says, in no history whose leaders all stem from one log, late
puts of deposed leaders included; and a copy of the map that was taken before the last claim is
below it.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias

from streammeta.controller.errors import MapOlderThanBucketError

CLAIM_STEP = 1_000_000
"""Object ids claimed ahead of those issued."""

_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ReadClaims:
    """Wanted: the highest bound claimed in the bucket."""


@dataclass(frozen=True, slots=True)
class ProveLeadership:
    """Wanted: proof that this node leads now, and that all its map shows is committed."""


@dataclass(frozen=True, slots=True)
class CommitBound:
    """To do: have the log commit that ids below the bound may be issued."""

    issued_below: int


@dataclass(frozen=True, slots=True)
class PutClaim:
    """To do: create the claim of the bound in the bucket."""

    issued_below: int


Step: TypeAlias = ReadClaims | ProveLeadership | CommitBound | PutClaim


@dataclass(frozen=True, slots=True)
class Issued:
    """State of the leader's map: the id that is issued next, and the bound of issuable ids."""

    next_object_id: int
    issued_below: int


def claim_round(read_map: Callable[[], Issued]) -> Generator[Step, Any, int]:
    """Claim a new bound; return it: ids below it may be issued from then on.

    Raises:
        MapOlderThanBucketError: the bucket holds a claim that the committed log knows nothing of.
    """
    claimed = yield ReadClaims()
    if claimed > read_map().issued_below:
        # A leader that was deposed without noticing sees the claims of its successor.
        yield ProveLeadership()
        issued_below = read_map().issued_below
        if claimed > issued_below:
            raise MapOlderThanBucketError(issued_below, claimed)
    bound = next_bound(read_map())
    yield CommitBound(bound)
    yield PutClaim(bound)
    return bound


def next_bound(issued: Issued) -> int:
    """Return the bound to claim: a step ahead, and above every bound committed before."""
    return min(_INT64_MAX, max(issued.next_object_id + CLAIM_STEP, issued.issued_below + 1))
