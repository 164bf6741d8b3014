"""Marker of a cluster in its bucket, and its claims on object ids.

The marker names the cluster that a namespace of a bucket belongs to. It is created once, by the
first leader, and never replaced. A claim is an upper bound of the object ids that the cluster may
have issued; its name is the bound, so a late put can lower nothing and no store needs a
compare-and-swap. Every put here creates; nothing is ever overwritten.

A restored cluster takes the namespace over by the marker of a generation, numbered from 2 on and
created like the others: the highest names the owner from then on, so that the cluster before it
finds itself superseded. It also says which object ids are undecided: objects may lie under them
that the restored map does not know, so a deletion of what no map knows leaves them alone, until an
operator has given them up: a mark beside the generation's marker says so.

Keys lie under `<namespace>/`, where no object's key begins (see `object_key`): reconciliation and
deletion judge them foreign. Names under `claims/` that this module would not have made are ignored
and never deleted. Knows nothing of controllers: only the `ObjectStore` protocol and JSON.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from streammeta.storage import json_files
from streammeta.storage.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StoreUnavailableError,
    WrongBucketError,
)
from streammeta.storage.object_store.base import ObjectStore

CLAIMS_KEPT = 3
"""Newest claims that are kept when older ones are deleted."""

_GIVEN_UP = ".given-up"
_BOUND_DIGITS = 20
_SUFFIX = ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketMarker:
    """Owner of a namespace; `created_ms` is in ms since 1970."""

    cluster_id: str
    cluster_uuid: str
    namespace: str
    created_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Owner of a namespace after a restore; `number` is 2 or more, `created_ms` in ms since 1970.

    Ids in `[undecided_from, undecided_below)` that its map does not know are undecided.
    """

    cluster_id: str
    cluster_uuid: str
    namespace: str
    number: int
    undecided_from: int
    undecided_below: int
    created_ms: int

    @property
    def marker(self) -> BucketMarker:
        """The marker that the namespace has from this generation on."""
        return BucketMarker(
            cluster_id=self.cluster_id,
            cluster_uuid=self.cluster_uuid,
            namespace=self.namespace,
            created_ms=self.created_ms,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """Mark that the undecided ids of a generation are given up, by the cluster with this UUID.

    `objects` and `bytes` were under such ids at the time, `created_ms` in ms since 1970.
    """

    cluster_uuid: str
    number: int
    objects: int
    bytes: int
    created_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IdClaim:
    """Object ids below `issued_below` may have been issued by the cluster with this UUID.

    `token` is random and tells this claim from any other of the same bound; `node_id` is the
    controller that made it, `created_ms` in ms since 1970.
    """

    cluster_uuid: str
    issued_below: int
    node_id: int
    token: str
    created_ms: int


def marker_key(namespace: str) -> str:
    """Return the key of a namespace's marker."""
    return f"{namespace}/cluster.json"


def claims_prefix(namespace: str) -> str:
    """Return the prefix under which a namespace's claims lie."""
    return f"{namespace}/claims/"


def claim_key(namespace: str, issued_below: int) -> str:
    """Return the key of the claim of a bound."""
    return f"{claims_prefix(namespace)}{issued_below:0{_BOUND_DIGITS}}{_SUFFIX}"


def generations_prefix(namespace: str) -> str:
    """Return the prefix under which the markers of a namespace's generations lie."""
    return f"{namespace}/generations/"


def generation_key(namespace: str, number: int) -> str:
    """Return the key of the marker of a generation."""
    return f"{generations_prefix(namespace)}{number:0{_BOUND_DIGITS}}{_SUFFIX}"


def given_up_key(namespace: str, number: int) -> str:
    """Return the key of the mark that a generation's undecided ids are given up."""
    return f"{generations_prefix(namespace)}{number:0{_BOUND_DIGITS}}{_GIVEN_UP}{_SUFFIX}"


def is_own_key(key: str, namespace: str) -> bool:
    """True if a key is that of one of the namespace's markers or claims."""
    return (
        key == marker_key(namespace)
        or _number_in(key, claims_prefix(namespace)) is not None
        or _number_in(key, generations_prefix(namespace)) is not None
        or _given_up_in(key, namespace) is not None
    )


def read_generations(store: ObjectStore, namespace: str) -> tuple[Generation, ...]:
    """Return the markers of all generations but the first, by number.

    Raises:
        CorruptObjectError: there is one that this version can't read.
    """
    prefix = generations_prefix(namespace)
    keys = [info.key for info in store.list_objects(prefix)]
    found = [key for key in keys if _number_in(key, prefix) is not None]
    return tuple(json_files.decode(Generation, key, store.get_range(key)) for key in found)


def create_generation(store: ObjectStore, generation: Generation) -> Generation:
    """Create the marker of a generation, unless it is there; return the one that is there.

    Raises:
        CorruptObjectError: there is one that this version can't read.
    """
    key = generation_key(generation.namespace, generation.number)
    try:
        store.put(key, json_files.encode(generation), if_absent=True)
    except ObjectExistsError:
        return json_files.decode(Generation, key, store.get_range(key))
    return generation


def read_undecided(store: ObjectStore, namespace: str) -> tuple[Generation, ...]:
    """Return the markers of the generations whose undecided ids are not given up, by number.

    Raises:
        CorruptObjectError: there is one that this version can't read.
    """
    # Listed first: what is given up in between counts the next time.
    keys = [info.key for info in store.list_objects(generations_prefix(namespace))]
    given_up = {_given_up_in(key, namespace) for key in keys}
    found = read_generations(store, namespace)
    return tuple(one for one in found if one.number not in given_up)


def give_up(store: ObjectStore, namespace: str, mark: GivenUp) -> None:
    """Put a mark, unless it is there: the undecided ids of its generation are given up for good."""
    key = given_up_key(namespace, mark.number)
    with contextlib.suppress(ObjectExistsError):
        store.put(key, json_files.encode(mark), if_absent=True)


def read_marker(store: ObjectStore, namespace: str) -> BucketMarker | None:
    """Return the marker of the namespace's newest generation, or None if there is none.

    Raises:
        CorruptObjectError: there is one that this version can't read.
    """
    generations = read_generations(store, namespace)
    if generations:
        return generations[-1].marker
    key = marker_key(namespace)
    try:
        data = store.get_range(key)
    except ObjectNotFoundError:
        return None
    return json_files.decode(BucketMarker, key, data)


def create_marker(store: ObjectStore, marker: BucketMarker) -> BucketMarker:
    """Create the marker, unless the namespace has one; return the one that is there.

    Raises:
        CorruptObjectError: there is one that this version can't read.
    """
    try:
        store.put(marker_key(marker.namespace), json_files.encode(marker), if_absent=True)
    except ObjectExistsError:
        found = read_marker(store, marker.namespace)
        if found is None:
            raise StoreUnavailableError(
                f"object {marker_key(marker.namespace)!r} existed and was deleted; try again"
            ) from None
        return found
    return marker


def check_marker(
    found: BucketMarker | None, *, cluster_id: str, cluster_uuid: str, namespace: str
) -> None:
    """Raise `WrongBucketError` unless the namespace's marker is that of the expected cluster."""
    expected = f"cluster {cluster_id!r} with UUID {cluster_uuid}"
    if found is None:
        raise WrongBucketError(namespace, "no marker of any cluster is there", expected)
    if found.namespace != namespace:
        there = f"the marker there is of namespace {found.namespace!r}, as if it were copied"
        raise WrongBucketError(namespace, there, expected)
    if (found.cluster_id, found.cluster_uuid) != (cluster_id, cluster_uuid):
        there = f"it belongs to cluster {found.cluster_id!r} with UUID {found.cluster_uuid}"
        raise WrongBucketError(namespace, there, expected)


def read_claimed(store: ObjectStore, namespace: str) -> int:
    """Return the highest bound that is claimed; object ids below it may be issued; 0: no claim."""
    return max(_claimed_bounds(store, namespace), default=0)


def put_claim(store: ObjectStore, namespace: str, claim: IdClaim) -> None:
    """Create the claim; repeating the call with the same claim is safe.

    Raises:
        ObjectExistsError: another claim of this bound is there, so another history of the cluster
            uses the bucket.
    """
    key = claim_key(namespace, claim.issued_below)
    body = json_files.encode(claim)
    try:
        store.put(key, body, if_absent=True)
    except ObjectExistsError:
        if store.get_range(key) != body:
            raise


def delete_old_claims(store: ObjectStore, namespace: str) -> int:
    """Delete all claims but the newest `CLAIMS_KEPT`; return how many were deleted."""
    bounds = sorted(_claimed_bounds(store, namespace))[:-CLAIMS_KEPT]
    if not bounds:
        return 0
    return len(store.delete_many(claim_key(namespace, bound) for bound in bounds).deleted)


def _claimed_bounds(store: ObjectStore, namespace: str) -> Iterator[int]:
    for info in store.list_objects(claims_prefix(namespace)):
        bound = _number_in(info.key, claims_prefix(namespace))
        if bound is not None:
            yield bound


def _given_up_in(key: str, namespace: str) -> int | None:
    """Return the number of the generation that the key of a mark gives up; None: it is none."""
    if not key.endswith(f"{_GIVEN_UP}{_SUFFIX}"):
        return None
    marker = f"{key.removesuffix(_SUFFIX).removesuffix(_GIVEN_UP)}{_SUFFIX}"
    return _number_in(marker, generations_prefix(namespace))


def _number_in(key: str, prefix: str) -> int | None:
    """Return the number that the key of a claim or a generation names; None: it is of neither."""
    digits = key.removeprefix(prefix).removesuffix(_SUFFIX)
    if len(digits) != _BOUND_DIGITS or not (digits.isascii() and digits.isdigit()):
        return None
    return int(digits) if key == f"{prefix}{digits}{_SUFFIX}" else None
