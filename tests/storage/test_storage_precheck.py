"""The precheck finds what a store does wrong, says what, and leaves the bucket as it was."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from streammeta.storage.errors import StoreRejectedError, StoreUnavailableError
from streammeta.storage.object_store.precheck import CREATORS, FOLDER, run_precheck
from streammeta.storage.object_store.protocol import base
from tests.kit.memory_store import MemoryObjectStore

STEPS = [
    "Write object",
    "Read object",
    "Delete object",
    "Write object to copy from",
    "Upload multipart object",
    "Read multipart object",
    "Delete multipart object",
    "Create an object once",
]


class ChecksThenStores(MemoryObjectStore):
    """Looks first and stores later: the two creators that look first both succeed."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.creators: Counter[str] = Counter()

    def put(
        self, key: str, data: base.Body, *, if_absent: bool = False, tags: base.Tags | None = None
    ) -> None:
        with self.lock:
            self.creators[key] += if_absent
            saw_nothing = self.creators[key] <= 2
        super().put(key, data, if_absent=if_absent and not saw_nothing, tags=tags)


class ForgetsTheEnd(MemoryObjectStore):
    """Loses the last byte of objects made of parts."""

    def complete_multipart(
        self, upload: base.MultipartUpload, parts: Iterable[base.UploadedPart]
    ) -> None:
        super().complete_multipart(upload, tuple(parts))
        super().put(upload.key, self.objects()[upload.key][:-1])


class KeepsEverything(MemoryObjectStore):
    """Confirms deletions and does nothing."""

    def delete_many(self, keys: Iterable[str]) -> base.DeleteResult:
        return base.DeleteResult(tuple(keys), {})


class ServesWholes(MemoryObjectStore):
    """Answers every range with the whole object."""

    def get_range(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return super().get_range(key)


def test_a_good_store_passes_and_is_left_as_it_was() -> None:
    store = MemoryObjectStore()
    store.put("foreign", b"stays")
    store.put(f"{FOLDER}/of-another-run", b"stays too")
    before = store.objects()
    heard: list[str] = []
    report = run_precheck(store, lambda step: heard.append(step.name))
    assert heard == [step.name for step in report.steps] == STEPS
    assert report.failures == ()
    assert report.enforced is None
    assert store.objects() == before
    assert list(store.list_multipart_uploads()) == []
    assert store.metrics().of("list_objects").calls == 0


@pytest.mark.parametrize(
    ("make", "step", "reason"),
    [
        (ChecksThenStores, STEPS[-1], f"2 of {CREATORS} concurrent creators"),
        (ForgetsTheEnd, "Read multipart object", "first difference at byte"),
        (ServesWholes, "Read object", "differs from the written bytes"),
    ],
)
def test_what_a_store_does_wrong_is_named(
    make: Callable[[], MemoryObjectStore], step: str, reason: str
) -> None:
    store = make()
    report = run_precheck(store)
    assert reason in {failed.name: failed.reason for failed in report.failures}[step]
    assert store.objects() == {}


def test_a_deletion_that_does_nothing_is_noticed() -> None:
    report = run_precheck(KeepsEverything())
    failed = {step.name: step.reason for step in report.failures}
    assert "still exists" in failed["Delete object"]
    assert "still exists" in failed["Delete multipart object"]


def test_what_depends_on_a_failed_step_is_not_tried() -> None:
    store = MemoryObjectStore()
    store.fail_next("put", StoreRejectedError("read-only"), times=2)
    report = run_precheck(store)
    reasons = [step.reason for step in report.steps]
    assert [bool(reason) for reason in reasons] == [True] * 8
    assert reasons[0] == reasons[3] == "read-only"
    assert all("skipped" in reason for reason in reasons if reason != "read-only")
    assert store.metrics().of("start_multipart").calls == 0


def test_an_upload_that_failed_is_aborted_and_what_is_left_is_told() -> None:
    store = MemoryObjectStore()
    store.fail_next("copy_part", StoreRejectedError("no copies"))
    report = run_precheck(store)
    assert report.failures[0].name == "Upload multipart object"
    assert report.failures[0].reason == "no copies"
    assert list(store.list_multipart_uploads()) == []
    assert report.left_behind == ""

    store.fail_next("copy_part", StoreRejectedError("no copies"))
    store.fail_next("abort_multipart", StoreUnavailableError("gone"))
    report = run_precheck(store)
    assert f"objects below {FOLDER}/" in report.left_behind
    assert "gone" in report.left_behind


def test_a_store_that_hangs_fails_the_step_when_its_time_is_up() -> None:
    report = run_precheck(MemoryObjectStore(), step_s=1e-9)
    assert "deadline exceeded" in report.steps[0].reason
    assert len(report.failures) == len(STEPS)
