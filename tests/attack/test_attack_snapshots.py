"""Snapshots asked for and not read: few at a time, spooled without a name, cut off in time."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from streammeta.controller.rpc.services import contract
from streammeta.controller.rpc.services.snapshot_spool import CHECKED_EVERY_BYTES, SnapshotSpool
from streammeta.controller.runtime.quorum_errors import NoDiskSpaceError
from streammeta.rpc.failures import Reason, RpcFailure, read_failure
from streammeta.v1 import kv_pb2, metadata_pb2
from streammeta.v1.metadata_pb2_grpc import MetadataServiceStub
from tests.kit.certificates import Authority
from tests.server.rpc_server import Rpcs, serving
from tests.trust.trusted_server import trusting

_MIB = 1 << 20


@pytest_asyncio.fixture
async def rpcs(tmp_path: Path) -> AsyncIterator[Rpcs]:
    async with serving(spool=SnapshotSpool(tmp_path)) as leader:
        yield leader


async def fill(rpcs: Rpcs, values: int) -> None:
    """Make a map of as many MiB, more than a connection carries unread."""
    for index in range(values):
        item = kv_pb2.KVToPut(key=f"{index}", value=bytes(_MIB))
        await rpcs.ask(kv_pb2.PutKVsRequest(items=[item]))


def snapshot(channel: grpc.aio.Channel) -> Any:
    stub: Any = MetadataServiceStub(channel)
    return stub.GetSnapshot(metadata_pb2.GetSnapshotRequest())


async def refusal(call: Any) -> RpcFailure:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in call:
            pass
    return read_failure(raised.value)


async def read_to_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def served_again(rpcs: Rpcs) -> None:
    """Return once there is a place for a snapshot."""
    for _ in range(10_000):
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in snapshot(rpcs.channel):
                pass
            return
    raise AssertionError("no place became free")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_unread_snapshots_leave_no_names_and_are_few(rpcs: Rpcs, tmp_path: Path) -> None:
    await fill(rpcs, 10)
    unread = [snapshot(rpcs.channel) for _ in range(contract.SNAPSHOTS_MAX)]
    for call in unread:
        assert (await call.read()).total_bytes > 10 * _MIB
    refused = await refusal(snapshot(rpcs.channel))
    assert refused.reason == Reason.BUSY
    assert refused.retry_after_s > 0
    assert names_in(tmp_path) == []
    unread[0].cancel()
    await served_again(rpcs)
    for call in unread:
        call.cancel()


async def test_a_principal_has_one_snapshot_under_way_and_another_has_its_own(
    tmp_path: Path,
) -> None:
    async with trusting(Authority(tmp_path, "ours")) as server:
        await fill(await server.by("admin/root"), 10)
        alice, bob = await server.by("backup/alice"), await server.by("backup/bob")
        unread = snapshot(alice.channel)
        await unread.read()
        refused = await refusal(snapshot(alice.channel))
        assert (refused.reason, "backup/alice has 1" in refused.message) == (Reason.BUSY, True)
        assert (await snapshot(bob.channel).read()).data
        unread.cancel()


async def test_a_reader_that_takes_nothing_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "SNAPSHOTS_MAX", 1)
    async with serving(spool=SnapshotSpool(tmp_path)) as rpcs:
        await fill(rpcs, 10)
        monkeypatch.setattr(contract, "SNAPSHOT_S_MIN", 0.2)
        monkeypatch.setattr(contract, "SNAPSHOT_BYTES_PER_S_MIN", 1 << 40)
        call = snapshot(rpcs.channel)
        await call.read()
        monkeypatch.setattr(contract, "SNAPSHOT_S_MIN", 60.0)
        await served_again(rpcs)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await read_to_end(call)
        failure = read_failure(raised.value)
        assert (failure.reason, "not read in" in failure.message) == (Reason.BUSY, True)


async def test_a_disk_with_little_room_takes_no_snapshot(tmp_path: Path) -> None:
    room = 0
    async with serving(spool=SnapshotSpool(tmp_path, lambda _: room)) as rpcs:
        assert (await refusal(snapshot(rpcs.channel))).reason == Reason.DISK_FULL
        room = 1 << 40
        assert (await snapshot(rpcs.channel).read()).data


def test_the_room_is_looked_at_while_a_snapshot_is_written(tmp_path: Path) -> None:
    rooms = iter([1 << 40, 0])
    with SnapshotSpool(tmp_path, lambda _: next(rooms)).file() as file:
        file.write(bytes(CHECKED_EVERY_BYTES))
        with pytest.raises(NoDiskSpaceError):
            file.write(bytes(2 * CHECKED_EVERY_BYTES))


def test_what_a_crash_has_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    kept = ["snapshot-1-x.spool", "snapshot.spool", "meta.json", "snapshot-1-2.spool.mine"]
    for name in (*kept, "snapshot-77-0.spool", "snapshot-1-12.spool"):
        (tmp_path / name).write_bytes(b"x")
    spool = SnapshotSpool(tmp_path)
    spool.remove_left_over()
    assert names_in(tmp_path) == sorted(kept)
    with spool.file() as file:
        file.write(b"abcdef")
        assert file.read_at(2, 3) == b"cde"
        assert names_in(tmp_path) == sorted(kept)


async def test_a_place_is_free_again_when_its_caller_has_gone(rpcs: Rpcs) -> None:
    await fill(rpcs, 3)
    for _ in range(contract.SNAPSHOTS_MAX + 2):
        async for _ in snapshot(rpcs.channel):
            pass
