"""Real controllers that back up to an S3 server: kill -9 amid a copy, a bucket that is away."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from streammeta.cli.framework.client import ControllerClient
from streammeta.controller.backup.archive import Archive
from streammeta.controller.backup.chains import newest_chain
from streammeta.controller.backup.verification import verify
from streammeta.storage.cluster_files.backup_files import inventories
from streammeta.storage.object_store.opening import open_object_store
from tests.kit.real_cluster import (
    FAST,
    describe,
    leader_of,
    put,
    running_cluster,
    streammeta,
    writes_going_on,
)
from tests.kit.waiting import wait_until
from tests.storage.s3_fault_proxy import Fault, FaultProxy, ProxiedRequest, running_fault_proxy
from tests.storage.s3_servers import running_ministack

pytestmark = [pytest.mark.process, pytest.mark.s3]


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    with running_ministack() as endpoint, running_fault_proxy(endpoint) as proxy:
        endpoint.create_bucket("backup")
        yield proxy


def options(proxy: FaultProxy) -> tuple[str, ...]:
    return (
        *FAST,
        *("--backup-store", proxy.endpoint.uri("backup"), "--backup-interval-ms", "100"),
        *("--snapshot-log-bytes", "20000"),
    )


def archive(proxy: FaultProxy) -> Archive | None:
    """The only backup in the bucket, None if there is none yet."""
    store = open_object_store(proxy.endpoint.uri("backup"))
    folders = list(inventories(store.list_objects("backup/")))
    assert len(folders) <= 1
    return Archive(store, folders[0]) if folders else None


def restorable_to(proxy: FaultProxy) -> int:
    """How far the backup reaches, by the names of its files."""
    found = archive(proxy)
    chain = newest_chain(found.inventory()) if found is not None else None
    return 0 if chain is None else chain.end_offset


def damages(proxy: FaultProxy, *, is_all: bool = False) -> tuple[object, ...]:
    """What verification finds wrong with the newest chain, or with every file of the backup."""
    found = archive(proxy)
    assert found is not None
    return verify(found.inventory(), found, is_all=is_all).damages


def is_beyond(proxy: FaultProxy, offset: int) -> bool:
    return restorable_to(proxy) > offset


def test_a_leader_killed_amid_a_segment_leaves_no_gap(tmp_path: Path, proxy: FaultProxy) -> None:
    with running_cluster(tmp_path, options=options(proxy)) as cluster:
        with writes_going_on(cluster) as writes:
            wait_until(lambda: restorable_to(proxy) > 0, "a first copy")
            is_between = threading.Event()

            def plan(request: ProxiedRequest) -> Fault | None:
                if request.operation == "put" and request.path.endswith(".segment.json"):
                    is_between.set()
                    return Fault.SILENT
                return None

            for _ in range(2):
                proxy.plan = plan
                assert is_between.wait(60)
                before = restorable_to(proxy)
                leader = leader_of(cluster)
                cluster.children[leader].kill()
                proxy.start_anew()
                is_between.clear()
                wait_until(partial(is_beyond, proxy, before), "the next leader's copy")
                assert damages(proxy) == ()
                writes.expect_progress()
                cluster.start(leader)
        wait_until(
            lambda: restorable_to(proxy) >= describe(cluster).high_watermark, "all to be copied"
        )
        assert damages(proxy, is_all=True) == ()


def test_an_absent_bucket_delays_nothing_and_catches_up(tmp_path: Path, proxy: FaultProxy) -> None:
    with running_cluster(tmp_path, 1, options=options(proxy)) as cluster:
        wait_until(lambda: restorable_to(proxy) > 0, "a first copy")
        before = restorable_to(proxy)
        proxy.plan = lambda _: Fault.RESET
        with ControllerClient(cluster.endpoints) as client:
            for number in range(300):
                put(client, f"key {number}", "x" * 1_000)  # several checkpoints: the log is trimmed
        proxy.start_anew()
        wait_until(
            lambda: restorable_to(proxy) >= describe(cluster).high_watermark, "all to be copied"
        )
        assert restorable_to(proxy) >= before + 300
        assert damages(proxy) == ()


def test_commands_show_how_far_a_backup_is_and_take_one(tmp_path: Path, proxy: FaultProxy) -> None:
    address = proxy.endpoint.uri("backup")
    with running_cluster(tmp_path, 1, options=options(proxy)) as cluster:
        at = ("--from", address, "--connect", cluster.connect)
        with ControllerClient(cluster.endpoints) as client:
            put(client, "one", "1")
        wait_until(lambda: restorable_to(proxy) >= describe(cluster).high_watermark, "a copy")
        told = streammeta("backup", "status", *at)
        assert (told["exit_code"], told["lag_entries"], told["lag_ms"]) == (0, 0, 0), told
        proxy.plan = lambda request: Fault.RESET if request.operation == "put" else None
        with ControllerClient(cluster.endpoints) as client:
            put(client, "two", "2")
        wait_until(lambda: streammeta("backup", "status", *at)["lag_entries"] > 0, "a lag")
        late = streammeta("backup", "status", *at, "--lag-max", "1ms")
        assert (late["exit_code"], late["error"]["code"]) == (1, "LATE")
        file = tmp_path / "now.checkpoint"
        taken = streammeta("backup", "now", str(file), "--connect", cluster.connect)
        assert taken["exit_code"] == 0, taken
        assert hashlib.sha256(file.read_bytes()).hexdigest() == taken["sha256"]
        hashes = streammeta("cluster", "hash", "--connect", cluster.connect)
        assert hashes["exit_code"] == 0
        again = streammeta("backup", "now", str(file), "--connect", cluster.connect)
        assert (again["exit_code"], again["error"]["code"]) == (1, "EXISTS")
