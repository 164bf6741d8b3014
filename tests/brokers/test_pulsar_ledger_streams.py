"""Native copies of ledgers over a client in memory: the order of their steps, and failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from streammeta.brokers.pulsar.formats.object_names import data_name
from streammeta.brokers.pulsar.formats.read_errors import NoSuchLedgerError
from streammeta.brokers.pulsar.ledger_streams import COPY_TAG, MANAGED_LEDGER_TAG, LedgerStreams
from streammeta.client import KeyValues
from streammeta.client.controllers.methods import DELETE_KVS, GET_KVS, PUT_KVS
from streammeta.client.errors import KeyConflictError, StreamFencedError
from streammeta.v1 import common_pb2, kv_pb2
from tests.conformance.pulsar_formats import UUID
from tests.conformance.pulsar_offload import LEDGER, MemoryLedger

NAME = data_name(UUID, LEDGER)
KEY = f"ml/{NAME}"


@dataclass
class Stream:
    tags: Mapping[str, str]
    epoch: int | None = None
    is_open: bool = False
    records: list[bytes] = field(default_factory=list)


class Cluster:
    """Streams and keys, and the client of a node; calls in `fails` are refused."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.keys: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.fails: set[str] = set()
        controllers = SimpleNamespace(
            call=self.call, describe_streams=self.describe, pages=self.pages
        )
        self.client: Any = SimpleNamespace(
            create_streams=self.create_streams,
            open_streams=self.open_streams,
            close_streams=self.close_streams,
            writer=SimpleNamespace(
                append_many=self.append_many, flush=self.flush, detach=lambda _: None
            ),
            controllers=controllers,
            kv=KeyValues(cast(Any, controllers)),
            session=SimpleNamespace(
                open_streams=self.open_streams,
                close_streams=self.close_streams,
                delete_streams=self.delete_streams,
            ),
        )

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.fails:
            raise StreamFencedError(call)

    async def create_streams(self, tags: Sequence[Mapping[str, str]]) -> list[int]:
        self.note("create")
        first = len(self.streams)
        for at, tag in enumerate(tags):
            self.streams[first + at] = Stream(tag)
        return list(range(first, first + len(tags)))

    async def open_streams(self, ids: Mapping[int, int]) -> Any:
        self.note("open")
        for stream_id, epoch in ids.items():
            self.streams[stream_id].is_open, self.streams[stream_id].epoch = True, epoch
        return SimpleNamespace(require_all=lambda: None)

    async def close_streams(self, ids: Any) -> Any:
        self.note("close")
        for stream_id in ids:
            self.streams[stream_id].is_open = False
        return SimpleNamespace(require_all=lambda: None)

    async def delete_streams(self, ids: Any) -> Any:
        self.note("delete")
        for stream_id in ids:
            assert not self.streams.pop(stream_id).is_open
        return SimpleNamespace(require_all=lambda: None)

    async def append_many(self, stream_id: int, payloads: Sequence[bytes]) -> Any:
        self.note("append")
        self.streams[stream_id].records += payloads
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if "commit" in self.fails:
            future.set_exception(StreamFencedError("commit"))
        else:
            future.set_result(0)
        return future

    async def flush(self) -> None:
        self.note("flush")

    async def describe(self, ids: Sequence[int] | None = None) -> AsyncIterator[Any]:
        for id_ in list(self.streams) if ids is None else ids:
            if id_ in self.streams:
                stream = self.streams[id_]
                yield SimpleNamespace(
                    stream_id=id_, epoch=stream.epoch, is_open=stream.is_open, tags=stream.tags
                )

    async def pages(self, _: Any, request: Any) -> AsyncIterator[Any]:
        found = [key for key in self.keys if key.startswith(request.prefix)]
        yield kv_pb2.ListKVsResponse(entries=[kv_pb2.KVEntry(key=key) for key in found])

    async def call(self, method: Any, request: Any) -> Any:
        if method is GET_KVS:
            key = request.keys[0].key
            value = self.keys.get(key)
            result = kv_pb2.KVResult(found=value is not None, value=value or b"", version=1)
            return kv_pb2.GetKVsResponse(results=[result])
        if method is DELETE_KVS:
            self.note("delete key")
            self.keys.pop(request.keys[0].key, None)
            return kv_pb2.DeleteKVsResponse(results=[kv_pb2.KVResult()])
        assert method is PUT_KVS
        (item,) = request.items
        self.note("complete" if b"metadata" in item.value else "put")
        if (item.key in self.keys) != bool(item.expected_version):
            known = kv_pb2.KVResult(
                error=common_pb2.ERROR_CODE_KEY_EXIST,
                value=self.keys.get(item.key, b""),
                version=int(item.key in self.keys),
            )
            return kv_pb2.PutKVsResponse(results=[known])
        self.keys[item.key] = item.value
        return kv_pb2.PutKVsResponse(results=[kv_pb2.KVResult(version=1)])


def a_ledger() -> MemoryLedger:
    return MemoryLedger(LEDGER, [b"%d" % at for at in range(5)])


async def test_a_copy_counts_as_whole_only_after_its_stream_is_closed() -> None:
    cluster = Cluster()
    copies = LedgerStreams(cluster.client, "ml")
    await copies.offload(a_ledger(), UUID, {})
    assert cluster.calls == ["create", "put", "open", "append", "flush", "close", "complete"]
    assert cluster.streams[0].records == [b"0", b"1", b"2", b"3", b"4"]
    assert (await copies.open(LEDGER, UUID)).metadata.last_entry == 4


@pytest.mark.parametrize("failing", ["put", "open", "append", "flush", "commit", "complete"])
async def test_an_offload_that_fails_leaves_neither_stream_nor_key(failing: str) -> None:
    cluster = Cluster()
    cluster.fails = {failing}
    copies = LedgerStreams(cluster.client, "ml")
    with pytest.raises(StreamFencedError):
        await offload_once(cluster, copies)
    assert cluster.streams == {}
    assert cluster.keys == {}


async def offload_once(cluster: Cluster, copies: LedgerStreams) -> None:
    """Offload, with calls that fail only the first time, so that the clean-up succeeds."""
    note = cluster.note

    def note_once(call: str) -> None:
        try:
            note(call)
        except StreamFencedError:
            cluster.fails.discard(call)
            raise

    cluster.note = note_once  # type: ignore[method-assign]
    await copies.offload(a_ledger(), UUID, {})


async def test_a_half_made_copy_is_not_read_and_goes_later() -> None:
    """Its process died: the key names the stream, and says that it is not whole."""
    cluster = Cluster()
    copies = LedgerStreams(cluster.client, "ml")
    cluster.fails = {"close", "delete", "delete key"}
    with pytest.raises(StreamFencedError):
        await copies.offload(a_ledger(), UUID, {})
    cluster.fails = set()
    later = LedgerStreams(cluster.client, "ml")
    with pytest.raises(NoSuchLedgerError):
        await later.open(LEDGER, UUID)
    assert await later.list_copies() == [(LEDGER, UUID)]
    await later.delete(LEDGER, UUID)
    assert (cluster.streams, cluster.keys) == ({}, {})
    await later.delete(LEDGER, UUID)


async def test_the_key_stays_until_the_stream_is_deleted() -> None:
    cluster = Cluster()
    copies = LedgerStreams(cluster.client, "ml")
    await copies.offload(a_ledger(), UUID, {})
    cluster.fails = {"delete"}
    with pytest.raises(StreamFencedError):
        await copies.delete(LEDGER, UUID)
    assert list(cluster.keys) == [KEY]
    cluster.fails = set()
    await copies.delete(LEDGER, UUID)
    assert (cluster.streams, cluster.keys) == ({}, {})


async def test_streams_without_a_key_are_found_by_tags_and_those_of_others_are_not() -> None:
    cluster = Cluster()
    tags = [
        {MANAGED_LEDGER_TAG: "ml", COPY_TAG: NAME},
        {MANAGED_LEDGER_TAG: "another", COPY_TAG: data_name(UUID, 77)},
        {MANAGED_LEDGER_TAG: "ml", COPY_TAG: "no copy's name"},
        {COPY_TAG: data_name(UUID, 78)},
        {"topic": "t"},
    ]
    await cluster.create_streams(tags)
    copies = LedgerStreams(cluster.client, "ml")
    assert await copies.list_copies() == [(LEDGER, UUID)]
    await copies.delete(LEDGER, UUID)
    assert sorted(cluster.streams) == [1, 2, 3, 4]


async def test_a_copy_that_another_began_under_the_name_is_not_taken_over() -> None:
    cluster = Cluster()
    cluster.keys[KEY] = b'{"stream":99}'
    with pytest.raises(KeyConflictError):
        await LedgerStreams(cluster.client, "ml").offload(a_ledger(), UUID, {})


async def test_a_key_whose_put_was_answered_late_is_the_own_one() -> None:
    cluster = Cluster()
    cluster.keys[KEY] = b'{"stream":0}'  # by the first attempt of the call
    await LedgerStreams(cluster.client, "ml").offload(a_ledger(), UUID, {})
    assert b"metadata" in cluster.keys[KEY]
