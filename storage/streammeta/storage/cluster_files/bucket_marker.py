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

A controller acknowledges changes for `LEASE_MS` after it began a look that found its own cluster's
marker. Controllers that can't reach the bucket therefore stop by themselves, and a cluster that
takes the namespace over waits for `FENCE_WAIT_MS` before it acknowledges anything. Whoever has
waited puts a mark beside the generation's marker, so that nobody has to wait again and no clocks
are compared.

Keys lie under `<namespace>/`, where no object's key begins (see `object_key`): reconciliation and
deletion judge them foreign. Names under `claims/` that this module would not have made are ignored
and never deleted. Knows nothing of controllers: only the `ObjectStore` protocol and JSON.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from streammeta.storage import json_files
from streammeta.storage.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StoreUnavailableError,
    WrongBucketError,
)
from streammeta.storage.object_store.protocol.base import ObjectStore

CLAIMS_KEPT = 3
"""Newest claims that are kept when older ones are deleted."""

LEASE_MS = 30_000
"""Time after the begin of a look for which it proves the ownership of a namespace, in ms."""

FENCE_WAIT_MS = 35_000
"""Time after a new marker until the lease of every earlier generation is over, in milliseconds.

Longer than `LEASE_MS` by a margin for clocks that run at different rates, up to one part in seven.
"""

_GIVEN_UP = ".given-up"
_FENCED = ".fenced"
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
class Fenced:
    """Mark that no controller of a generation before this one acknowledges anything any more.

    The lease was waited out, or an operator declared that the controllers are stopped
    (`is_declared`); `created_ms` in ms since 1970.
    """

    cluster_uuid: str
    number: int
    is_declared: bool
    created_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """Markers of a namespace as one look found them; generations are ordered by number.

    `marker` is the newest generation's, or the first marker, None if the namespace has none.
    """

    marker: BucketMarker | None
    generations: tuple[Generation, ...]
    given_up: frozenset[int]
    fenced: frozenset[int]

    @property
    def unfenced(self) -> Generation | None:
        """The newest generation, if those before it may still acknowledge changes."""
        newest = self.generations[-1] if self.generations else None
        return None if newest is None or newest.number in self.fenced else newest

    @property
    def undecided(self) -> tuple[Generation, ...]:
        """Generations whose undecided ids are not given up."""
        return tuple(one for one in self.generations if one.number not in self.given_up)


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


def fenced_key(namespace: str, number: int) -> str:
    """Return the key of the mark that the generations before this one are fenced."""
    return f"{generations_prefix(namespace)}{number:0{_BOUND_DIGITS}}{_FENCED}{_SUFFIX}"


def is_own_key(key: str, namespace: str) -> bool:
    """True if a key is that of one of the namespace's markers or claims."""
    return (
        key == marker_key(namespace)
        or _number_in(key, claims_prefix(namespace)) is not None
        or _number_in(key, generations_prefix(namespace)) is not None
        or _marked_in(key, _GIVEN_UP, namespace) is not None
        or _marked_in(key, _FENCED, namespace) is not None
    )


def read_ownership(store: ObjectStore, namespace: str) -> Ownership:
    """Look at all markers of a namespace.

    Raises:
        CorruptObjectError: there is one that this version can't read.
    """
    # Listed once, before any is read: marks that come in between count the next time.
    keys = [info.key for info in store.list_objects(generations_prefix(namespace))]
    generations = _read_generations(store, namespace, keys)
    newest = generations[-1].marker if generations else _read_first_marker(store, namespace)
    return Ownership(
        marker=newest,
        generations=generations,
        given_up=_marked(keys, _GIVEN_UP, namespace),
        fenced=_marked(keys, _FENCED, namespace),
    )


def read_generations(store: ObjectStore, namespace: str) -> tuple[Generation, ...]:
    """Return the markers of all generations but the first, by number.

    Raises:
        CorruptObjectError: there is one that this version can't read.
    """
    keys = [info.key for info in store.list_objects(generations_prefix(namespace))]
    return _read_generations(store, namespace, keys)


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
    return read_ownership(store, namespace).undecided


def give_up(store: ObjectStore, namespace: str, mark: GivenUp) -> None:
    """Put a mark, unless it is there: the undecided ids of its generation are given up for good."""
    key = given_up_key(namespace, mark.number)
    with contextlib.suppress(ObjectExistsError):
        store.put(key, json_files.encode(mark), if_absent=True)


def put_fenced(store: ObjectStore, namespace: str, mark: Fenced) -> None:
    """Put a mark, unless it is there: the generations before its own acknowledge nothing more."""
    key = fenced_key(namespace, mark.number)
    with contextlib.suppress(ObjectExistsError):
        store.put(key, json_files.encode(mark), if_absent=True)


def read_marker(store: ObjectStore, namespace: str) -> BucketMarker | None:
    """Return the marker of the namespace's newest generation, or None if there is none.

    Raises:
        CorruptObjectError: there is one that this version can't read.
    """
    return read_ownership(store, namespace).marker


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


def _read_generations(
    store: ObjectStore, namespace: str, keys: Iterable[str]
) -> tuple[Generation, ...]:
    prefix = generations_prefix(namespace)
    found = [key for key in keys if _number_in(key, prefix) is not None]
    return tuple(json_files.decode(Generation, key, store.get_range(key)) for key in found)


def _read_first_marker(store: ObjectStore, namespace: str) -> BucketMarker | None:
    key = marker_key(namespace)
    try:
        data = store.get_range(key)
    except ObjectNotFoundError:
        return None
    return json_files.decode(BucketMarker, key, data)


def _marked(keys: Iterable[str], mark: str, namespace: str) -> frozenset[int]:
    numbers = (_marked_in(key, mark, namespace) for key in keys)
    return frozenset(number for number in numbers if number is not None)


def _marked_in(key: str, mark: str, namespace: str) -> int | None:
    """Return the number of the generation that a mark's key names; None if it is no such key."""
    if not key.endswith(f"{mark}{_SUFFIX}"):
        return None
    marker = f"{key.removesuffix(_SUFFIX).removesuffix(mark)}{_SUFFIX}"
    return _number_in(marker, generations_prefix(namespace))


def _number_in(key: str, prefix: str) -> int | None:
    """Return the number that the key of a claim or a generation names; None: it is of neither."""
    digits = key.removeprefix(prefix).removesuffix(_SUFFIX)
    if len(digits) != _BOUND_DIGITS or not (digits.isascii() and digits.isdigit()):
        return None
    return int(digits) if key == f"{prefix}{digits}{_SUFFIX}" else None
