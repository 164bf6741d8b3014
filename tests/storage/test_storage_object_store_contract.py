"""What every object store promises, held against all of them: the rules of `ObjectStore`.

`STREAMMETA_TEST_S3` names the only store to hold them against: local, ministack, moto or ceph
(see `./scripts/test --help`). Without it there are memory, a directory and the smallest server.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from streammeta.storage import errors
from streammeta.storage.object_store.local import LocalObjectStore
from streammeta.storage.object_store.local_files import read_tags
from streammeta.storage.object_store.opening import open_object_store
from streammeta.storage.object_store.precheck import run_precheck
from streammeta.storage.object_store.protocol.address import Checksum
from streammeta.storage.object_store.protocol.base import MIN_PART_SIZE, ObjectStore
from streammeta.storage.object_store.s3.s3 import S3ObjectStore
from tests.kit.memory_store import MemoryObjectStore
from tests.storage.s3_servers import S3Endpoint, running_ceph, running_ministack, running_moto

ONLY = os.environ.get("STREAMMETA_TEST_S3")
KINDS = (ONLY,) if ONLY else ("memory", "local", "ministack")
SERVERS = tuple(kind for kind in KINDS if kind not in ("memory", "local"))

DEVIATIONS = {
    ("moto", "test_an_upload_that_ended_is_unknown"): (
        "answers 500 to requests about an upload that it has forgotten"
    ),
    ("moto", "test_copying_a_part_from_behind_the_end_is_an_error"): (
        "copies what there is of the range"
    ),
    ("moto", "test_damaged_bytes_are_refused[md5]"): "does not look at Content-MD5",
    ("moto", "test_damaged_bytes_are_refused[crc32]"): "does not look at x-amz-checksum-crc32",
    ("moto", "test_damaged_bytes_are_refused[crc32c]"): "does not look at x-amz-checksum-crc32c",
    ("ministack", "test_tags_go_with_the_object_that_had_them"): (
        "keeps the tags when an object is replaced by one without"
    ),
    ("ministack", "test_tags_are_kept_with_an_object_of_parts"): (
        "drops the tags that an upload in parts is begun with"
    ),
    ("ministack", "test_damaged_bytes_are_refused[crc32c]"): "refuses CRC32C altogether",
    ("ministack", "test_stored_checksums_go_along_with_every_way_to_make_an_object[crc32c]"): (
        "refuses CRC32C altogether"
    ),
    ("ceph", "test_an_upload_that_ended_is_unknown"): (
        "answers 500 to the completion of an upload that was aborted"
    ),
    ("ceph", "test_tags_are_kept_with_an_object_of_parts"): (
        "drops the tags that an upload in parts is begun with"
    ),
    ("ceph", "test_damaged_bytes_are_refused[crc32]"): "does not look at x-amz-checksum-crc32",
    ("ceph", "test_damaged_bytes_are_refused[crc32c]"): "does not look at x-amz-checksum-crc32c",
}
"""(server, test without the server in its name): what the server does otherwise than the contract.

The test is expected to fail there and only there; it fails when the server has been mended.
"""

_bucket_numbers = itertools.count()


def _marked(names: tuple[str, ...]) -> list[Any]:
    plain = ("memory", "local")
    return [n if n in plain else pytest.param(n, marks=pytest.mark.s3) for n in names]


@pytest.fixture(scope="module")
def endpoint_of() -> Iterator[Callable[[str], S3Endpoint]]:
    """Give the endpoint of a server, which is started when it is first asked for."""
    starts = {"moto": running_moto, "ministack": running_ministack, "ceph": running_ceph}
    with ExitStack() as running:
        yield functools.cache(lambda name: running.enter_context(starts[name]()))


@pytest.fixture(params=_marked(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    _expect_deviation(request, kind)
    return kind


@pytest.fixture(params=_marked(SERVERS))
def server(request: pytest.FixtureRequest) -> str:
    server: str = request.param
    _expect_deviation(request, server)
    return server


def _expect_deviation(request: pytest.FixtureRequest, server: str) -> None:
    """Let a test fail that this server is known to fail, and nothing else."""
    name = request.node.name.replace(f"-{server}]", "]").replace(f"[{server}-", "[")
    reason = DEVIATIONS.get((server, name.replace(f"[{server}]", "")))
    if reason is not None:
        request.applymarker(pytest.mark.xfail(reason=f"{server} {reason}", strict=True))


@pytest.fixture
def store(
    kind: str, endpoint_of: Callable[[str], S3Endpoint], tmp_path: Path
) -> Iterator[ObjectStore]:
    opened: ObjectStore
    if kind == "memory":
        opened = MemoryObjectStore()
    elif kind == "local":
        opened = open_object_store(f"file://{tmp_path}")
    else:
        opened = in_new_bucket(endpoint_of(kind))
    opened.check()
    yield opened
    opened.close()


def in_new_bucket(endpoint: S3Endpoint, options: str = "") -> ObjectStore:
    bucket = f"bucket-{next(_bucket_numbers)}"
    endpoint.create_bucket(bucket)
    return open_object_store(endpoint.uri(bucket) + options)


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
        with pytest.raises(errors.RangeNotSatisfiableError):
            store.get_range("key", start, end)
    for start, end in [(-1, 3), (5, 5), (6, 5)]:
        with pytest.raises(ValueError, match="byte range"):
            store.get_range("key", start, end)


def test_bytes_are_read_into_buffers_one_after_the_other(store: ObjectStore) -> None:
    data = random.Random(3).randbytes(700_000)
    store.put("key", data)
    before = store.metrics().of("get_range").bytes_received
    buffers = [bytearray(size) for size in (1, 0, 300_000, *[2] * 2_000, 50_000)]
    got = store.read_into("key", 1_000, [memoryview(buffer) for buffer in buffers])
    assert got == sum(map(len, buffers))
    assert b"".join(buffers) == data[1_000 : 1_000 + got]
    assert store.metrics().of("get_range").bytes_received == before + got
    beyond = bytearray(b"x" * 10)
    assert store.read_into("key", len(data) - 4, [memoryview(beyond)]) == 4, "the object ends"
    assert beyond == data[-4:] + b"x" * 6
    with pytest.raises(errors.RangeNotSatisfiableError):
        store.read_into("key", len(data), [memoryview(beyond)])
    with pytest.raises(errors.ObjectNotFoundError, match="no/such"):
        store.read_into("no/such", 0, [memoryview(beyond)])
    with pytest.raises(ValueError, match="byte range"):
        store.read_into("key", -1, [memoryview(beyond)])
    with pytest.raises(ValueError, match="no room"):
        store.read_into("key", 0, [memoryview(bytearray())])


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
    with pytest.raises(errors.ObjectNotFoundError, match="no/such"):
        store.get_range("no/such", 0, 10)
    with pytest.raises(errors.ObjectNotFoundError, match="no/such"):
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


def test_more_objects_than_a_page_are_listed_and_deleted(store: ObjectStore) -> None:
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
    keys = ["d/b", "d/e/f", "d/none/at/all", "d/a/x"]
    assert set(store.delete_many(keys).deleted) == set(keys)
    assert [info.key for info in store.list_objects()] == ["d/a"]
    assert store.delete_many([]).deleted == ()


def test_a_multipart_object_appears_only_when_completed(store: ObjectStore) -> None:
    first = bytes([1]) * MIN_PART_SIZE
    store.put("source", b"0123456789")
    unfinished = store.start_multipart("m/big")
    parts = [
        store.upload_part(unfinished, 2, memoryview(b"replaced below")),
        store.upload_part(unfinished, 1, first),
        store.upload_part(unfinished, 2, bytes([2]) * MIN_PART_SIZE),
        store.copy_part(unfinished, 3, "source", 2, 5),
    ][1:]
    assert [info.key for info in store.list_objects("m/")] == []
    assert [(u.key, u.upload_id) for u in store.list_multipart_uploads("m/")] == [
        (unfinished.key, unfinished.upload_id)
    ]
    assert list(store.list_multipart_uploads("other/")) == []
    store.complete_multipart(unfinished, parts)
    assert store.get_range("m/big", 2 * MIN_PART_SIZE - 1) == b"\x02234"
    assert store.head("m/big").size == 2 * MIN_PART_SIZE + 3
    assert list(store.list_multipart_uploads()) == []


def test_an_aborted_upload_leaves_nothing(store: ObjectStore) -> None:
    unfinished = store.start_multipart("m/gone")
    store.upload_part(unfinished, 1, b"x")
    store.abort_multipart(unfinished)
    assert list(store.list_multipart_uploads()) == []
    with pytest.raises(errors.ObjectNotFoundError):
        store.head("m/gone")


def test_an_upload_that_ended_is_unknown(store: ObjectStore) -> None:
    unfinished = store.start_multipart("m/gone")
    part = store.upload_part(unfinished, 1, b"x")
    store.abort_multipart(unfinished)
    store.abort_multipart(unfinished)
    with pytest.raises(errors.UploadNotFoundError, match=unfinished.upload_id):
        store.complete_multipart(unfinished, [part])
    with pytest.raises(errors.UploadNotFoundError, match=unfinished.upload_id):
        store.upload_part(unfinished, 2, b"y")


def test_parts_that_make_no_object_are_refused_before_anything_is_sent(store: ObjectStore) -> None:
    unfinished = store.start_multipart("m/small")
    small = [store.upload_part(unfinished, number, b"x") for number in (1, 2)]
    with pytest.raises(ValueError, match="expected 5242880"):
        store.complete_multipart(unfinished, small)
    for parts in ([], [small[1], small[0]], [small[0], small[0]]):
        with pytest.raises(ValueError, match="part numbers"):
            store.complete_multipart(unfinished, parts)
    for number in (0, 10_001):
        with pytest.raises(ValueError, match="part number"):
            store.upload_part(unfinished, number, b"x")
    store.abort_multipart(unfinished)
    assert list(store.list_objects()) == []


def test_a_copy_is_the_equal_of_its_source(store: ObjectStore) -> None:
    store.put("from/a", bytes(range(256)), tags={"kind": "x"})
    store.put("to/a", b"replaced")
    store.copy("from/a", "to/a")
    store.copy("from/a", "to/deep/er")
    store.delete_many(["from/a"])
    for key in ("to/a", "to/deep/er"):
        assert store.get_range(key) == bytes(range(256))
        assert store.head(key).size == 256
        assert tags_of(store, key) == {"kind": "x"}
    store.put("empty", b"")
    store.copy("empty", "to/empty")
    assert store.get_range("to/empty") == b""


def test_copying_nothing_is_an_error_and_makes_nothing(store: ObjectStore) -> None:
    with pytest.raises(errors.ObjectNotFoundError, match="absent"):
        store.copy("absent", "target")
    assert list(store.list_objects()) == []


def test_copying_a_part_from_nothing_is_an_error(store: ObjectStore) -> None:
    unfinished = store.start_multipart("m/copy")
    with pytest.raises(errors.ObjectNotFoundError, match="absent"):
        store.copy_part(unfinished, 1, "absent", 0, 10)
    store.abort_multipart(unfinished)


def test_copying_a_part_from_behind_the_end_is_an_error(store: ObjectStore) -> None:
    store.put("short", b"0123456789")
    unfinished = store.start_multipart("m/copy")
    for start, end in ((5, 11), (10, 11)):
        with pytest.raises((errors.RangeNotSatisfiableError, errors.StoreRejectedError)):
            store.copy_part(unfinished, 1, "short", start, end)
    store.abort_multipart(unfinished)


def test_an_object_is_created_once(store: ObjectStore) -> None:
    store.put("once", b"first", if_absent=True)
    for _ in range(2):
        with pytest.raises(errors.ObjectExistsError, match="'once'"):
            store.put("once", b"second", if_absent=True)
        assert store.get_range("once") == b"first"
    store.put("once", b"replaced")
    assert store.get_range("once") == b"replaced"
    store.delete_many(["once"])
    store.put("once", b"", if_absent=True)
    assert store.get_range("once") == b""


def tags_of(store: ObjectStore, key: str) -> dict[str, str]:
    """Read the tags of an object the way that its kind of store keeps them."""
    match store:
        case MemoryObjectStore():
            return store.get_tags(key)
        case LocalObjectStore():
            return read_tags(store._objects / key)
        case S3ObjectStore():
            answer = store._client.get_object_tagging(Bucket=store._bucket, Key=key)
            return {tag["Key"]: tag["Value"] for tag in answer["TagSet"]}
    raise TypeError(store)


def test_tags_are_kept_with_the_object(store: ObjectStore) -> None:
    tags = {"cluster": "prod-1", "made by": "node 7 +-=._:/@", "empty": ""}
    store.put("t/put", b"x", tags=tags)
    assert tags_of(store, "t/put") == tags
    store.put("t/plain", b"y")
    assert tags_of(store, "t/plain") == {}


def test_tags_go_with_the_object_that_had_them(store: ObjectStore) -> None:
    store.put("t/put", b"x", tags={"cluster": "prod-1"})
    store.put("t/put", b"y")
    assert tags_of(store, "t/put") == {}


def test_tags_are_kept_with_an_object_of_parts(store: ObjectStore) -> None:
    tags = {"cluster": "prod-1", "empty": ""}
    unfinished = store.start_multipart("t/parts", tags=tags)
    store.complete_multipart(unfinished, [store.upload_part(unfinished, 1, b"x")])
    assert tags_of(store, "t/parts") == tags


def test_tags_are_added_to_an_object_that_stays_as_it_is(store: ObjectStore) -> None:
    store.put("t/put", b"x", tags={"cluster": "prod-1", "state": "live"})
    store.put("t/plain", b"y")
    before = list(store.list_objects())
    store.add_tags("t/put", {"state": "orphan"})
    store.add_tags("t/plain", {"state": "orphan"})
    assert tags_of(store, "t/put") == {"cluster": "prod-1", "state": "orphan"}
    assert tags_of(store, "t/plain") == {"state": "orphan"}
    assert list(store.list_objects()) == before
    assert store.get_range("t/put") == b"x"
    with pytest.raises(errors.ObjectNotFoundError):
        store.add_tags("t/absent", {"state": "orphan"})
    with pytest.raises(ValueError, match="tags"):
        store.add_tags("t/put", {f"name{i}": "" for i in range(9)})
    assert tags_of(store, "t/put") == {"cluster": "prod-1", "state": "orphan"}


@pytest.mark.parametrize(
    "tags",
    [{f"name{i}": "" for i in range(11)}, {"": "x"}, {"n" * 129: ""}, {"n": "v" * 257}, {"ä": ""},
     {"n": "a;b"}, {f"n{i}": "v" * 250 for i in range(9)}],
)  # fmt: skip
def test_tags_that_some_stores_lose_are_refused(store: ObjectStore, tags: dict[str, str]) -> None:
    for use in (
        lambda: store.put("key", b"x", tags=tags),
        lambda: store.start_multipart("key", tags=tags),
    ):
        with pytest.raises(ValueError, match="tag"):
            use()
    assert list(store.list_objects()) == []
    assert list(store.list_multipart_uploads()) == []


def test_a_store_that_keeps_no_versions_lists_none(store: ObjectStore) -> None:
    store.put("key", b"x")
    store.put("key", b"y")
    store.put("gone", b"x")
    store.delete_many(["gone"])
    assert list(store.list_old_versions()) == []


def test_nothing_begins_after_its_deadline(store: ObjectStore) -> None:
    store.put("key", b"x")
    unfinished = store.start_multipart("m")
    late = store.until(time.monotonic() + 60).until(time.monotonic()).until(time.monotonic() + 60)
    uses: list[Callable[[], object]] = [
        late.check,
        lambda: late.put("other", b"y"),
        lambda: late.get_range("key"),
        lambda: late.head("key"),
        lambda: late.copy("key", "other"),
        lambda: late.add_tags("key", {"a": "b"}),
        lambda: list(late.list_objects()),
        lambda: late.delete_many(["key"]),
        lambda: late.start_multipart("other"),
        lambda: late.upload_part(unfinished, 1, b"y"),
        lambda: late.copy_part(unfinished, 1, "key", 0, 1),
        lambda: list(late.list_multipart_uploads()),
    ]
    for use in uses:
        with pytest.raises(errors.DeadlineExceededError):
            use()
    late.abort_multipart(unfinished)
    assert list(store.list_multipart_uploads()) == []
    assert [info.key for info in store.list_objects()] == ["key"]
    assert store.until(time.monotonic() + 60).get_range("key") == b"x"


def test_calls_are_counted_with_their_bytes(store: ObjectStore) -> None:
    before = store.metrics()
    store.put("a", b"12345")
    store.until(time.monotonic() + 60).put("b", b"67")
    store.get_range("a", 1, 3)
    with pytest.raises(errors.ObjectNotFoundError):
        store.get_range("none")
    store.delete_many(["a", "b"])
    after = store.metrics()
    assert before.of("put").calls == 0
    puts, gets = after.of("put"), after.of("get_range")
    assert (puts.calls, puts.requests, puts.failures, puts.bytes_sent) == (2, 2, 0, 7)
    assert (gets.calls, gets.failures, gets.bytes_received) == (2, 1, 2)
    assert after.of("delete_many").calls == 1
    assert puts.seconds > 0
    assert "head" not in after.operations


def test_every_store_here_can_be_built_upon(store: ObjectStore) -> None:
    store.put("foreign", b"stays")
    report = run_precheck(store)
    assert [step for step in report.steps if not step.is_ok] == []
    assert len(report.steps) == 8
    assert report.left_behind == ""
    assert [info.key for info in store.list_objects()] == ["foreign"]
    assert list(store.list_multipart_uploads()) == []


@pytest.mark.parametrize("key", ["", "k" * 1025, "é" * 513, "\ud800"])
def test_keys_that_no_store_takes_are_refused(store: ObjectStore, key: str) -> None:
    for use in (
        lambda: store.put(key, b"x"),
        lambda: store.get_range(key),
        lambda: store.head(key),
        lambda: store.delete_many(["fine", key]),
        lambda: store.start_multipart(key),
    ):
        with pytest.raises(errors.InvalidKeyError):
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
            reader.result(timeout=60)
    assert all(data in versions for data in seen)


@pytest.mark.parametrize("checksum", list(Checksum))
def test_damaged_bytes_are_refused(
    server: str, checksum: Checksum, endpoint_of: Callable[[str], S3Endpoint]
) -> None:
    store = in_new_bucket(endpoint_of(server))
    assert isinstance(store, S3ObjectStore)
    is_refused = store.enforces_checksum("damaged", checksum)
    store.close()
    assert is_refused


@pytest.mark.parametrize("checksum", [Checksum.CRC32, Checksum.CRC32C])
def test_stored_checksums_go_along_with_every_way_to_make_an_object(
    server: str, checksum: Checksum, endpoint_of: Callable[[str], S3Endpoint]
) -> None:
    store = in_new_bucket(endpoint_of(server), f"&checksum={checksum}")
    first = random.Random(9).randbytes(MIN_PART_SIZE)
    store.put("put", b"0123456789", if_absent=True)
    unfinished = store.start_multipart("parts")
    parts = [store.upload_part(unfinished, 1, first), store.copy_part(unfinished, 2, "put", 2, 5)]
    store.complete_multipart(unfinished, parts)
    assert store.get_range("put") == b"0123456789"
    assert store.get_range("put", 3, 7) == b"3456"
    assert store.get_range("parts") == first + b"234"
    assert store.get_range("parts", MIN_PART_SIZE - 1) == first[-1:] + b"234"
    store.close()


def test_a_missing_bucket_is_named(server: str, endpoint_of: Callable[[str], S3Endpoint]) -> None:
    store = open_object_store(endpoint_of(server).uri("not-there"))
    for use in (
        store.check,
        lambda: store.put("key", b"x"),
        lambda: store.get_range("key"),
        lambda: list(store.list_objects()),
        lambda: store.start_multipart("key"),
    ):
        with pytest.raises(errors.BucketNotFoundError, match="'not-there'"):
            use()
    store.close()


def test_the_memory_store_fails_as_told_and_then_goes_on() -> None:
    store = MemoryObjectStore(now_ms=lambda: 42)
    store.fail_next("put", errors.StoreUnavailableError("told"), times=2)
    store.fail_next("head", errors.ObjectNotFoundError("key"))
    for _ in range(2):
        with pytest.raises(errors.StoreUnavailableError, match="told"):
            store.put("key", b"x")
    assert store.objects() == {}
    store.put("key", b"x")
    with pytest.raises(errors.ObjectNotFoundError):
        store.head("key")
    assert store.head("key").last_modified_ms == 42
    with pytest.raises(ValueError, match="'putt'"):
        store.fail_next("putt", errors.StoreUnavailableError("never"))
