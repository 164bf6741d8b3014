"""What the scenario tests share: a cluster, a client that sees all of it, and its leader."""

import asyncio
import contextlib
import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from streammeta.client.controllers import methods
from streammeta.v1 import common_pb2, kv_pb2
from streammeta.v1 import quorum_pb2 as pb
from tests.chaos.chaos_checks import check_healed
from tests.chaos.chaos_client import ATTEMPT_S, ChaosClient
from tests.chaos.chaos_cluster import CLUSTER_ID, ChaosCluster, wait_in_many_threads
from tests.chaos.chaos_watch import LeaderWatch
from tests.chaos.fault_proxy import Behaviour, Cut, Mode
from tests.kit.waiting import until

SOON_S = 60.0
"""How long a condition may take to come true."""


@dataclass(slots=True)
class Scene:
    """A cluster that serves, and its observers."""

    cluster: ChaosCluster
    client: ChaosClient
    watch: LeaderWatch

    async def leader(self) -> int:
        """The leader, as soon as there is one."""
        return await self.watch.wait_for_leader(SOON_S)

    async def put(self, key: str, value: str) -> None:
        answer = await self.client.call(methods.PUT_KVS, put_request(key, value), SOON_S)
        assert answer.results[0].error == common_pb2.ERROR_CODE_NONE

    async def put_through(self, node_id: int, key: str, value: str) -> None:
        """Put a value through one controller, which leads or is about to, and no other."""

        async def is_done() -> bool:
            try:
                await self.client.attempt(node_id, methods.PUT_KVS, put_request(key, value))
            except grpc.aio.AioRpcError:
                return False
            return True

        await until(is_done, f"controller {node_id} to acknowledge a write")

    async def get(self, key: str) -> str:
        answer = await self.client.call(methods.GET_KVS, get_request(key), SOON_S)
        return answer.results[0].value.decode()

    async def get_from(self, node_id: int, key: str, timeout_s: float = ATTEMPT_S) -> str | None:
        """Read a value from one controller; None if it does not answer with one."""
        try:
            answer = await self.client.attempt(
                node_id, methods.GET_KVS, get_request(key), timeout_s
            )
        except grpc.aio.AioRpcError:
            return None
        return answer.results[0].value.decode()

    def cut_off(self, node_id: int) -> Cut:
        """Begin to lose every byte between a controller and the others; clients still reach it."""
        others = [node for node in self.cluster.members if node != node_id]
        pairs = [(node_id, other) for other in others] + [(other, node_id) for other in others]
        cut = Cut(frozenset(pairs), Behaviour(Mode.DROP))
        self.cluster.network.cut(cut)
        return cut

    async def streammeta(self, *words: str) -> dict[str, Any]:
        """Run a command of the product as an operator would; return the JSON it prints."""
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "streammeta.cli.main", *words, "--format", "json"],
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, (
            f"streammeta {' '.join(words)}: exit code {done.returncode}: {done.stdout!r} "
            f"{done.stderr!r}"
        )
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    @property
    def connect(self) -> tuple[str, str]:
        """The option that tells commands where all controllers listen."""
        return "--connect", ",".join(self.cluster.direct_endpoints.values())

    async def quorum(self) -> pb.DescribeQuorumResponse | None:
        """The quorum as its leader sees it; None while there is none."""
        leader = await self.watch.ask()
        return None if leader is None else await self.watch.describe_quorum(leader)

    async def join(self, node_id: int) -> None:
        """Have a controller with an empty disk join, as documented, and wait until it votes."""
        formatted = await self.streammeta(
            *("storage", "format", "--join", "--node-id", str(node_id)),
            *("--cluster-id", CLUSTER_ID, "--data-dir", str(self.cluster.data_dir(node_id))),
        )
        directory_id = formatted["directory_id"]
        await self.cluster.start_node(node_id)

        async def is_observer() -> bool:
            view = await self.quorum()
            return view is not None and any(
                observer.key.directory_id == directory_id for observer in view.observers
            )

        await until(is_observer, f"controller {node_id} to fetch as an observer")
        await self.streammeta(
            *("quorum", "add-voter", *self.connect, "--node-id", str(node_id)),
            *("--endpoint", self.cluster.peer_endpoints[node_id]),
            *("--directory-id", directory_id),
        )

    async def remove(self, node_id: int) -> None:
        """Take a voter's vote away, as documented."""
        await self.streammeta("quorum", "remove-voter", *self.connect, "--node-id", str(node_id))

    async def voters(self) -> set[int]:
        """The voters by the word of the leader; waits for one."""
        told: set[int] = set()

        async def is_told() -> bool:
            view = await self.quorum()
            if view is not None:
                told.update(voter.key.node_id for voter in view.voters)
            return view is not None

        await until(is_told, "a leader to name the voters")
        return told

    async def check_healed(self, expected_in_logs: Sequence[str] = ()) -> None:
        """All maps are equal, no process ended by itself, no log tells of a defect."""
        await check_healed(self.cluster, expected_in_logs)


def put_request(key: str, value: str) -> kv_pb2.PutKVsRequest:
    """Put one value, whatever is there."""
    return kv_pb2.PutKVsRequest(
        items=[kv_pb2.KVToPut(key=key, value=value.encode(), overwrite=True)]
    )


def get_request(key: str) -> kv_pb2.GetKVsRequest:
    return kv_pb2.GetKVsRequest(keys=[kv_pb2.KVKey(key=key)])


@contextlib.asynccontextmanager
async def scene_in(
    root: Path,
    controllers: int = 3,
    first_voters: int = 0,
    node_options: Mapping[int, Sequence[str]] | None = None,
) -> AsyncIterator[Scene]:
    """Start controllers, wait until "key" is "first"; end everything with the block.

    Those beyond `first_voters` (0: none) are left to join.
    """
    wait_in_many_threads()
    cluster = ChaosCluster(root, controllers, first_voters, node_options=node_options or {})
    watch = LeaderWatch(cluster.direct_endpoints)
    client: ChaosClient | None = None
    try:
        await cluster.start()
        client = ChaosClient(cluster.client_endpoints, random.Random(1))
        scene = Scene(cluster, client, watch)
        await watch.wait_for_leader(SOON_S)
        await scene.put("key", "first")
        yield scene
    finally:
        if client is not None:
            await client.close()
        await watch.close()
        await cluster.close()
