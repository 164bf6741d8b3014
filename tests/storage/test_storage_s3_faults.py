"""Whatever breaks between the store and a real S3 server ends well or in one clear error.

Never in wrong bytes, never in an object counted as foreign that is one's own.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pytest

from streammeta.storage import errors
from streammeta.storage.object_store.opening import open_object_store
from streammeta.storage.object_store.precheck import CREATORS, run_precheck
from streammeta.storage.object_store.protocol.address import S3Config
from streammeta.storage.object_store.protocol.base import MIN_PART_SIZE, Body, ObjectStore
from streammeta.storage.object_store.protocol.retry import RetryPolicy
from streammeta.storage.object_store.s3.s3 import S3ObjectStore
from tests.storage.s3_fault_proxy import (
    DONE,
    Fault,
    FaultProxy,
    always,
    running_fault_proxy,
    scripted,
    seeded,
)
from tests.storage.s3_servers import running_ministack

pytestmark = pytest.mark.s3

POLICY = RetryPolicy(attempts=5, first_delay_s=0.001, longest_delay_s=0.005, budget=10_000)
IMPATIENT = replace(POLICY, attempts=20, silence_s=0.4)
PASSING = [fault for fault in Fault if fault is not Fault.FORBIDDEN]
LOUD = tuple(fault for fault in PASSING if fault not in (Fault.SILENT, Fault.DONE_BUT_SILENT))
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Scene:
    """One bucket, seen through the proxy and past it."""

    proxy: FaultProxy
    address: str
    direct: ObjectStore
    opened: list[ObjectStore] = field(default_factory=list)

    def store(self, policy: RetryPolicy = POLICY) -> S3ObjectStore:
        """Open the bucket through the proxy, until the test ends."""
        store = S3ObjectStore(S3Config.from_uri(self.address), policy)
        self.opened.append(store)
        return store


@pytest.fixture(scope="module")
def shared_scene() -> Iterator[Scene]:
    with running_ministack() as endpoint, running_fault_proxy(endpoint) as proxy:
        endpoint.create_bucket("faults")
        direct = open_object_store(endpoint.uri("faults"))
        yield Scene(proxy, proxy.endpoint.uri("faults"), direct)
        direct.close()


@pytest.fixture
def scene(shared_scene: Scene) -> Iterator[Scene]:
    """An empty bucket, and a proxy that has seen nothing yet and breaks nothing."""
    proxy, direct = shared_scene.proxy, shared_scene.direct
    proxy.start_anew()
    yield shared_scene
    while shared_scene.opened:
        shared_scene.opened.pop().close()
    proxy.start_anew()
    direct.delete_many([info.key for info in direct.list_objects()])
    for unfinished in direct.list_multipart_uploads():
        direct.abort_multipart(unfinished)


@pytest.mark.parametrize("fault", PASSING)
def test_one_fault_in_every_operation_is_got_over(scene: Scene, fault: Fault) -> None:
    operations = (
        *("put", "get_range", "head", "list_objects", "copy", "delete_many"),
        *("start_multipart", "upload_part", "copy_part", "complete_multipart", "abort_multipart"),
    )
    scene.proxy.plan = scripted(*((operation, fault) for operation in operations))
    store = scene.store(POLICY if fault in LOUD else IMPATIENT)
    store.put("a", b"0123456789")
    assert scene.direct.get_range("a") == b"0123456789"
    assert store.get_range("a") == b"0123456789"
    assert store.head("a").size == 10
    assert [info.key for info in store.list_objects()] == ["a"]
    unfinished = store.start_multipart("m")
    parts = [
        store.upload_part(unfinished, 1, bytes(MIN_PART_SIZE)),
        store.copy_part(unfinished, 2, "a", 2, 5),
    ]
    store.complete_multipart(unfinished, parts)
    assert scene.direct.get_range("m") == bytes(MIN_PART_SIZE) + b"234"
    store.abort_multipart(store.start_multipart("dropped"))
    store.copy("a", "b")
    assert scene.direct.get_range("b") == b"0123456789"
    assert store.delete_many(["a", "b", "m"]).failed == {}
    assert list(scene.direct.list_objects()) == []
    assert scene.proxy.broken[fault] == len(operations)
    metrics = store.metrics()
    # A busy machine may be silent now and then without any fault.
    retries = sum(operation.retries for operation in metrics.operations.values())
    assert retries == len(operations) or (fault not in LOUD and retries > len(operations))
    assert sum(operation.failures for operation in metrics.operations.values()) == 0


@pytest.mark.parametrize("fault", PASSING)
def test_a_conditional_put_knows_its_own_object_again(scene: Scene, fault: Fault) -> None:
    store = scene.store(POLICY if fault in LOUD else IMPATIENT)
    scene.proxy.plan = scripted(("put", fault), ("head", fault))
    store.put("own", b"mine", if_absent=True)
    assert scene.direct.get_range("own") == b"mine"
    assert scene.proxy.broken[fault] == (2 if fault in DONE else 1)

    scene.direct.put("foreign", b"theirs", if_absent=True)
    scene.proxy.plan = scripted(("put", fault))
    with pytest.raises(errors.ObjectExistsError, match="foreign"):
        store.put("foreign", b"theirs", if_absent=True)  # the same bytes are no proof
    assert scene.direct.get_range("foreign") == b"theirs"


@pytest.mark.parametrize("fault", [Fault.FAILED, Fault.SLOW_DOWN, Fault.RESET, Fault.ANSWER_CUT])
def test_a_fault_that_stays_is_one_clear_error(scene: Scene, fault: Fault) -> None:
    scene.direct.put("a", b"0123456789")
    scene.proxy.plan = always(fault)
    store = scene.store()
    for use in (lambda: store.put("b", b"x"), lambda: store.get_range("a"), store.check):
        before = scene.proxy.seen.total()
        with pytest.raises(errors.StoreUnavailableError, match=r"(?i)retry") as caught:
            use()
        assert caught.value.throttled is (fault is Fault.SLOW_DOWN)
        assert scene.proxy.seen.total() - before == POLICY.attempts


def test_a_deadline_holds_against_a_server_that_says_nothing(scene: Scene) -> None:
    """The connection would wait for minutes; the test's own time limit is what would end it."""
    store = scene.store(RetryPolicy(silence_s=600.0, call_s=600.0))
    store.put("a", b"w")  # what the first call alone has to do may take longer than the deadline
    scene.proxy.plan = always(Fault.SILENT)
    with pytest.raises(errors.DeadlineExceededError):
        store.until(time.monotonic() + 0.5).put("a", b"x")
    assert scene.proxy.seen == {"put": 2}
    scene.proxy.plan = lambda _: None
    store.until(time.monotonic() + PATIENCE_S).put("a", b"y")
    assert scene.direct.get_range("a") == b"y"


@pytest.mark.parametrize("seed", [11])
def test_a_storm_of_faults_never_brings_wrong_bytes(scene: Scene, seed: int) -> None:
    scene.proxy.plan = seeded(seed, 0.3, LOUD)
    store = scene.store()
    outcomes: dict[str, tuple[bytes, bool]] = {}

    def work(worker: int) -> None:
        rng = random.Random(f"{seed}-{worker}")
        for turn in range(12):
            key = f"{worker}/{turn}"
            data = rng.randbytes(rng.choice([0, 1, 1000, 60_000]))
            bodies: tuple[Body, ...] = (data, memoryview(data), bytearray(data))
            outcomes[key] = (
                data,
                _put(store, key, rng.choice(bodies), if_absent=rng.random() < 0.5),
            )
            read = rng.choice(sorted(outcomes))
            try:
                got = store.get_range(read)
            except errors.ObjectNotFoundError:
                assert not outcomes[read][1], f"seed {seed}: {read} was lost"
            except errors.StoreUnavailableError:
                continue
            else:
                assert got == outcomes[read][0], f"seed {seed}: {read} has other bytes"

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(work, worker) for worker in range(6)]:
            done.result(PATIENCE_S)
    scene.proxy.plan = lambda _: None
    stored = {info.key: scene.direct.get_range(info.key) for info in scene.direct.list_objects()}
    assert len(scene.proxy.broken) == len(LOUD), f"seed {seed}"
    for key, (data, was_stored) in outcomes.items():
        assert key in stored or not was_stored, f"seed {seed}: {key} was lost"
        assert stored.get(key, data) == data, f"seed {seed}: {key} has other bytes"


def _put(store: ObjectStore, key: str, data: Body, *, if_absent: bool) -> bool:
    """Tell whether the store says that it was stored; no other answer than that is allowed."""
    try:
        store.put(key, data, if_absent=if_absent)
    except errors.StoreUnavailableError:
        return False
    return True


def upload_in_parts(store: ObjectStore, key: str, data: bytes) -> None:
    """Upload `data` in two parts, or abort the upload."""
    upload = store.start_multipart(key)
    try:
        pieces = (data[:MIN_PART_SIZE], data[MIN_PART_SIZE:])
        parts = [store.upload_part(upload, at, piece) for at, piece in enumerate(pieces, start=1)]
        store.complete_multipart(upload, parts)
    except errors.StorageError:
        store.abort_multipart(upload)
        raise


@pytest.mark.parametrize("seed", [21])
def test_uploads_in_parts_get_through_a_storm_or_are_aborted(scene: Scene, seed: int) -> None:
    data = random.Random(seed).randbytes(MIN_PART_SIZE + 5)
    store = scene.store()
    for turn in range(3):
        scene.proxy.plan = seeded(seed + turn, 0.25, LOUD)
        try:
            upload_in_parts(store, f"up/{turn}", data)
        except errors.StorageError:
            continue
        finally:
            scene.proxy.plan = lambda _: None
        assert scene.direct.get_range(f"up/{turn}") == data, f"seed {seed}"
    assert len(list(scene.direct.list_objects())) >= 2, f"seed {seed}"


@pytest.mark.parametrize("seed", [31])
def test_of_creators_in_a_storm_at_most_one_wins(scene: Scene, seed: int) -> None:
    scene.proxy.plan = seeded(seed, 0.3, LOUD)
    stores = [scene.store() for _ in range(5)]
    for race in range(8):
        key = f"race/{race}"
        start = threading.Barrier(len(stores))

        def create(creator: int, key: str = key, start: threading.Barrier = start) -> str:
            start.wait(PATIENCE_S)
            try:
                stores[creator].put(key, b"%d" % creator, if_absent=True)
            except errors.ObjectExistsError:
                return "lost"
            except errors.StoreUnavailableError:
                return "unknown"
            return "won"

        with ThreadPoolExecutor(len(stores)) as pool:
            outcomes = list(pool.map(create, range(len(stores))))
        (holder,) = [int(scene.direct.get_range(key))]
        assert outcomes.count("won") <= 1, f"seed {seed}, race {race}"
        assert outcomes[holder] != "lost", f"seed {seed}, race {race}: told that it was foreign"
        if "won" in outcomes:
            assert outcomes.index("won") == holder, f"seed {seed}, race {race}"


def test_a_throttled_store_is_asked_less_and_more_again_later(scene: Scene) -> None:
    scene.direct.put("a", b"x")
    store = scene.store(replace(POLICY, attempts=50, longest_delay_s=0.01, concurrency=8))

    def read_many(count: int) -> None:
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda _: store.get_range("a"), range(count))) == [b"x"] * count

    read_many(16)
    assert store.metrics().concurrency_limit == 8
    scene.proxy.capacity = 2
    for _ in range(20):  # a store that is held up between its answers is not always too busy
        read_many(20)
        limit = store.metrics().concurrency_limit
        assert limit is not None
        if limit <= 4:
            break
    else:
        pytest.fail(f"up to {limit} requests at once")
    throttled = store.metrics().of("get_range")
    assert throttled.throttled > 0
    scene.proxy.capacity = None
    read_many(60)
    assert store.metrics().concurrency_limit == 8
    assert store.metrics().of("get_range").throttled == throttled.throttled


def test_a_server_that_ignores_conditions_is_found_out(scene: Scene) -> None:
    store = scene.store()
    assert run_precheck(store).failures == ()
    scene.proxy.ignored = frozenset({"if-none-match"})
    (failed,) = run_precheck(store).failures
    assert failed.name == "Create an object once"
    assert failed.reason.startswith(f"{CREATORS} of {CREATORS} concurrent creators of an object")
    assert "another server" in failed.reason
    assert list(scene.direct.list_objects()) == []
