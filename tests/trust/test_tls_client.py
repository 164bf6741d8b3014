"""Calls and streams go on, on another connection, when a client's certificates are replaced."""

from __future__ import annotations

import asyncio
from typing import Any

from streammeta.client.commits.messages import COMMITTED
from streammeta.client.commits.pipeline import CommitPipeline
from tests.broker_client.test_commit_pipeline import piped, upload
from tests.server.test_server_watch import changes, following, kv, nodes


def client_of(pipeline: CommitPipeline) -> Any:
    return pipeline._client


async def test_a_pipeline_goes_on_when_its_channel_is_renewed() -> None:
    async with piped(attempt=30.0) as (cluster, pipeline):
        channels = client_of(pipeline)._channels
        channels._grace_s = 0.0
        assert await (await pipeline.upload(upload(0, 0, 0))) == COMMITTED

        began, release = asyncio.Event(), asyncio.Event()

        async def wait(*_: Any) -> None:
            began.set()
            await release.wait()

        cluster.answer_hook = wait
        held = await pipeline.upload(upload(1, 0, 10))
        await began.wait()
        await channels._renew()
        release.set()
        assert await held == COMMITTED
        assert await (await pipeline.upload(upload(2, 0, 20))) == COMMITTED
        assert cluster.ends == {0: 30}


async def test_a_watch_goes_on_when_its_channel_is_renewed() -> None:
    async with nodes(1) as (node,):
        node.commit(kv("a"))
        async with following([node.endpoint]) as watch:
            events = changes(watch)
            assert (await anext(events)).offset == 0
            channels = watch._client._channels
            channels._grace_s = 0.0
            waiting = asyncio.create_task(anext(events))
            await channels._renew()
            node.commit(kv("b"))
            assert (await asyncio.wait_for(waiting, 60)).offset == 1
