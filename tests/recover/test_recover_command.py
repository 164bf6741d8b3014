"""The commands over directories and a bucket, without controllers: refusals that change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streammeta.cli.recovery import predecessors
from streammeta.controller.journal.directory import read_identity
from streammeta.storage.cluster_files import bucket_marker
from streammeta.storage.durable_files import PosixFileSystem
from streammeta.storage.errors import StoreUnavailableError
from streammeta.storage.object_store.local import LocalObjectStore
from streammeta.storage.object_store.opening import open_object_store
from tests.kit.real_cluster import streammeta
from tests.recover.recover_world import CLUSTER, UUID, Writing, put_on_disk, written

NAMESPACE = "_streammeta_test"


class Place:
    """Directories of survivors, and the bucket of their cluster."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "bucket").mkdir()
        self.uri = f"file://{root}/bucket"
        with_marker = open_object_store(self.uri)
        bucket_marker.create_marker(
            with_marker,
            bucket_marker.BucketMarker(
                cluster_id=CLUSTER, cluster_uuid=UUID, namespace=NAMESPACE, created_ms=1
            ),
        )
        with_marker.close()

    def survivor(self, node_id: int, log: Writing) -> Path:
        directory = self.root / f"node{node_id}"
        put_on_disk(log, PosixFileSystem(), node_id, directory)
        return directory

    def inspected(self, node_id: int) -> str:
        report = self.root / f"{node_id}.json"
        where = ("--data-dir", str(self.root / f"node{node_id}"))
        done = streammeta("recover", "inspect", *where, "--report", str(report))
        assert done["exit_code"] == 0, done
        return str(report)

    def planned(self, name: str, dead: str, *reports: str) -> dict[str, Any]:
        words = [word for report in reports for word in ("--report", report)]
        return streammeta(
            *("recover", "plan", *words, "--dead", dead, "--store", self.uri),
            *("--plan", str(self.root / name)),
        )

    def applied(self, name: str, node_id: int, *more: str) -> dict[str, Any]:
        return self.applied_unsure(name, node_id, "--old-controllers-stopped", *more)

    def applied_unsure(self, name: str, node_id: int, *more: str) -> dict[str, Any]:
        """Apply without knowing whether other controllers are alive."""
        return streammeta(
            *("recover", "apply", "--plan", str(self.root / name), "--store", self.uri),
            *("--data-dir", str(self.root / f"node{node_id}"), *more),
        )

    def generations(self) -> list[int]:
        store = open_object_store(self.uri)
        found = [mark.number for mark in bucket_marker.read_generations(store, NAMESPACE)]
        store.close()
        return found

    def disk_of(self, node_id: int) -> str:
        directory = self.root / f"node{node_id}"
        return read_identity(directory, PosixFileSystem(read_only=True)).directory_id


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def five() -> Writing:
    return written(node_ids=(1, 2, 3, 4, 5))


def error_of(answer: dict[str, Any]) -> str:
    assert answer["exit_code"] == 1, answer
    assert answer["error"]["hint"]
    return str(answer["error"]["code"])


def test_of_two_survivors_one_goes_on(place: Place) -> None:
    place.survivor(4, five())
    place.survivor(5, five())
    # Two operators, each of whom takes the other's survivor for dead.
    for name, dead, node_id in (("a.json", "1,2,3,5", 4), ("b.json", "1,2,3,4", 5)):
        assert place.planned(name, dead, place.inspected(node_id))["exit_code"] == 0
    assert place.applied("a.json", 4, "--yes")["done"]
    assert error_of(place.applied("b.json", 5, "--yes")) == "SUPERSEDED"
    assert place.disk_of(5) == "disk5", "nothing was exchanged"
    assert place.generations() == [2]


def test_the_most_complete_survivor_is_named_and_the_lag_of_the_others(place: Place) -> None:
    more = five()
    more.put(4, "one more")
    place.survivor(4, five())
    place.survivor(5, more)
    planned = place.planned("a.json", "1,2,3", place.inspected(4), place.inspected(5))
    assert planned["node_id"] == 5
    assert [(one["node_id"], one["behind"], one["goes_on"]) for one in planned["survivors"]] == [
        (4, 1, False),
        (5, 0, True),
    ]
    assert error_of(place.applied("a.json", 4)) == "ANOTHER_DIRECTORY"
    assert place.disk_of(4) == "disk4"


def test_a_dry_run_changes_nothing(place: Place) -> None:
    directory = place.survivor(3, written())
    assert place.planned("a.json", "1,2", place.inspected(3))["exit_code"] == 0
    before = {path: path.read_bytes() for path in directory.iterdir()}
    dry = place.applied("a.json", 3)
    assert (dry["exit_code"], dry["done"]) == (0, False)
    assert {path: path.read_bytes() for path in directory.iterdir()} == before
    assert place.generations() == []


def test_a_wrong_list_of_the_dead_is_called_the_wrong_way_or_refused(place: Place) -> None:
    place.survivor(3, written())
    report = place.inspected(3)
    assert place.planned("a.json", "one", report)["exit_code"] == 2
    assert error_of(place.planned("a.json", "1", report)) == "DEAD_LIST"
    assert not (place.root / "a.json").exists()


def test_a_bucket_of_another_cluster_is_refused(place: Place) -> None:
    log = Writing()
    for _ in range(3):
        log.put(4, "a key, before the cluster had a bucket")
    log.name_voters(4, written().named)
    place.survivor(3, log)
    assert error_of(place.planned("a.json", "1,2", place.inspected(3))) == "WRONG_BUCKET"


def test_a_report_that_is_none_is_refused(place: Place) -> None:
    file = place.root / "broken.json"
    file.write_text('{"version": 1}')
    assert error_of(place.planned("a.json", "1,2", str(file))) == "STORAGE"


def test_an_empty_directory_is_no_survivor(place: Place) -> None:
    place.survivor(3, written())
    assert place.planned("a.json", "1,2", place.inspected(3))["exit_code"] == 0
    assert error_of(place.applied("a.json", 7, "--yes")) == "DATA_DIRECTORY"
    assert not (place.root / "node7").exists()


def test_a_takeover_is_repeated_unanswered(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.survivor(4, five())
    assert place.planned("a.json", "1,2,3,5", place.inspected(4))["exit_code"] == 0
    put = LocalObjectStore.put

    def lost(store: LocalObjectStore, *words: Any, **options: Any) -> None:
        put(store, *words, **options)
        raise StoreUnavailableError("the answer was lost")

    with monkeypatch.context() as patched:
        patched.setattr(LocalObjectStore, "put", lost)
        assert error_of(place.applied("a.json", 4, "--yes")) == "STORAGE"
    assert (place.generations(), place.disk_of(4)) == ([2], "disk4")
    assert place.applied("a.json", 4, "--yes")["done"]
    assert place.generations() == [2]


@pytest.mark.parametrize("is_declared", [False, True])
def test_the_lease_of_lost_controllers_is_waited_out_unless_they_are_declared_stopped(
    place: Place, monkeypatch: pytest.MonkeyPatch, is_declared: bool
) -> None:
    slept: list[float] = []
    now = SimpleNamespace(
        monotonic=lambda: sum(slept), sleep=slept.append, time_ns=lambda: 1_000_000
    )
    monkeypatch.setattr(predecessors, "time", now)
    place.survivor(3, written())
    assert place.planned("a.json", "1,2", place.inspected(3))["exit_code"] == 0
    apply = place.applied if is_declared else place.applied_unsure
    assert apply("a.json", 3, "--yes")["done"]
    assert sum(slept) == (0 if is_declared else bucket_marker.FENCE_WAIT_MS / 1000)
    store = open_object_store(place.uri)
    mark = json.loads(store.get_range(bucket_marker.fenced_key(NAMESPACE, 2)))
    store.close()
    assert mark["is_declared"] is is_declared
    slept.clear()
    assert place.applied_unsure("a.json", 3, "--yes")["done"]
    assert not slept, "a repeat finds the mark"
