"""Keys and watches of a client, against real controllers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client import EntityChange, KeyChange, KeyValue, StreamClient, ValueToPut, Watch
from streammeta.client.controllers.metadata_watch import MetadataWatch
from streammeta.client.errors import ChangesLostError, KeyConflictError

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def controllers() -> int:
    return 3


async def test_a_value_is_put_read_and_deleted(client: StreamClient) -> None:
    version = await client.kv.put("a", b"1")
    assert await client.kv.get("a") == KeyValue("a", b"1", version)
    assert await client.kv.get("a", namespace="other") is None
    assert await client.kv.put("a", b"2") > version
    await client.kv.delete("a")
    await client.kv.delete("a")  # an absent key is ignored
    assert await client.kv.get("a") is None


async def test_a_put_at_another_version_raises(client: StreamClient) -> None:
    version = await client.kv.put("b", b"1", expected_version=0)
    with pytest.raises(KeyConflictError, match="'b'"):
        await client.kv.put("b", b"2", expected_version=0)
    # The answer to an earlier attempt may be lost, so an equal value is a success.
    assert await client.kv.put("b", b"1", expected_version=0) == version
    changed = await client.kv.put("b", b"2", expected_version=version)
    with pytest.raises(KeyConflictError):
        await client.kv.delete("b", expected_version=version)
    await client.kv.delete("b", expected_version=changed)


async def test_batches_return_the_outcome_of_each_key(client: StreamClient) -> None:
    value = bytes(600_000)  # seven of them exceed one call and one answer
    items = [ValueToPut(key=f"c/{number}", value=value, namespace="n") for number in range(7)]
    results = await client.kv.put_many([*items, items[0]])
    assert [result.is_conflict for result in results] == [False] * 7 + [True]
    keys = [item.key for item in items]
    found = await client.kv.get_many([*keys, "absent"], namespace="n")
    assert found == {
        key: KeyValue(key, value, result.version)
        for key, result in zip(keys, results[:7], strict=True)
    }
    assert [pair.key async for pair in client.kv.list("c/", namespace="n")] == keys
    staying = await client.kv.delete_many({"c/0": 1, "c/1": None, "absent": None}, namespace="n")
    assert staying == {"c/0"}
    assert await client.kv.delete_many(keys, namespace="n") == set()


async def test_a_watch_yields_changes_of_keys_as_plain_values(client: StreamClient) -> None:
    async with client.watch(["key"], key_prefixes=[("", "w/")]) as changes:
        await client.kv.put("w/1", b"1")
        await client.kv.put("other", b"1")
        await client.kv.delete("w/1")
        put, deleted = [await anext(changes) for _ in range(2)]
        assert put == KeyChange(put.offset, "", "w/1", b"1")
        assert deleted == KeyChange(deleted.offset, "", "w/1", None)
        position = changes.position

    async with client.watch(["key"], from_offset=position) as later:
        await client.kv.put("w/2", b"2")
        found = await anext(later)
        assert isinstance(found, KeyChange)
        assert (found.key, found.value) == ("w/2", b"2")


async def test_a_watch_yields_the_events_of_a_stream(client: StreamClient) -> None:
    async with client.watch(["stream"]) as changes:
        stream = await client.create_stream()
        await stream.append(b"0")
        await stream.trim(1)
        await stream.delete()
        events = [await anext(changes) for _ in range(6)]
    assert all(isinstance(event, EntityChange) and event.id == stream.id for event in events)
    names = [event.event for event in events if isinstance(event, EntityChange)]
    assert names == ["created", "opened", "committed", "trimmed", "closed", "deleted"]


async def test_a_watch_yields_objects_and_nodes_if_asked(client: StreamClient) -> None:
    async with client.watch(["object", "node"]) as changes:
        stream = await client.create_stream()
        await stream.append(b"0")
        seen = set()
        async for change in changes:
            assert isinstance(change, EntityChange)
            seen.add((change.kind, change.event))
            if ("object", "committed") in seen:
                break
    assert {kind for kind, _ in seen} == {"object"}


async def test_a_cancelled_wait_loses_no_change(client: StreamClient) -> None:
    async with client.watch(["key"]) as changes:
        for number in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(changes), 0.05)
            await client.kv.put(f"x/{number}", b"")
            change = await anext(changes)
            assert isinstance(change, KeyChange)
            assert change.key == f"x/{number}"


async def test_a_watch_changes_its_controller(client: StreamClient, cluster: LocalCluster) -> None:
    async with client.watch(["key"]) as changes:
        await client.kv.put("y", b"1")
        await anext(changes)
        served_by = changes._watch.endpoint
        node_id = 1 + cluster.endpoints.index(served_by)
        cluster.children[node_id].kill()
        try:
            await client.kv.put("y", b"2")
            change = await anext(changes)
            assert isinstance(change, KeyChange)
            assert change.value == b"2"
            assert changes._watch.endpoint != served_by
        finally:
            cluster.start(node_id)


async def test_compacted_changes_raise(
    client: StreamClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ends(_: MetadataWatch) -> AsyncIterator[None]:
        return
        yield

    monkeypatch.setattr(MetadataWatch, "follow", ends)
    watch = Watch(client.controllers, from_offset=7)
    with pytest.raises(ChangesLostError, match="offset 7"):
        await anext(watch)


async def test_a_closed_watch_ends(client: StreamClient) -> None:
    watch = client.watch()
    async with watch:
        await client.kv.put("z", b"")
        await anext(watch)
    assert [change async for change in watch] == []
    with pytest.raises(ValueError, match="'streams'"):
        client.watch(["streams"])  # type: ignore[list-item]
