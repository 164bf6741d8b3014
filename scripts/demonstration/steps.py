"""Calls of the demo to the public interfaces: client library, command line, bucket.

Each function does one thing to a running cluster and returns plain values.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from scripts.demonstration.callers import Caller
from scripts.demonstration.dataset import Dataset, digest_of_rows
from scripts.demonstration.s3_endpoint import BUCKET, S3Endpoint
from streammeta.cli.framework.client import CallError
from streammeta.client.parts import BrokerSession, StreamReader
from streammeta.storage.object_store.opening import open_object_store
from streammeta.v1 import admin_pb2, admin_pb2_grpc, common_pb2, kv_pb2, kv_pb2_grpc, objects_pb2
from streammeta.v1 import objects_pb2_grpc as objects_grpc

PAGE_SIZE = 1_000
CREATOR_NODE_ID = 1_000
"""Node id of the broker that creates the streams."""


def describe_cluster(caller: Caller) -> admin_pb2.DescribeClusterResponse:
    """Return the leader and the size of the metadata, from any controller."""
    with caller.operator() as client:
        return client.call(
            lambda channel: admin_pb2_grpc.AdminServiceStub(channel).DescribeCluster,
            admin_pb2.DescribeClusterRequest(),
        )


def wait_for_leader(caller: Caller, timeout_s: float = 30.0) -> int:
    """Return the leader's id once it is known."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        leader = describe_cluster(caller).leader_id
        if leader > 0:
            return leader
        time.sleep(0.05)
    raise TimeoutError(f"no leader among {', '.join(caller.endpoints)} within {timeout_s:.0f} s")


def wait_until(condition: Callable[[], bool], failure: str, timeout_s: float) -> None:
    """Return once `condition` holds.

    Raises:
        TimeoutError: it does not. The message begins with `failure`.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{failure} after {timeout_s:.0f} s")
        time.sleep(0.2)


def create_streams(caller: Caller, label: str, keys: Sequence[str]) -> dict[str, int]:
    """Create one stream for each key, tagged with it, as a broker, and return their ids."""

    async def create() -> list[int]:
        async with caller.client() as client:
            session = await BrokerSession.open(client, CREATOR_NODE_ID, 1)
            return await session.create_streams([{label: key} for key in keys])

    return dict(zip(keys, asyncio.run(create()), strict=True))


def acknowledged_write(caller: Caller) -> None:
    """Return when a small write is committed, and retry until a leader accepts it."""
    request = kv_pb2.PutKVsRequest(
        request_id=_request_id(),
        items=[kv_pb2.KVToPut(namespace="demo", key="probe", value=b"alive", overwrite=True)],
    )
    with caller.operator() as client:
        client.call(lambda channel: kv_pb2_grpc.KVServiceStub(channel).PutKVs, request)


def _request_id() -> str:
    return f"demo-{time.monotonic_ns()}"


def speak_for(caller: Caller, node_id: int, node_epoch: int) -> CallError:
    """Prepare an object in a node's name, and return the reason of the rejection.

    Raises:
        RuntimeError: the call succeeds.
    """
    try:
        prepare_object(caller, node_id, node_epoch)
    except CallError as refusal:
        return refusal
    raise RuntimeError(f"{caller.tls.certificate.name} could speak for node {node_id}")


def prepare_object(caller: Caller, node_id: int, node_epoch: int) -> int:
    """Prepare an object in a node's name, to be committed within a second, and return its id."""
    request = objects_pb2.PrepareObjectsRequest(request_id=_request_id(), count=1, ttl_ms=1_000)
    request.node.node_id, request.node.node_epoch = node_id, node_epoch
    with caller.operator() as client:
        answer = client.call(
            lambda channel: objects_grpc.ObjectServiceStub(channel).PrepareObjects, request
        )
    return answer.first_object_id


def object_states(caller: Caller, object_ids: Collection[int]) -> list[int]:
    """Return the state of each object, from the leader."""
    with caller.operator() as client:
        answer = client.call(
            lambda channel: objects_grpc.ObjectServiceStub(channel).CheckObjects,
            objects_pb2.CheckObjectsRequest(object_ids=object_ids),
        )
    return list(answer.states)


def wait_until_removed(caller: Caller, object_ids: Collection[int]) -> None:
    """Return once every object has expired, is deleted and forgotten."""
    _wait_until_in(caller, object_ids, {common_pb2.OBJECT_STATE_REMOVED})


def wait_until_expired(caller: Caller, object_ids: Collection[int]) -> None:
    """Return once every object has expired, even if its bytes are not deleted yet."""
    expired = {common_pb2.OBJECT_STATE_MARK_DESTROYED, common_pb2.OBJECT_STATE_REMOVED}
    _wait_until_in(caller, object_ids, expired)


def _wait_until_in(
    caller: Caller, object_ids: Collection[int], wanted: Collection[int], timeout_s: float = 120.0
) -> None:
    if not object_ids:
        return
    deadline = time.monotonic() + timeout_s
    while True:
        states = object_states(caller, object_ids)
        if all(state in wanted for state in states):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"objects {sorted(object_ids)} are in states {states} after {timeout_s:.0f} s"
            )
        time.sleep(0.2)


def objects_by_state(caller: Caller) -> dict[int, set[int]]:
    """List the ids of all objects in the metadata by state."""
    found: dict[int, set[int]] = {}
    request = objects_pb2.DescribeObjectsRequest()
    request.page.page_size = PAGE_SIZE
    with caller.operator() as client:
        while True:
            answer = client.call(
                lambda channel: objects_grpc.ObjectServiceStub(channel).DescribeObjects, request
            )
            for object_ in answer.objects:
                found.setdefault(object_.state, set()).add(object_.object_id)
            if not answer.next_page_token:
                return found
            request.page.page_token = answer.next_page_token


def named_objects(caller: Caller, prefix: str) -> dict[str, int]:
    """Return the sizes of all objects whose names begin with `prefix`, by name."""
    found: dict[str, int] = {}
    request = objects_pb2.DescribeNamedObjectsRequest(prefix=prefix)
    request.page.page_size = PAGE_SIZE
    with caller.operator() as client:
        while True:
            answer = client.call(
                lambda channel: objects_grpc.ObjectServiceStub(channel).DescribeNamedObjects,
                request,
            )
            found.update((object_.name, object_.object_size) for object_ in answer.objects)
            if not answer.next_page_token:
                return found
            request.page.page_token = answer.next_page_token


def wait_until_none_is_marked(caller: Caller, timeout_s: float = 60.0) -> None:
    """Return once the bytes of all replaced objects are deleted."""
    deadline = time.monotonic() + timeout_s
    while marked := objects_by_state(caller).get(common_pb2.OBJECT_STATE_MARK_DESTROYED):
        if time.monotonic() > deadline:
            raise TimeoutError(f"objects {sorted(marked)} are not deleted after {timeout_s:.0f} s")
        time.sleep(0.2)


def read_back(
    caller: Caller, store_uri: str, stream_ids: Mapping[str, int]
) -> tuple[int, dict[str, str]]:
    """Read every stream, and return the number of rows and each stream's digest by key."""

    async def read() -> tuple[int, dict[str, str]]:
        rows_read = 0
        digests: dict[str, str] = {}
        keys = {stream_id: key for key, stream_id in stream_ids.items()}
        async with caller.client() as client:
            namespace = await client.object_namespace()
            reader = StreamReader(client, open_object_store(store_uri), namespace)
            async for stream_id, records in reader.read_streams(list(keys)):
                rows = [row for record in records for row in record.payload.split(b"\n")]
                rows_read += len(rows)
                digests[keys[stream_id]] = digest_of_rows(rows)
            await reader.close()
        return rows_read, digests

    return asyncio.run(read())


def expected_digests(data: Dataset) -> dict[str, str]:
    """Return the digest of each stream's rows in the source."""
    return {key: digest_of_rows(rows) for key, rows in data.by_key().items()}


def bucket_keys(endpoint: S3Endpoint) -> set[str]:
    """List the bucket without the product."""
    pages = endpoint.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    return {item["Key"] for page in pages for item in page.get("Contents", ())}


def plant_foreign_key(endpoint: S3Endpoint, key: str) -> None:
    """Put an object into the bucket that does not belong to the cluster."""
    endpoint.client().put_object(Bucket=BUCKET, Key=key, Body=b"not an object of streammeta\n")


def reconcile_plan_words(place: Sequence[str], plan: str) -> list[str]:
    """Command that makes a plan. `place` contains --store and the connection."""
    return [
        *("reconcile", "plan", *place, "--plan", plan, "--format", "table"),
        *("--unsafe-grace", "0s", "--max-share", "0.5"),
    ]


def reconcile_apply_words(place: Sequence[str], plan: str) -> list[str]:
    """Command that applies the plan."""
    return ["reconcile", "apply", *place, "--plan", plan, "--format", "table", "--yes"]


def streammeta(arguments: Sequence[str], env: Mapping[str, str]) -> str:
    """Run the `streammeta` command like an operator, and return its output.

    Raises:
        RuntimeError: it failed. The message contains its output.
    """
    done = subprocess.run(
        [sys.executable, "-m", "streammeta.cli.main", *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"streammeta {' '.join(arguments)} ended with exit code {done.returncode}:\n"
            f"{done.stdout}{done.stderr}"
        )
    return done.stdout


def streammeta_json(arguments: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    """Run the command with `--format json` and return its object."""
    answer: dict[str, Any] = json.loads(streammeta([*arguments, "--format", "json"], env))
    return answer
