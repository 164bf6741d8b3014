"""Deletions a second, and requests for a thousand keys, on a real S3 server.

Orphans, which are small objects with a record of a stream that has passed them, are put into a
bucket of an S3 server. Then the code of `reconcile apply` deletes them without a rate limit:
checks, look-ups, reads, and records on disk. A stand-in for the leader has forgotten every id. Its
calls are counted, and its time is in no figure.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from scripts.benchmarks.figures import BenchmarkError, Outcome, Progress, Table, medians
from scripts.benchmarks.listed_bucket import NAMESPACE
from scripts.demonstration.s3_endpoint import start_embedded
from streammeta.reconcile.cluster.identity import ClusterIdentity
from streammeta.reconcile.cluster.lease import held_lease
from streammeta.reconcile.deletion.order import Candidate, DeletionOrder
from streammeta.reconcile.deletion.order import Outcome as Deleted
from streammeta.reconcile.deletion.tasks import Deleter
from streammeta.reconcile.vocabulary.attempts import ONLY_ATTEMPT
from streammeta.storage.cluster_files.bucket_marker import BucketMarker, create_marker
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.object_writer import ObjectWriter
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.opening import open_object_store
from streammeta.storage.object_store.protocol.address import StoreAddress
from streammeta.storage.object_store.protocol.base import DeleteResult, ObjectInfo, ObjectStore
from streammeta.v1 import common_pb2, objects_pb2

_IDENTITY = ClusterIdentity("bench", "uuid-bench", NAMESPACE)
_PUTS_AT_ONCE = 16
_PAGE = 1000


class _Counted:
    """Store that counts requests. A page of a listing, or a thousand deletions, is one."""

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
    """Leader that has issued every id, and forgotten it."""

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


def measure(place: Path, keys: int, runs: int, progress: Progress) -> Outcome:
    """Put orphans and delete them, `runs` times.

    Raises:
        BenchmarkError: an orphan was not deleted.
    """
    endpoint = start_embedded("ministack", place)
    found: list[dict[str, float]] = []
    key, secret = (endpoint.env[f"AWS_{name}"] for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
    uri = f"{endpoint.store_uri}&accessKey={key}&secretKey={secret}"
    try:
        with closing(open_object_store(uri)) as store:
            create_marker(store, _marker())
            for number in range(runs):
                progress(f"reconcile: {keys} deletions, run {number + 1}")
                found.append(_run(store, place / str(number), keys))
    finally:
        if endpoint.server is not None:
            endpoint.server.stop()
    figures = medians(found)
    table = Table.of(
        "Deletions by apply, p50",
        [{"keys": keys, **figures}],
        "keys | a second = per_s | CPU, us a key = cpu_us_a_key | requests = requests_per_1000"
        " | calls = questions_per_1000",
    )

    return Outcome(
        benchmark="reconcile-deletions",
        settings={"keys": keys, "runs": runs},
        figures={f"deletions_{name}": round(value, 4) for name, value in figures.items()},
        details={"runs": found},
        tables=[table],
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
        list(pool.map(lambda number: store.put(key_for(number, NAMESPACE), orphan), range(keys)))
    listed = (info for info in store.list_objects() if not info.key.startswith(f"{NAMESPACE}/"))
    candidates = [
        Candidate(
            info.key, int(info.key.split("/")[2]), info.size, info.last_modified_ms, info.etag
        )
        for info in listed
    ]
    order = DeletionOrder(
        store=StoreAddress.parse(folder.as_uri()),
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
        outcomes = Counter(done.outcome for batch in work.run(candidates) for done in batch)
        wall_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_begun
    if outcomes != {Deleted.DELETED: keys}:
        raise BenchmarkError(f"the outcomes of {keys} orphans are {dict(outcomes)}")

    return {
        "per_s": keys / wall_s,
        "cpu_us_a_key": cpu_s / keys * 1e6,
        "requests_per_1000": sum(counted.requests.values()) / keys * 1000,
        "questions_per_1000": leader.questions / keys * 1000,
    }
