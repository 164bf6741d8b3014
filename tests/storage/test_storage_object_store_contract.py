"""What every object store promises, held against all of them: the rules of `ObjectStore`."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from storage.errors import (
    BucketNotFoundError,
    InvalidKeyError,
    ObjectNotFoundError,
    RangeNotSatisfiableError,
    UploadNotFoundError,
)
from storage.object_store.base import MIN_PART_SIZE, ObjectStore
from storage.object_store.factory import open_object_store
from storage.object_store.memory import MemoryObjectStore
from tests.storage.s3_servers import S3Endpoint, running_ministack, running_moto

_bucket_numbers = itertools.count()


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Endpoint]:
    with running_moto() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def ministack() -> Iterator[S3Endpoint]:
    with running_ministack() as endpoint:
        yield endpoint


@pytest.fixture(
    params=[
        "memory",
        "local",
        pytest.param("moto", marks=pytest.mark.s3),
        pytest.param("ministack", marks=pytest.mark.s3),
    ]
)
def kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
def store(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    opened: ObjectStore
    if kind == "memory":
        opened = MemoryObjectStore()
    elif kind == "local":
        opened = open_object_store(f"file://{tmp_path}")
    else:
        endpoint: S3Endpoint = request.getfixturevalue(kind)
        bucket = f"bucket-{next(_bucket_numbers)}"
        endpoint.create_bucket(bucket)
        opened = open_object_store(endpoint.uri(bucket))
    opened.check()
    yield opened
    opened.close()


def test_what_was_put_is_read_back_and_replaced_whole(store: ObjectStore) -> None:
    store.put("a/b/c", b"first")
    assert store.get_range("a/b/c") == b"first"
    store.put("a/b/c", memoryview(b"__second and longer__")[2:-2])
    assert store.get_range("a/b/c") == b"second and longer"
    store.put("a/b/c", b"")
    assert store.get_range("a/b/c") == b""
    assert store.head("a/b/c").size == 0


def test_ranges_are_half_open_and_end_with_the_object(store: ObjectStore) -> None:
    data = bytes(range(100))
    store.put("key", data)
    for start, end in [(0, 1), (0, 100), (10, 20), (99, 100), (50, 1000), (7, None), (0, None)]:
        assert store.get_range("key", start, end) == data[start:end]
    for start, end in [(100, 101), (100, None), (5000, 5001)]:
        with pytest.raises(RangeNotSatisfiableError):
            store.get_range("key", start, end)
    for start, end in [(-1, 3), (5, 5), (6, 5)]:
        with pytest.raises(ValueError, match="byte range"):
            store.get_range("key", start, end)


def test_head_tells_size_and_a_recent_time(store: ObjectStore) -> None:
    store.put("key", b"12345")
    info = store.head("key")
    assert (info.key, info.size) == ("key", 5)
    assert info.etag
    listed = next(iter(store.list_objects()))
    # A HEAD has whole seconds, a listing may have more.
    assert abs(listed.last_modified_ms - info.last_modified_ms) <= 1000
    assert (listed.key, listed.size, listed.etag) == (info.key, info.size, info.etag)


def test_absent_objects_are_named(store: ObjectStore) -> None:
    with pytest.raises(ObjectNotFoundError, match="no/such"):
        store.get_range("no/such", 0, 10)
    with pytest.raises(ObjectNotFoundError, match="no/such"):
        store.head("no/such")


def test_listing_is_in_byte_order_and_complete_over_pages(store: ObjectStore) -> None:
    seed = 20_240
    rng = random.Random(seed)
    keys = {f"{rng.randrange(40):02x}{rng.choice('-./0Az')}{i}" for i in range(60)}
    keys |= {"p/a-b", "p/a/b", "p/a.b", "p/a0", "p/a~", "p/é", "p/z", "p/a b+c%"}
    keys = {key for key in keys if "//" not in key}
    for key in sorted(keys, key=hash):
        store.put(key, b"x")
    wanted = sorted(keys, key=str.encode)
    assert [info.key for info in store.list_objects()] == wanted, f"seed {seed}"
    inside = [key for key in wanted if key.startswith("p/a")]
    assert [info.key for info in store.list_objects("p/a")] == inside
    for after in ("p/a/b", "p/a", "p/a.", "p/zz", ""):
        got = [info.key for info in store.list_objects("p/", start_after=after)]
        assert got == [key for key in wanted if key.startswith("p/") and key > after], after
    assert list(store.list_objects("nothing/")) == []


def test_more_objects_than_a_page_are_listed_and_deleted(store: ObjectStore, kind: str) -> None:
    if kind == "moto":
        pytest.skip("as ministack, at twice the time")
    count = 1100
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: store.put(f"many/{i:05d}", b""), range(count)))
    keys = [info.key for info in store.list_objects("many/")]
    assert keys == [f"many/{i:05d}" for i in range(count)]
    result = store.delete_many([*keys, "many/never"])
    assert result.failed == {}
    assert set(result.deleted) == {*keys, "many/never"}
    assert list(store.list_objects()) == []


def test_deleting_leaves_the_others(store: ObjectStore) -> None:
    for key in ("d/a", "d/b", "d/e/f"):
        store.put(key, b"x")
    assert set(store.delete_many(["d/b", "d/e/f", "d/none/at/all", "d/a/x"]).deleted) == {
        "d/b",
        "d/e/f",
        "d/none/at/all",
        "d/a/x",
    }
    assert [info.key for info in store.list_objects()] == ["d/a"]
    assert store.delete_many([]).deleted == ()


def test_a_multipart_object_appears_only_when_completed(store: ObjectStore) -> None:
    first = bytes([1]) * MIN_PART_SIZE
    store.put("source", b"0123456789")
    upload = store.start_multipart("m/big")
    parts = [
        store.upload_part(upload, 2, memoryview(b"replaced below")),
        store.upload_part(upload, 1, first),
        store.upload_part(upload, 2, bytes([2]) * MIN_PART_SIZE),
        store.copy_part(upload, 3, "source", 2, 5),
    ][1:]
    assert [info.key for info in store.list_objects("m/")] == []
    assert [(u.key, u.upload_id) for u in store.list_multipart_uploads("m/")] == [
        (upload.key, upload.upload_id)
    ]
    assert list(store.list_multipart_uploads("other/")) == []
    store.complete_multipart(upload, parts)
    assert store.get_range("m/big", 2 * MIN_PART_SIZE - 1) == b"\x02234"
    assert store.head("m/big").size == 2 * MIN_PART_SIZE + 3
    assert list(store.list_multipart_uploads()) == []


def test_an_aborted_upload_leaves_nothing(store: ObjectStore, kind: str) -> None:
    upload = store.start_multipart("m/gone")
    part = store.upload_part(upload, 1, b"x")
    store.abort_multipart(upload)
    assert list(store.list_multipart_uploads()) == []
    with pytest.raises(ObjectNotFoundError):
        store.head("m/gone")
    if kind == "moto":
        return  # answers 500 to requests about an upload that it has forgotten
    store.abort_multipart(upload)
    with pytest.raises(UploadNotFoundError, match=upload.upload_id):
        store.complete_multipart(upload, [part])
    with pytest.raises(UploadNotFoundError, match=upload.upload_id):
        store.upload_part(upload, 2, b"y")


def test_parts_that_make_no_object_are_refused_before_anything_is_sent(store: ObjectStore) -> None:
    upload = store.start_multipart("m/small")
    small = [store.upload_part(upload, number, b"x") for number in (1, 2)]
    with pytest.raises(ValueError, match="wanted 5242880"):
        store.complete_multipart(upload, small)
    for parts in ([], [small[1], small[0]], [small[0], small[0]]):
        with pytest.raises(ValueError, match="part numbers"):
            store.complete_multipart(upload, parts)
    for number in (0, 10_001):
        with pytest.raises(ValueError, match="part number"):
            store.upload_part(upload, number, b"x")
    store.complete_multipart(upload, small[:1])
    assert store.get_range("m/small") == b"x"


def test_copying_a_part_from_nothing_is_an_error(store: ObjectStore) -> None:
    upload = store.start_multipart("m/copy")
    with pytest.raises(ObjectNotFoundError, match="absent"):
        store.copy_part(upload, 1, "absent", 0, 10)
    store.abort_multipart(upload)


@pytest.mark.parametrize("key", ["", "k" * 1025, "é" * 513, "\ud800"])
def test_keys_that_no_store_takes_are_refused(store: ObjectStore, key: str) -> None:
    for use in (
        lambda: store.put(key, b"x"),
        lambda: store.get_range(key),
        lambda: store.head(key),
        lambda: store.delete_many(["fine", key]),
        lambda: store.start_multipart(key),
    ):
        with pytest.raises(InvalidKeyError):
            use()
    assert list(store.list_objects()) == []


def test_readers_never_see_a_half_written_object(store: ObjectStore) -> None:
    versions = [bytes([n]) * 200_000 for n in range(6)]
    store.put("hot", versions[0])
    done = threading.Event()
    seen: list[bytes] = []

    def read() -> None:
        while not done.is_set():
            seen.append(store.get_range("hot"))

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        for version in versions:
            store.put("hot", version)
        done.set()
        for reader in readers:
            reader.result(timeout=30)
    assert all(data in versions for data in seen)


@pytest.mark.s3
@pytest.mark.parametrize("server", ["moto", "ministack"])
def test_a_missing_bucket_is_named_with_what_to_do(
    server: str, request: pytest.FixtureRequest
) -> None:
    endpoint: S3Endpoint = request.getfixturevalue(server)
    store = open_object_store(endpoint.uri("not-there"))
    for use in (
        store.check,
        lambda: store.put("key", b"x"),
        lambda: store.get_range("key"),
        lambda: list(store.list_objects()),
        lambda: store.start_multipart("key"),
    ):
        with pytest.raises(BucketNotFoundError, match=r"'not-there'.*create it or fix --s3-bucket"):
            use()
    store.close()
