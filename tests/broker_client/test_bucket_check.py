"""The check of a bucket: made once for all that wait, and made again after it failed."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from streammeta.client.bucket_check import BucketCheck
from streammeta.client.controller_client import ControllerClient
from streammeta.client.model import ClusterDescription, cluster_description
from streammeta.storage.bucket_marker import BucketMarker, create_marker
from streammeta.storage.errors import WrongBucketError
from streammeta.v1 import admin_pb2
from tests.kit.memory_store import MemoryObjectStore

NAMESPACE = "_streammeta_checked"


class Described:
    """A client of a cluster that says its UUID when it is let."""

    deadline_s = 30.0

    def __init__(self, cluster_uuid: str) -> None:
        self.cluster_uuid = cluster_uuid
        self.may_answer = asyncio.Event()
        self.asked = 0

    async def describe_cluster(self) -> ClusterDescription:
        self.asked += 1
        await self.may_answer.wait()
        answer = admin_pb2.DescribeClusterResponse(
            cluster_id="checked", cluster_uuid=self.cluster_uuid, object_namespace=NAMESPACE
        )
        return cluster_description(answer)


def check_of(client: Described) -> BucketCheck:
    store = MemoryObjectStore()
    marker = BucketMarker(
        cluster_id="checked", cluster_uuid="u-1", namespace=NAMESPACE, created_ms=1
    )
    create_marker(store, marker)
    return BucketCheck(cast(ControllerClient, cast(Any, client)), store, NAMESPACE)


async def test_all_that_wait_share_one_check_and_one_that_is_cancelled_ends_no_other() -> None:

    client = Described("u-1")
    check = check_of(client)
    waiting = [asyncio.create_task(check.passed()) for _ in range(20)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    client.may_answer.set()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(ended[0], asyncio.CancelledError)
    assert ended[1:] == [None] * 19
    await check.passed()
    assert client.asked == 1


async def test_a_check_that_failed_is_made_again_when_it_is_asked_for_again() -> None:

    client = Described("u-2")
    client.may_answer.set()
    check = check_of(client)
    ended = await asyncio.gather(*(check.passed() for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in ended] == [WrongBucketError] * 3
    assert client.asked == 1
    client.cluster_uuid = "u-1"
    await check.passed()
    assert client.asked == 2
