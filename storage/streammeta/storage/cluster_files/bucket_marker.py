"""Marker of a cluster in its bucket, and its claims on object ids.

The marker names the cluster that owns a namespace of a bucket. The first leader creates it, and
nothing replaces it. A claim is an upper bound of the object ids that the cluster may have issued.
The bound is the claim's name, so a late put can lower nothing and no store needs compare-and-swap.
Every put in this module creates an object. It never overwrites one.

A restored cluster takes over the namespace with the marker of a new generation, numbered from 2 on.
The highest generation names the owner, so the previous cluster finds itself superseded. The marker
also names the undecided object ids: the bucket may contain objects with these ids that the restored
metadata does not know. Deletion skips them until an operator gives them up, which a mark next to
the generation's marker records.

A controller acknowledges changes for `LEASE_MS` after it started a read that found its own
cluster's marker. Controllers that cannot reach the bucket therefore stop by themselves. A cluster
that takes over the namespace waits for `FENCE_WAIT_MS` before it acknowledges anything, and then
puts a mark next to the generation's marker. With that mark nobody has to wait again, and no clocks
are compared.

Keys lie under `<namespace>/`, where no object's key begins (see `object_key`), so reconciliation
and deletion classify them as foreign. Names under `claims/` that this module would not have written
are ignored and never deleted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from streammeta.storage import errors, json_files
from streammeta.storage.object_store.protocol.base import ObjectStore

# The newest one is enough. The others help to understand an incident.
CLAIMS_KEPT = 3
"""Number of newest claims that survive a deletion of old claims."""

LEASE_MS = 30_000
"""Time for which a read of the marker proves ownership, in ms after its start."""

FENCE_WAIT_MS = 35_000
"""Time after a new marker until the lease of every earlier generation has expired, in ms.

The margin over `LEASE_MS` covers clocks whose rates differ by up to one part in seven.
"""

_GIVEN_UP = ".given-up"
_FENCED = ".fenced"
_BOUND_DIGITS = 20
_SUFFIX = ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketMarker:
    """Owner of a namespace. `created_ms` is in ms since 1970."""

    cluster_id: str
    cluster_uuid: str
    namespace: str
    created_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Owner of a namespace after a restore. `number` is 2 or more, `created_ms` in ms since 1970.

    Ids in `[undecided_from, undecided_below)` that its metadata does not know are undecided.
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
        """The namespace's marker from this generation on."""
        return BucketMarker(
            cluster_id=self.cluster_id,
            cluster_uuid=self.cluster_uuid,
            namespace=self.namespace,
            created_ms=self.created_ms,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """Mark that the cluster with this UUID gave up the undecided ids of a generation.

    `objects` and `bytes` count the objects with such ids at `created_ms`, in ms since 1970.
    """

    cluster_uuid: str
    number: int
    objects: int
    bytes: int
    created_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced:
    """Mark that no controller of an earlier generation acknowledges changes any longer.

    The lease has expired, or an operator declared that the controllers are stopped (`is_declared`).
    `created_ms` is in ms since 1970.
    """

    cluster_uuid: str
    number: int
    is_declared: bool
    created_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """Markers of a namespace at one read. Generations are ordered by number.

    `marker` belongs to the newest generation. Without generations it is the first marker, or None
    if the namespace has no marker.
    """

    marker: BucketMarker | None
    generations: tuple[Generation, ...]
    given_up: frozenset[int]
    fenced: frozenset[int]

    @property
    def unfenced(self) -> Generation | None:
        """The newest generation, if earlier ones may still acknowledge changes."""
        newest = self.generations[-1] if self.generations else None
        return None if newest is None or newest.number in self.fenced else newest

    @property
    def undecided(self) -> tuple[Generation, ...]:
        """Generations whose undecided ids are not given up."""
        return tuple(
            generation for generation in self.generations if generation.number not in self.given_up
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IdClaim:
    """Claim that the cluster with this UUID may have issued object ids below `issued_below`.

    The random `token` distinguishes claims of the same bound. `node_id` is the controller that
    wrote the claim, at `created_ms` in ms since 1970.
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
    """Return the key prefix of a namespace's claims."""
    return f"{namespace}/claims/"


def claim_key(namespace: str, issued_below: int) -> str:
    """Return the key of the claim for a bound."""
    return f"{claims_prefix(namespace)}{issued_below:0{_BOUND_DIGITS}}{_SUFFIX}"


def generations_prefix(namespace: str) -> str:
    """Return the key prefix of the markers of a namespace's generations."""
    return f"{namespace}/generations/"


def generation_key(namespace: str, number: int) -> str:
    """Return the key of a generation's marker."""
    return f"{generations_prefix(namespace)}{number:0{_BOUND_DIGITS}}{_SUFFIX}"


def given_up_key(namespace: str, number: int) -> str:
    """Return the key of the mark that a generation's undecided ids are given up."""
    return f"{generations_prefix(namespace)}{number:0{_BOUND_DIGITS}}{_GIVEN_UP}{_SUFFIX}"


def fenced_key(namespace: str, number: int) -> str:
    """Return the key of the mark that the generations before this one are fenced."""
    return f"{generations_prefix(namespace)}{number:0{_BOUND_DIGITS}}{_FENCED}{_SUFFIX}"


def is_own_key(key: str, namespace: str) -> bool:
    """Return whether the key belongs to a marker or claim of the namespace."""
    return (
        key == marker_key(namespace)
        or _number_in(key, claims_prefix(namespace)) is not None
        or _number_in(key, generations_prefix(namespace)) is not None
        or _generation_of_mark(key, _GIVEN_UP, namespace) is not None
        or _generation_of_mark(key, _FENCED, namespace) is not None
    )


def read_ownership(store: ObjectStore, namespace: str) -> Ownership:
    """Read all markers of a namespace.

    Raises:
        CorruptObjectError: this version cannot read a marker.
    """
    # One listing before any read: marks that appear in between count at the next read.
    keys = [info.key for info in store.list_objects(generations_prefix(namespace))]
    generations = _read_generations(store, namespace, keys)
    # Listings are in key order, and the numbers have a fixed width, so the last is the newest.
    newest = generations[-1].marker if generations else _read_first_marker(store, namespace)
    return Ownership(
        marker=newest,
        generations=generations,
        given_up=_marked_generations(keys, _GIVEN_UP, namespace),
        fenced=_marked_generations(keys, _FENCED, namespace),
    )


def read_generations(store: ObjectStore, namespace: str) -> tuple[Generation, ...]:
    """Return the markers of all generations except the first, by number.

    Raises:
        CorruptObjectError: this version cannot read a marker.
    """
    keys = [info.key for info in store.list_objects(generations_prefix(namespace))]
    return _read_generations(store, namespace, keys)


def create_generation(store: ObjectStore, generation: Generation) -> Generation:
    """Create the marker of a generation unless it exists, and return the existing one.

    Raises:
        CorruptObjectError: this version cannot read the existing marker.
    """
    key = generation_key(generation.namespace, generation.number)
    try:
        store.put(key, json_files.encode(generation), if_absent=True)
    except errors.ObjectExistsError:
        # Another restore was faster, or this call is a retry. The caller compares.
        return json_files.decode(Generation, key, store.get_range(key))
    return generation


def read_undecided(store: ObjectStore, namespace: str) -> tuple[Generation, ...]:
    """Return the markers of the generations whose undecided ids are not given up, by number.

    Raises:
        CorruptObjectError: this version cannot read a marker.
    """
    return read_ownership(store, namespace).undecided


def give_up(store: ObjectStore, namespace: str, mark: GivenUp) -> None:
    """Put the mark that gives up the undecided ids of its generation, unless it exists."""
    key = given_up_key(namespace, mark.number)
    with contextlib.suppress(errors.ObjectExistsError):
        store.put(key, json_files.encode(mark), if_absent=True)


def put_fenced(store: ObjectStore, namespace: str, mark: Fenced) -> None:
    """Put the mark that fences the generations before its own, unless it exists."""
    key = fenced_key(namespace, mark.number)
    with contextlib.suppress(errors.ObjectExistsError):
        store.put(key, json_files.encode(mark), if_absent=True)


def read_marker(store: ObjectStore, namespace: str) -> BucketMarker | None:
    """Return the marker of the namespace's newest generation, or None if it has no marker.

    Raises:
        CorruptObjectError: this version cannot read a marker.
    """
    return read_ownership(store, namespace).marker


def create_marker(store: ObjectStore, marker: BucketMarker) -> BucketMarker:
    """Create the marker unless the namespace has one, and return the existing one.

    Raises:
        CorruptObjectError: this version cannot read the existing marker.
    """
    try:
        store.put(marker_key(marker.namespace), json_files.encode(marker), if_absent=True)
    except errors.ObjectExistsError:
        found = read_marker(store, marker.namespace)
        if found is None:
            raise errors.StoreUnavailableError(
                f"marker {marker_key(marker.namespace)!r} was deleted after the put found it."
                " Try again"
            ) from None
        return found
    return marker


def check_marker(
    found: BucketMarker | None, *, cluster_id: str, cluster_uuid: str, namespace: str
) -> None:
    """Raise `WrongBucketError` unless the namespace's marker names the expected cluster."""
    expected = f"cluster {cluster_id!r} with UUID {cluster_uuid}"
    if found is None:
        raise errors.WrongBucketError(namespace, "it has no marker of any cluster", expected)
    if found.namespace != namespace:
        # A copied prefix brings the marker of its original namespace along.
        owner = f"its marker names namespace {found.namespace!r}, as if it were copied"
        raise errors.WrongBucketError(namespace, owner, expected)
    if (found.cluster_id, found.cluster_uuid) != (cluster_id, cluster_uuid):
        owner = f"it belongs to cluster {found.cluster_id!r} with UUID {found.cluster_uuid}"
        raise errors.WrongBucketError(namespace, owner, expected)


def read_claimed(store: ObjectStore, namespace: str) -> int:
    """Return the highest claimed bound, below which ids may be issued, or 0 without a claim."""
    return max(_claimed_bounds(store, namespace), default=0)


def put_claim(store: ObjectStore, namespace: str, claim: IdClaim) -> None:
    """Create the claim. Repeating the call with the same claim is safe.

    Raises:
        ObjectExistsError: another claim of this bound exists, so another history of the cluster
            uses the bucket.
    """
    key = claim_key(namespace, claim.issued_below)
    body = json_files.encode(claim)
    try:
        store.put(key, body, if_absent=True)
    except errors.ObjectExistsError:
        # An equal claim is the same call after a lost response, because its token is random.
        if store.get_range(key) != body:
            raise


def delete_old_claims(store: ObjectStore, namespace: str) -> int:
    """Delete all but the newest `CLAIMS_KEPT` claims, and return the number of deleted ones."""
    # The highest bounds stay, so the claimed bound never decreases.
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
    except errors.ObjectNotFoundError:
        return None
    return json_files.decode(BucketMarker, key, data)


def _marked_generations(keys: Iterable[str], mark: str, namespace: str) -> frozenset[int]:
    numbers = (_generation_of_mark(key, mark, namespace) for key in keys)
    return frozenset(number for number in numbers if number is not None)


def _generation_of_mark(key: str, mark: str, namespace: str) -> int | None:
    """Return the generation's number in a mark's key, or None for any other key."""
    if not key.endswith(f"{mark}{_SUFFIX}"):
        return None
    # Without the mark's name, the key is the key of the generation's marker.
    marker = f"{key.removesuffix(_SUFFIX).removesuffix(mark)}{_SUFFIX}"
    return _number_in(marker, generations_prefix(namespace))


def _number_in(key: str, prefix: str) -> int | None:
    """Return the number in the key of a claim or a generation, or None for any other key."""
    # Strict, so that a key with other digits or another width is never deleted.
    digits = key.removeprefix(prefix).removesuffix(_SUFFIX)
    if len(digits) != _BOUND_DIGITS or not (digits.isascii() and digits.isdigit()):
        return None
    return int(digits) if key == f"{prefix}{digits}{_SUFFIX}" else None
