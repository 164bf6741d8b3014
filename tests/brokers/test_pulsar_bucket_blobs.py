"""Blobs in a bucket of their own: what failures of the store become."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from streammeta.brokers.pulsar.blobs.blobs import BlobError, NoSuchBlobError
from streammeta.brokers.pulsar.blobs.bucket_blobs import BucketBlobs, BucketUpload
from streammeta.storage.errors import (
    AccessDeniedError,
    ObjectNotFoundError,
    StoreUnavailableError,
    UploadNotFoundError,
)
from streammeta.storage.object_store.protocol.base import DeleteResult
from tests.kit.memory_store import MemoryObjectStore


class Keeping(MemoryObjectStore):
    """A store that keeps one key."""

    def delete_many(self, keys: Iterable[str]) -> DeleteResult:
        done = super().delete_many(key for key in keys if key != "locked")
        return DeleteResult(done.deleted, {"locked": "AccessDenied"})


@pytest.fixture
def blobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketBlobs]:
    """Blobs over a store in memory, and a client that the test gives."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    made = BucketBlobs.of("s3://b?endpoint=http://127.0.0.1:9")
    yield made
    made.close()


def over(blobs: BucketBlobs, store: MemoryObjectStore) -> MemoryObjectStore:
    stub: Any = store
    stub.close = lambda: None
    blobs._store = stub
    return store


async def test_a_blob_that_the_store_keeps_is_not_deleted_and_the_error_names_it(
    blobs: BucketBlobs,
) -> None:
    store = over(blobs, Keeping())
    for name in ("a", "locked"):
        store.put(name, b"x")
    with pytest.raises(BlobError, match=r"'locked'.*AccessDenied"):
        await blobs.delete(["a", "locked"])
    assert list(store.objects()) == ["locked"]
    over(blobs, MemoryObjectStore()).fail_next("delete_many", AccessDeniedError("no right"))
    with pytest.raises(BlobError):
        await blobs.delete(["a"])


async def test_a_listing_that_fails_is_no_empty_place(blobs: BucketBlobs) -> None:
    """A sweep, or a look for a copy, would take it for one without copies."""
    store = over(blobs, MemoryObjectStore())
    store.put("a", b"x")
    store.fail_next("list_objects", StoreUnavailableError("down"))
    with pytest.raises(BlobError):
        await blobs.names()
    assert await blobs.names() == ["a"]


async def test_a_read_that_fails_is_no_missing_blob(blobs: BucketBlobs) -> None:
    store = over(blobs, MemoryObjectStore())
    store.put("a", b"abc")
    store.fail_next("get_range", StoreUnavailableError("down"))
    with pytest.raises(BlobError):
        await blobs.read("a", 0, 9)
    assert await blobs.read("a", 1, 9) == b"bc"
    assert await blobs.read("a", 3, 9) == b""
    with pytest.raises(NoSuchBlobError):
        await blobs.read("b", 0, 9)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ObjectNotFoundError("a"), NoSuchBlobError),
        (AccessDeniedError("no right"), BlobError),
    ],
)
async def test_only_an_object_that_is_not_there_is_a_missing_blob(
    blobs: BucketBlobs, error: Exception, raised: type[Exception]
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(raised):
        await blobs.call("a", fail)


async def test_an_upload_that_is_gone_counts_as_dropped_and_any_other_does_not(
    blobs: BucketBlobs,
) -> None:
    errors: list[Exception] = [UploadNotFoundError("a", "u"), AccessDeniedError("no right")]

    def abort(**_: object) -> None:
        raise errors.pop(0)

    client: Any = SimpleNamespace(abort_multipart_upload=abort, close=lambda: None)
    blobs.client = client
    upload = BucketUpload(blobs, "a", "u")
    await upload.abort()
    with pytest.raises(BlobError):
        await upload.abort()


async def test_an_upload_is_completed_with_its_parts_in_order(blobs: BucketBlobs) -> None:
    asked: list[Any] = []
    client: Any = SimpleNamespace(
        upload_part=lambda **part: {"ETag": f"e{part['PartNumber']}"},
        complete_multipart_upload=lambda **call: asked.append(call["MultipartUpload"]["Parts"]),
        close=lambda: None,
    )
    blobs.client = client
    upload = BucketUpload(blobs, "a", "u")
    for number in (2, 1, 3, 2):
        await upload.part(number, b"x")
    await upload.complete()
    assert asked == [[{"PartNumber": at, "ETag": f"e{at}"} for at in (1, 2, 3)]]
