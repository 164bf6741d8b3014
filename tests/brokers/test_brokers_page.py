"""The shape that docs/brokers.md shows whole, as it is printed there, on real controllers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from streammeta.client import StreamClient
from streammeta.client.controllers.methods import PUT_KVS
from streammeta.client.errors import StreamNotClosedError
from streammeta.v1 import kv_pb2
from tests.kit.real_cluster import running_cluster

pytestmark = pytest.mark.process
_PAGE = Path(__file__).parents[2] / "docs" / "brokers.md"


def _blocks() -> list[str]:
    """Return the code of the page's section on a fourth shape."""
    section = _PAGE.read_text().partition("## A fourth shape")[2]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def _journals() -> Any:
    names: dict[str, Any] = {}
    exec(compile(_blocks()[0], str(_PAGE), "exec"), names)
    return names["Journals"]


async def test_the_example_runs_as_it_is_printed(tmp_path: Path) -> None:
    body = "".join(f"    {line}\n" for line in _blocks()[1].splitlines())
    names: dict[str, Any] = {"StreamClient": StreamClient, "Journals": _journals()}
    source = f"async def example(endpoints, bucket):\n{body}    return offset, records\n"
    exec(compile(source, str(_PAGE), "exec"), names)
    with running_cluster(tmp_path, 1) as cluster:
        offset, records = await names["example"](cluster.endpoints, cluster.store_uri)
    assert offset == 0
    assert [record.payload for record in records] == [b"it happened"]


async def test_journals_keep_what_they_promise(tmp_path: Path) -> None:
    journals_of = _journals()
    with running_cluster(tmp_path, 1) as cluster:
        where = (cluster.endpoints, cluster.store_uri)
        async with await StreamClient.open(*where, node_id=7, node_epoch=1) as first:
            one = journals_of(first)
            (stray,) = await first.create_streams([{"journal": "audit", "maker": "7"}])
            stream_id = await one.open("audit")
            for number in range(5):
                assert await first.append(stream_id, b"%d" % number) == number
            async with await StreamClient.open(*where, node_id=8) as other:
                rival = journals_of(other)
                assert await rival.sweep() == []
                with pytest.raises(StreamNotClosedError):
                    await rival.open("audit")
            await one.trim("audit", kept=2)
            kept = [record.payload async for record in first.iterate(stream_id)]
            assert kept == [b"3", b"4"]
        async with await StreamClient.open(*where, node_id=7, node_epoch=2) as client:
            again = journals_of(client)
            assert await again.sweep() == [stray]
            await again.delete("audit")
            await again.delete("audit")
            item = kv_pb2.KVToPut(key="audit", namespace="journals", value=b"%d" % stray)
            await client.controllers.call(PUT_KVS, kv_pb2.PutKVsRequest(items=[item]))
            anew = await again.open("audit")
            assert anew not in (stray, stream_id)
            assert await client.append(anew, b"anew") == 0
            assert [stream.stream_id async for stream in client.controllers.describe_streams()] == [
                anew
            ]
