"""Uploads of any size: what is sent, how much is held, and that no upload is left unfinished."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

from streammeta.storage.errors import StoreRejectedError, StoreUnavailableError
from streammeta.storage.object_store import multipart
from streammeta.storage.object_store.base import MIN_PART_SIZE, Body, MultipartUpload, UploadedPart
from streammeta.storage.object_store.memory import MemoryObjectStore
from streammeta.storage.object_store.multipart import UploadOptions, upload

PART = MIN_PART_SIZE
OPTIONS = UploadOptions(single_put_bytes=PART, part_bytes=PART, parallel_parts=3)


class WatchedStore(MemoryObjectStore):
    """Notes the sizes of parts, and how many travel at a time; each waits for others to come."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.changed = threading.Condition()
        self.travelling = 0
        self.most = 0

    def upload_part(self, upload: MultipartUpload, number: int, data: Body) -> UploadedPart:
        with self.changed:
            self.sizes[number] = len(data)
            self.travelling += 1
            self.most = max(self.most, self.travelling)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.travelling == OPTIONS.parallel_parts, timeout=0.2)
        try:
            return super().upload_part(upload, number, data)
        finally:
            with self.changed:
                self.travelling -= 1


def chunks(data: bytes, size: int) -> Iterator[memoryview]:
    return (memoryview(data)[start : start + size] for start in range(0, len(data), size))


def test_parts_have_one_size_travel_together_and_join_in_order() -> None:
    store = WatchedStore()
    data = random.Random(1).randbytes(5 * PART + 17)
    assert upload(store, "key", chunks(data, 1_000_003), options=OPTIONS) == len(data)
    assert store.objects() == {"key": data}
    assert store.sizes == dict.fromkeys(range(1, 6), PART) | {6: 17}
    assert store.most == OPTIONS.parallel_parts
    assert store.metrics().of("put").calls == 0


@pytest.mark.parametrize("size", [0, 1, PART])
def test_small_objects_are_one_request(size: int) -> None:
    store = MemoryObjectStore()
    data = random.Random(2).randbytes(size)
    assert upload(store, "key", [b"", data, b""], options=OPTIONS, tags={"a": "b"}) == size
    assert store.objects() == {"key": data}
    assert store.get_tags("key") == {"a": "b"}
    assert store.metrics().of("start_multipart").calls == 0


def test_no_more_is_taken_than_can_be_sent() -> None:
    """The source is asked for the next bytes only when those before have found room."""
    count = 12
    changed = threading.Condition()
    taken = sent = most = 0

    def source() -> Iterator[bytes]:
        nonlocal taken, most
        for _ in range(count):
            with changed:
                taken += 1
                most = max(most, taken - sent)
                changed.notify_all()
            yield bytes(PART)

    class Slow(MemoryObjectStore):
        def upload_part(self, upload: MultipartUpload, number: int, data: Body) -> UploadedPart:
            nonlocal sent
            with changed:  # let an eager caller run ahead
                changed.wait_for(lambda: taken == count, timeout=0.1)
                sent += 1
            return super().upload_part(upload, number, data)

    assert upload(Slow(), "key", source(), options=OPTIONS) == count * PART
    assert OPTIONS.parallel_parts <= most <= OPTIONS.parallel_parts + 2


@pytest.mark.parametrize("operation", ["upload_part", "complete_multipart"])
def test_an_upload_that_fails_is_aborted(operation: str) -> None:
    store = MemoryObjectStore()
    store.fail_next(operation, StoreUnavailableError("down"))
    with pytest.raises(StoreUnavailableError, match="down"):
        upload(store, "key", [bytes(3 * PART)], options=OPTIONS)
    assert list(store.list_multipart_uploads()) == []
    assert store.objects() == {}


def test_a_source_that_fails_aborts_the_upload() -> None:
    store = MemoryObjectStore()

    def source() -> Iterator[bytes]:
        yield bytes(2 * PART)
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        upload(store, "key", source(), options=OPTIONS)
    assert list(store.list_multipart_uploads()) == []
    assert store.objects() == {}


def test_an_upload_that_can_not_be_aborted_is_named() -> None:
    store = MemoryObjectStore()
    store.fail_next("complete_multipart", StoreUnavailableError("down"))
    store.fail_next("abort_multipart", StoreUnavailableError("still down"))
    with pytest.raises(StoreUnavailableError, match="down") as caught:
        upload(store, "key", [bytes(2 * PART)], options=OPTIONS)
    (left,) = store.list_multipart_uploads()
    (note,) = caught.value.__notes__
    assert left.upload_id in note
    assert "still down" in note


def test_more_parts_than_there_may_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart, "MAX_PARTS", 2)
    store = MemoryObjectStore()
    with pytest.raises(StoreRejectedError, match="larger than 2 parts"):
        upload(store, "key", [bytes(2 * PART + 1)], options=OPTIONS)
    assert list(store.list_multipart_uploads()) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"part_bytes": PART - 1},
        {"part_bytes": 5 * 1024**3 + 1},
        {"single_put_bytes": 5 * 1024**3 + 1},
        {"single_put_bytes": -1},
        {"parallel_parts": 0},
    ],
)
def test_sizes_outside_of_the_limits_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is {next(iter(wrong.values()))}"):
        UploadOptions(**wrong)
