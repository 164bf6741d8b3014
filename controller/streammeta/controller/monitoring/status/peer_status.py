"""Client for the quorum descriptions of the other controllers.

Asks each at its address for clients, with this controller's certificate. Each has one second, so a
silent one does not hide the others. Channels stay open while they are used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc

from streammeta.rpc.connections import client_channel
from streammeta.rpc.failures import read_failure
from streammeta.tls.files import TlsContents
from streammeta.v1 import quorum_pb2 as pb
from streammeta.v1.quorum_pb2_grpc import QuorumServiceStub

TIMEOUT_S = 1.0
"""Time limit of a controller's answer, in seconds."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a controller, or the reason why there is none."""

    endpoint: str
    view: pb.DescribeQuorumResponse | None
    reason: str = ""


class PeerStatusClient:
    """Client that asks the other controllers."""

    def __init__(self, tls: Callable[[], TlsContents | None]) -> None:
        self._tls = tls
        self._made_with: TlsContents | None = None
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def ask(self, endpoints: Mapping[int, str]) -> Mapping[int, Answer]:
        """Ask all given controllers concurrently. They are given by id and address."""
        # Addresses change with the membership, and channels would pile up.
        await self._forget_channels(set(endpoints.values()))
        answers = await asyncio.gather(*(self._one(endpoint) for endpoint in endpoints.values()))
        return dict(zip(endpoints, answers, strict=True))

    async def close(self) -> None:
        """Close all channels."""
        await self._close(set(self._channels))

    async def _forget_channels(self, needed: set[str]) -> None:
        """Close unused channels, or all of them if the certificate has changed."""
        tls = self._tls()
        # A channel keeps the certificate it was made with, so all are made again.
        is_renewed, self._made_with = tls is not self._made_with, tls
        await self._close(set(self._channels) if is_renewed else self._channels.keys() - needed)

    async def _close(self, endpoints: set[str]) -> None:
        """Forget channels in one event loop turn, so that none is used, then close them."""
        for channel in [self._channels.pop(endpoint) for endpoint in endpoints]:
            await channel.close()

    async def _one(self, endpoint: str) -> Answer:
        # A voter that has never registered has no address for clients.
        if not endpoint:
            return Answer(endpoint, None, "its address for clients is not known")
        channel = self._channels.get(endpoint)
        if channel is None:
            channel = self._channels[endpoint] = client_channel(endpoint, self._made_with)
        stub = QuorumServiceStub(channel)
        try:
            # The timeout is per controller, and all are asked at once, so the page waits 1 s at
            # most.
            view = await stub.DescribeQuorum(pb.DescribeQuorumRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            failure = read_failure(error, over_tls=self._made_with is not None)
            return Answer(endpoint, None, failure.text)
        return Answer(endpoint, view)
