"""Deletions a second, and requests for a thousand keys, against a real server of S3.

Orphans, small objects with a record of a stream that has passed them, are put into a bucket of an
S3 server of its own; then the code that `reconcile apply` runs deletes them at no limit but the
server's: checks, look-ups, reads, records on disk and all. The leader is a stand-in that has
forgotten every id: its questions are counted, and its time is in no figure.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.benchmarks.figures import Outcome, Table, median
from scripts.benchmarks.listed_bucket import NAMESPACE
from scripts.benchmarks.reconciling import ReconcilingError
from scripts.demonstration.s3_endpoint import start_embedded
from streammeta.reconcile.attempts import ONLY_ATTEMPT
from streammeta.reconcile.deletion import Deleter
from streammeta.reconcile.deletion_order import Candidate, DeletionOrder
from streammeta.reconcile.deletion_order import Outcome as Deleted
from streammeta.reconcile.identity import ClusterIdentity
from streammeta.reconcile.lease import held_lease
from streammeta.storage.bucket_marker import BucketMarker, create_marker
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.object_writer import ObjectWriter
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.address import open_object_store
from streammeta.storage.object_store.base import DeleteResult, ObjectInfo, ObjectStore
from streammeta.v1 import common_pb2, objects_pb2

_IDENTITY = ClusterIdentity("bench", "uuid-bench", NAMESPACE)
_PUTS_AT_ONCE = 16
_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Settings:
    """Orphans to delete, and runs."""

    keys: int
    runs: int = 3


class _Counted:
    """A store that counts requests: a page of a listing, and a thousand deletions, are one each."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.requests: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.requests[name] += 1
        return getattr(self._store, name)

    def list_objects(
        self, prefix: str = "", start_after: str | None = None
    ) -> Iterator[ObjectInfo]:
        self.requests["list_objects"] += 1
        for number, info in enumerate(self._store.list_objects(prefix, start_after), 1):
            yield info
            self.requests["list_objects"] += number % _PAGE == 0

    def delete_many(self, keys: Iterable[str]) -> DeleteResult:
        self.requests["delete_many"] += 1
        return self._store.delete_many(keys)


class _Leader:
    """Has issued every id, and forgotten it."""

    endpoints = ("none",)

    def __init__(self) -> None:
        self.questions = 0

    def check_objects(
        self, object_ids: Sequence[int], *, deleting: bool = False
    ) -> objects_pb2.CheckObjectsResponse:
        self.questions += 1
        return objects_pb2.CheckObjectsResponse(
            states=[common_pb2.OBJECT_STATE_REMOVED] * len(object_ids),
            next_object_id=1 << 40,
            cluster_id=_IDENTITY.cluster_id,
            cluster_uuid=_IDENTITY.cluster_uuid,
            issued_below=1 << 40,
        )

    def stream_ends(self, stream_ids: Sequence[int]) -> dict[int, int]:
        self.questions += 1
        return dict.fromkeys(stream_ids, 1)


def measure(place: Path, settings: Settings, progress: Callable[[str], None]) -> Outcome:
    """Put orphans and delete them, again and again. Raises `ReconcilingError`."""
    place.mkdir()
    endpoint = start_embedded("ministack", place)
    runs: list[dict[str, float]] = []
    key, secret = (endpoint.env[f"AWS_{name}"] for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
    uri = f"{endpoint.store_uri}&accessKey={key}&secretKey={secret}"
    try:
        with closing(open_object_store(uri)) as store:
            create_marker(store, _marker())
            for number in range(settings.runs):
                progress(f"reconcile: {settings.keys} deletions, run {number + 1}")
                runs.append(_run(store, place / str(number), settings.keys))
    finally:
        if endpoint.server is not None:
            endpoint.server.stop()
    found = {name: median([one[name] for one in runs]) for name in runs[0]}
    return Outcome(
        benchmark="reconcile-deletions",
        settings={"keys": settings.keys, "runs": settings.runs},
        figures={f"deletions_{name}": round(value, 4) for name, value in found.items()},
        details={"runs": runs},
        tables=(
            Table(
                title="Deletions by apply, p50",
                columns=("keys", "a second", "CPU, us a key", "requests", "questions"),
                rows=(
                    (
                        settings.keys,
                        round(found["per_s"]),
                        round(found["cpu_us_a_key"]),
                        round(found["requests_per_1000"], 1),
                        round(found["questions_per_1000"], 1),
                    ),
                ),
            ),
        ),
    )


def _marker() -> BucketMarker:
    return BucketMarker(
        cluster_id=_IDENTITY.cluster_id,
        cluster_uuid=_IDENTITY.cluster_uuid,
        namespace=NAMESPACE,
        created_ms=1,
    )


def _orphan() -> bytes:
    writer = ObjectWriter()
    writer.write([RecordBatch(0, 1, 0, 1, b"orphan")])
    writer.finish()
    (data,) = writer.parts()
    return bytes(data)


def _run(store: ObjectStore, folder: Path, keys: int) -> dict[str, float]:
    orphan = _orphan()
    with ThreadPoolExecutor(_PUTS_AT_ONCE) as pool:
        list(pool.map(lambda one: store.put(key_for(one, NAMESPACE), orphan), range(keys)))
    listed = (info for info in store.list_objects() if not info.key.startswith(f"{NAMESPACE}/"))
    candidates = [
        Candidate(one.key, int(one.key.split("/")[2]), one.size, one.last_modified_ms, one.etag)
        for one in listed
    ]
    order = DeletionOrder(
        store=str(folder),
        connect=_Leader.endpoints,
        patience_s=1,
        identity=_IDENTITY,
        next_object_id=0,
        next_stream_id=1 << 31,
        undo_folder=str(folder / "undo"),
        audit_folder=str(folder / "audit"),
        signals_folder=str(folder / "signals"),
        keys_per_s=1_000_000_000,
        delete=True,
        run=folder.name,
    )
    leader: Any = _Leader()
    counted: Any = _Counted(store)
    with (
        held_lease(store, NAMESPACE, folder.name),
        closing(Deleter(order, ONLY_ATTEMPT, counted, leader)) as work,
    ):
        begun, cpu_begun = time.perf_counter(), time.process_time()
        outcomes = Counter(one.outcome for batch in work.run(candidates) for one in batch)
        wall_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_begun
    if outcomes != {Deleted.DELETED: keys}:
        raise ReconcilingError(f"of {keys} orphans became {dict(outcomes)}")
    return {
        "per_s": keys / wall_s,
        "cpu_us_a_key": cpu_s / keys * 1e6,
        "requests_per_1000": sum(counted.requests.values()) / keys * 1000,
        "questions_per_1000": leader.questions / keys * 1000,
    }
