"""A client that knows what became of each of its requests: done, certainly not, or unknown.

Owns channels and the reading of statuses. Unlike the product's client it repeats a request only
where the caller says that this is safe, because a check of what clients saw must know whether a
request was ever carried out twice.
"""

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass

import grpc

from streammeta.client.controllers.methods import Method, RequestT, ResponseT
from streammeta.rpc.connections import client_channel
from streammeta.rpc.failures import read_failure

ATTEMPT_S = 1.5
PAUSE_S = 0.02
_NEVER_SENT = "failed to connect to all addresses"


class NotDoneError(Exception):
    """The request was certainly not carried out."""


class OutcomeUnknownError(Exception):
    """The request may have been carried out, or may yet be."""


class DefectError(Exception):
    """A controller answered with a status that no fault explains."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a failed attempt means: it may have taken effect, and the leader (0: not said)."""

    may_have_happened: bool
    leader_id: int = 0


def judge(error: grpc.aio.AioRpcError) -> Verdict:
    """Read a failed attempt. Raises `DefectError` for what only a defect can bring about."""
    failure = read_failure(error)
    code, said = error.code(), error.details() or ""
    match code, failure.reason:
        case grpc.StatusCode.UNAVAILABLE, "NOT_LEADER":
            return Verdict(False, max(0, int(failure.metadata.get("leader_id", "0"))))
        case grpc.StatusCode.UNAVAILABLE, _ if said.startswith(_NEVER_SENT):
            return Verdict(False)
        case grpc.StatusCode.RESOURCE_EXHAUSTED, reason if reason:
            return Verdict(False)
        case (grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED, _):
            return Verdict(True)
        case (grpc.StatusCode.DEADLINE_EXCEEDED, _) | (grpc.StatusCode.ABORTED, "OUTCOME_UNKNOWN"):
            return Verdict(True)
        case grpc.StatusCode.INTERNAL | grpc.StatusCode.UNKNOWN, "":
            return Verdict(True)  # the transport's word, not a controller's
    raise DefectError(f"{code.name}: {said}")


class Channels:
    """Channels to controllers, by id. Make them on the event loop that uses them."""

    def __init__(self, endpoints: Mapping[int, str]) -> None:
        self._channels = {
            node_id: client_channel(endpoint) for node_id, endpoint in endpoints.items()
        }

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()


class ChaosClient(Channels):
    """Calls controllers by id, the one believed to lead first, at times any other."""

    def __init__(self, endpoints: Mapping[int, str], rng: random.Random) -> None:
        super().__init__(endpoints)
        self._rng = rng
        self._leader = 0

    async def attempt(
        self,
        node_id: int,
        method: Method[RequestT, ResponseT],
        request: RequestT,
        timeout_s: float = ATTEMPT_S,
    ) -> ResponseT:
        """Ask one controller, one time. Raises `grpc.aio.AioRpcError`."""
        send = self._channels[node_id].unary_unary(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        return await send(request, timeout=timeout_s)

    async def call(
        self,
        method: Method[RequestT, ResponseT],
        request: RequestT,
        within_s: float,
        *,
        may_repeat: bool = True,
    ) -> ResponseT:
        """Send `request` until it is answered; unless it `may_repeat`, carried out at most once.

        Raises:
            NotDoneError: within `within_s` seconds no controller took it.
            OutcomeUnknownError: a controller may have taken it.
            DefectError: see there.
        """
        deadline = time.monotonic() + within_s
        may_have_happened = False
        node_id = self._first()
        while True:
            try:
                answer = await self.attempt(node_id, method, request)
            except grpc.aio.AioRpcError as error:
                verdict = judge(error)
            else:
                self._leader = node_id
                return answer
            may_have_happened |= verdict.may_have_happened
            is_over = time.monotonic() >= deadline
            if may_have_happened and (is_over or not may_repeat):
                self._leader = 0
                raise OutcomeUnknownError(method.name)
            if is_over:
                raise NotDoneError(method.name)
            node_id = self._next(node_id, verdict.leader_id)
            await asyncio.sleep(PAUSE_S * self._rng.uniform(0.5, 1.5))

    def _first(self) -> int:
        """The believed leader; one time in eight any, which may believe to lead still."""
        if self._leader and self._rng.random() > 1 / 8:
            return self._leader
        return self._rng.choice(list(self._channels))

    def _next(self, failed: int, hinted: int) -> int:
        """The controller to ask after a failure: mostly the one said to lead."""
        if hinted in self._channels and hinted != failed and self._rng.random() < 0.7:
            return hinted
        return self._rng.choice([node_id for node_id in self._channels if node_id != failed])
