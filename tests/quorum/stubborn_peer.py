"""A peer in a process of its own, to be killed and stopped: answers votes, never a Fetch.

Run as `python -m tests.quorum.stubborn_peer NODE_ID`; prints `ready HOST:PORT`.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc

from streammeta.v1 import quorum_pb2 as pb
from tests.kit.grpc_servers import started


class StubbornPeer:
    """Serves what tests of the transport need."""

    def __init__(self, node_id: int) -> None:
        self._node_id = node_id

    async def vote(self, request: pb.VoteRequest, _: Any) -> pb.VoteResponse:
        """Answer at once."""
        return pb.VoteResponse(header=answer_header(self._node_id, request.header))

    async def fetch(self, _: pb.FetchRequest, __: Any) -> pb.FetchResponse:
        """Never answer."""
        await asyncio.Event().wait()
        return pb.FetchResponse()


def answer_header(
    node_id: int, asked: pb.QuorumRequestHeader, **more: Any
) -> pb.QuorumResponseHeader:
    """Return the header of an answer by `node_id`."""
    return pb.QuorumResponseHeader(
        sender=node_id,
        receiver=asked.sender.node_id,
        incarnation=asked.incarnation,
        request_id=asked.request_id,
        **more,
    )


def _handlers(peer: StubbornPeer) -> grpc.GenericRpcHandler:
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        name: grpc.unary_unary_rpc_method_handler(
            handler,
            request_deserializer=request.FromString,
            response_serializer=lambda answer: answer.SerializeToString(),
        )
        for name, handler, request in (
            ("Vote", peer.vote, pb.VoteRequest),
            ("Fetch", peer.fetch, pb.FetchRequest),
        )
    }
    return grpc.method_handlers_generic_handler("streammeta.v1.QuorumService", methods)


async def _serve(node_id: int) -> None:
    peer = StubbornPeer(node_id)
    server, endpoint = await started(_handlers(peer))
    print(f"ready {endpoint}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
