"""The cluster's marker and its claims on object ids, over a store in memory, a directory and S3."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from streammeta.storage import errors
from streammeta.storage.cluster_files import bucket_marker
from streammeta.storage.object_format.object_key import ForeignKey, cluster_namespace, parse_key
from streammeta.storage.object_store.opening import open_object_store
from streammeta.storage.object_store.protocol.base import ObjectStore
from tests.kit.memory_store import MemoryObjectStore
from tests.storage.s3_servers import running_ministack

NAMESPACE = cluster_namespace("here")
MARKER = bucket_marker.BucketMarker(
    cluster_id="here", cluster_uuid="u-1", namespace=NAMESPACE, created_ms=5
)
EXPECTED = {"cluster_id": "here", "cluster_uuid": "u-1", "namespace": NAMESPACE}


@pytest.fixture(params=["memory", "local", pytest.param("ministack", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    if request.param == "memory":
        yield MemoryObjectStore()
    elif request.param == "local":
        yield open_object_store(f"file://{tmp_path}")
    else:
        with running_ministack() as endpoint:
            endpoint.create_bucket("markers")
            yield open_object_store(endpoint.uri("markers"))


def claim(bound: int, token: str = "t", created_ms: int = 7) -> bucket_marker.IdClaim:
    return bucket_marker.IdClaim(
        cluster_uuid="u-1", issued_below=bound, node_id=1, token=token, created_ms=created_ms
    )


def test_the_first_marker_stays_and_everybody_reads_it(store: ObjectStore) -> None:
    assert bucket_marker.read_marker(store, NAMESPACE) is None
    assert bucket_marker.create_marker(store, MARKER) == MARKER
    other = bucket_marker.BucketMarker(
        cluster_id="here", cluster_uuid="u-2", namespace=NAMESPACE, created_ms=9
    )
    assert bucket_marker.create_marker(store, other) == MARKER
    assert bucket_marker.read_marker(store, NAMESPACE) == MARKER
    assert bucket_marker.read_marker(store, cluster_namespace("there")) is None
    assert json.loads(store.get_range(bucket_marker.marker_key(NAMESPACE))) == {
        "version": 1, "cluster_id": "here", "cluster_uuid": "u-1", "namespace": NAMESPACE,
        "created_ms": 5,
    }  # fmt: skip


def test_claims_only_rise_whatever_the_order_they_are_put_in(store: ObjectStore) -> None:
    assert bucket_marker.read_claimed(store, NAMESPACE) == 0
    for bound in (1_000, 30, 2**63 - 1, 500):
        bucket_marker.put_claim(store, NAMESPACE, claim(bound))
    assert bucket_marker.read_claimed(store, NAMESPACE) == 2**63 - 1
    bucket_marker.put_claim(store, NAMESPACE, claim(500))
    with pytest.raises(errors.ObjectExistsError):
        bucket_marker.put_claim(store, NAMESPACE, claim(500, token="another"))
    assert json.loads(store.get_range(bucket_marker.claim_key(NAMESPACE, 500)))["token"] == "t"


def test_old_claims_go_and_what_else_lies_there_stays(store: ObjectStore) -> None:
    prefix = bucket_marker.claims_prefix(NAMESPACE)
    foreign = [
        f"{prefix}9.json",
        f"{prefix}99999999999999999999.txt",
        f"{prefix}{'٣' * 20}.json",
        f"{prefix}0000000000000000009.json",
        f"{prefix}x/00000000000000000009.json",
        f"{prefix}00000000000000009999",
        f"{NAMESPACE}/notes.txt",
    ]
    for key in foreign:
        store.put(key, b"?")
    for bound in range(1, 8):
        bucket_marker.put_claim(store, NAMESPACE, claim(bound))
    assert bucket_marker.read_claimed(store, NAMESPACE) == 7
    assert bucket_marker.delete_old_claims(store, NAMESPACE) == 7 - bucket_marker.CLAIMS_KEPT
    assert bucket_marker.delete_old_claims(store, NAMESPACE) == 0
    kept = {bucket_marker.claim_key(NAMESPACE, bound) for bound in (5, 6, 7)}
    assert {info.key for info in store.list_objects()} == kept | set(foreign)
    assert all(
        bucket_marker.is_own_key(key, NAMESPACE)
        for key in (*kept, bucket_marker.marker_key(NAMESPACE))
    )
    assert not any(bucket_marker.is_own_key(key, NAMESPACE) for key in foreign)
    assert not any(bucket_marker.is_own_key(key, cluster_namespace("there")) for key in kept)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"[" * 100_000,
        b'{"version": 2}',
        b'{"version": 1}',
        json.dumps({"version": 1, **asdict(MARKER), "namespace": 3}).encode(),
        json.dumps({"version": 1, **asdict(MARKER), "created_ms": True}).encode(),
    ],
)
def test_an_unreadable_marker_is_named_and_left_alone(body: bytes) -> None:
    store = MemoryObjectStore()
    store.put(bucket_marker.marker_key(NAMESPACE), body)
    with pytest.raises(errors.CorruptObjectError, match=bucket_marker.marker_key(NAMESPACE)):
        bucket_marker.read_marker(store, NAMESPACE)
    with pytest.raises(errors.CorruptObjectError, match=bucket_marker.marker_key(NAMESPACE)):
        bucket_marker.create_marker(store, MARKER)
    assert store.get_range(bucket_marker.marker_key(NAMESPACE)) == body


def test_members_of_later_versions_are_passed_over() -> None:
    store = MemoryObjectStore()
    bucket_marker.create_marker(store, MARKER)
    members = json.loads(store.get_range(bucket_marker.marker_key(NAMESPACE)))
    store.put(bucket_marker.marker_key(NAMESPACE), json.dumps({**members, "more": [1]}).encode())
    assert bucket_marker.read_marker(store, NAMESPACE) == MARKER


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "no marker"),
        ({"cluster_id": "there"}, "cluster 'there' with UUID u-1"),
        ({"cluster_uuid": "u-2"}, "cluster 'here' with UUID u-2"),
        ({"namespace": "_streammeta_there"}, "namespace '_streammeta_there'"),
    ],
)
def test_any_difference_is_refused_and_says_whose(found: dict[str, str] | None, said: str) -> None:
    members: dict[str, Any] = {**EXPECTED, "created_ms": 5}
    there = None if found is None else bucket_marker.BucketMarker(**{**members, **found})
    with pytest.raises(errors.WrongBucketError) as refused:
        bucket_marker.check_marker(there, **EXPECTED)
    assert said in str(refused.value)
    assert "cluster 'here' with UUID u-1" in str(refused.value)
    assert NAMESPACE in str(refused.value)
    bucket_marker.check_marker(bucket_marker.BucketMarker(**members), **EXPECTED)


def test_a_marker_that_goes_while_it_is_looked_at_is_asked_for_again() -> None:
    class Vanishing(MemoryObjectStore):
        def get_range(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            raise errors.ObjectNotFoundError(key)

    store = Vanishing()
    bucket_marker.create_marker(store, MARKER)
    with pytest.raises(errors.StoreUnavailableError):
        bucket_marker.create_marker(store, MARKER)


@pytest.mark.parametrize("namespace", [NAMESPACE, "00000000", "1", "claims", "e4000000"])
@pytest.mark.parametrize("bound", [0, 78, 10**19, 2**63 - 1])
def test_no_marker_or_claim_passes_for_an_object(namespace: str, bound: int) -> None:
    for key in (bucket_marker.marker_key(namespace), bucket_marker.claim_key(namespace, bound)):
        for asking in (namespace, "claims", NAMESPACE):
            assert isinstance(parse_key(key, asking), ForeignKey), key


def generation(number: int) -> bucket_marker.Generation:
    return bucket_marker.Generation(
        cluster_id=f"after {number}",
        cluster_uuid=f"u-{number}",
        namespace=NAMESPACE,
        number=number,
        undecided_from=0,
        undecided_below=number,
        created_ms=number,
    )


def test_undecided_ids_are_given_up_generation_by_generation(store: ObjectStore) -> None:
    made = [generation(number) for number in (2, 3, 4)]
    for marker in made:
        bucket_marker.create_generation(store, marker)
    assert bucket_marker.read_undecided(store, NAMESPACE) == tuple(made)
    mark = bucket_marker.GivenUp(cluster_uuid="u-4", number=3, objects=1, bytes=2, created_ms=5)
    bucket_marker.give_up(store, NAMESPACE, mark)
    bucket_marker.give_up(store, NAMESPACE, replace(mark, created_ms=6))
    store.put(f"{NAMESPACE}/generations/2.given-up.json", b"foreign")
    assert bucket_marker.read_undecided(store, NAMESPACE) == (made[0], made[2])
    assert bucket_marker.read_generations(store, NAMESPACE) == tuple(made), (
        "it owns the bucket as before"
    )
    key = bucket_marker.given_up_key(NAMESPACE, 3)
    assert json.loads(store.get_range(key))["created_ms"] == 5, "the first stays"
    assert bucket_marker.is_own_key(key, NAMESPACE)
    assert not bucket_marker.is_own_key(f"{NAMESPACE}/generations/2.given-up.json", NAMESPACE)
    assert isinstance(parse_key(key, NAMESPACE), ForeignKey)


def test_the_newest_generation_owns_the_namespace(store: ObjectStore) -> None:
    bucket_marker.create_marker(store, MARKER)
    assert bucket_marker.read_generations(store, NAMESPACE) == ()
    made = [generation(number) for number in (2, 10, 3)]
    for marker in made:
        assert bucket_marker.create_generation(store, marker) == marker
        assert bucket_marker.create_generation(store, marker) == marker, "a repeat"
    store.put(f"{NAMESPACE}/generations/99.json", b"foreign")
    assert [one.number for one in bucket_marker.read_generations(store, NAMESPACE)] == [2, 3, 10]
    assert bucket_marker.read_marker(store, NAMESPACE) == made[1].marker
    assert bucket_marker.create_marker(store, MARKER) == made[1].marker
    rival = replace(made[1], cluster_uuid="rival")
    assert bucket_marker.create_generation(store, rival) == made[1], "there is one of each number"
    key = bucket_marker.generation_key(NAMESPACE, 10)
    assert bucket_marker.is_own_key(key, NAMESPACE)
    assert not bucket_marker.is_own_key(f"{NAMESPACE}/generations/99.json", NAMESPACE)
    assert isinstance(parse_key(key, NAMESPACE), ForeignKey)


def restored(number: int) -> bucket_marker.Generation:
    return bucket_marker.Generation(
        cluster_id="after",
        cluster_uuid=f"u-{number}",
        namespace=NAMESPACE,
        number=number,
        undecided_from=1,
        undecided_below=2,
        created_ms=number,
    )


def test_a_generation_stays_unfenced_until_its_own_mark_is_there(store: ObjectStore) -> None:
    assert bucket_marker.read_ownership(store, NAMESPACE).unfenced is None
    bucket_marker.create_marker(store, MARKER)
    assert bucket_marker.read_ownership(store, NAMESPACE).unfenced is None, (
        "nobody was there before"
    )
    for number in (2, 3):
        bucket_marker.create_generation(store, restored(number))
        assert bucket_marker.read_ownership(store, NAMESPACE).unfenced == restored(number)
        mark = bucket_marker.Fenced(
            cluster_uuid=f"u-{number}", number=number, is_declared=number == 3, created_ms=7
        )
        bucket_marker.put_fenced(store, NAMESPACE, mark)
        bucket_marker.put_fenced(store, NAMESPACE, mark)
        found = bucket_marker.read_ownership(store, NAMESPACE)
        assert (found.unfenced, found.marker) == (None, restored(number).marker)
    body = json.loads(store.get_range(bucket_marker.fenced_key(NAMESPACE, 3)))
    assert body == {
        "version": 1, "cluster_uuid": "u-3", "number": 3, "is_declared": True, "created_ms": 7,
    }  # fmt: skip
    assert bucket_marker.is_own_key(bucket_marker.fenced_key(NAMESPACE, 3), NAMESPACE)


def test_whoever_waits_for_a_lease_waits_longer_than_it_lasts() -> None:
    """The margin is for a clock that runs a tenth slower than the waiter's, at least."""
    assert bucket_marker.FENCE_WAIT_MS >= bucket_marker.LEASE_MS * 1.1
