"""Dialled connection: sends requests to one address of a peer and matches their answers.

Requests wait until the listener has answered the hello. All have the same time limit, so that one
timer, for the oldest, serves them all; when one passes, the whole connection ends, for TCP tries
an old connection for minutes after a cut has healed. Reports every end once, with the requests that
get no answer any more.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol

from streammeta.controller.errors import InvalidRequestError
from streammeta.controller.features import UNTOLD, Software
from streammeta.controller.ids import ClusterId, NodeId
from streammeta.controller.peers.connection import FramedConnection, ProtocolError
from streammeta.controller.peers.frames import (
    ANSWERS,
    HELLO_ANSWER_ONLY,
    Frame,
    FrameKind,
    seal,
)
from streammeta.controller.peers.hello import Hello, HelloAnswer, HelloError, Purpose, Refusal
from streammeta.controller.peers.tls import PeerTls, StrangerError
from streammeta.controller.peers.wire import ANSWER_KINDS, decode_answer, encode_request
from streammeta.controller.quorum.messages import Request, Response
from streammeta.controller.runtime.interfaces import Endpoints

IN_FLIGHT_MAX = 32
"""Maximum number of requests in flight on a connection: one of each kind, and those given up."""

OUTPUT_BYTES_MAX = 1 << 20
"""Bytes of requests that may wait to leave; with more a request fails at once."""


class End(Enum):
    """Reason for which a connection ended."""

    REFUSED = auto()
    """The host refused it: no process listens there."""
    UNREACHABLE = auto()
    """It could not be made, or broke before the hello was answered."""
    MISMATCH = auto()
    """Another node, cluster or version answered."""
    SILENT = auto()
    """A request was not answered in time."""
    LOST = auto()
    """The peer reset or closed it."""
    BROKEN = auto()
    """The peer broke the protocol."""
    CLOSED = auto()
    """This side closed it."""


class Place(NamedTuple):
    """The peer that a connection is meant for, and the address in use."""

    peer: NodeId
    endpoint: str
    purpose: Purpose


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of this controller in its hellos.

    `client_endpoint` is where clients reach it, `token_endpoint` where those with tokens do.
    """

    cluster_id: ClusterId
    node_id: NodeId
    client_endpoint: str = ""
    software: Software = UNTOLD
    token_endpoint: str = ""


class Caller(Protocol):
    """Receiver of the outcomes of a dialled connection."""

    def on_greeted(self, place: Place, token_endpoint: str) -> None:
        """Take where clients with tokens reach the peer; empty: nowhere, or not told."""
        ...

    def on_answer(self, place: Place, response: Response, leader: Endpoints) -> None:
        """Take an answer."""
        ...

    def on_failure(self, place: Place, request: Request, reason: str) -> None:
        """Note that the peer does not answer this request, or not with an answer."""
        ...

    def on_ended(self, connection: DialledConnection, end: End, unanswered: list[Request]) -> None:
        """Note that the connection has ended, with the requests that it leaves."""
        ...


class _Call(NamedTuple):
    request: Request
    answer_kind: FrameKind
    deadline: float


class DialledConnection(FramedConnection):
    """Connection for requests to one peer, from the attempt to make it on."""

    def __init__(
        self,
        place: Place,
        identity: Identity,
        caller: Caller,
        timeout_ms: int,
        version: int,
        tls: PeerTls,
    ) -> None:
        """`version` is that of the hello, and the highest that is spoken."""
        super().__init__(HELLO_ANSWER_ONLY, OUTPUT_BYTES_MAX)
        self.place = place
        self.version = version
        self.detail = ""
        """Words for the reason of the end, for the log; empty if it speaks for itself."""
        self.reason = ""
        """More words for a mismatch."""
        self._identity = identity
        self._tls = tls
        self._caller = caller
        self._timeout_s = timeout_ms / 1000
        self._loop = asyncio.get_running_loop()
        self._is_ready = False
        self._is_retired = False
        self._calls: dict[int, _Call] = {}
        self._last_call_id = 0
        self.dialled_at = self._last_used = self._loop.time()
        self._waiting: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None

    async def dial(self) -> None:
        """Connect; the outcome is reported as every other."""
        host, _, port = self.place.endpoint.rpartition(":")
        try:
            await self._loop.create_connection(
                lambda: self, host.strip("[]"), int(port), ssl=self._tls.dialling
            )
        except OSError as error:
            self.detail = str(error) if isinstance(error, ssl.SSLError) else ""
            self._end(End.REFUSED if _is_refused(error) else End.UNREACHABLE)

    def ask(self, request: Request) -> bool:
        """Send a request, once the hello is answered; return whether there was room for it."""
        if self.is_closed or self.is_congested or len(self._calls) >= IN_FLIGHT_MAX:
            return False
        kind, parts = encode_request(request)
        self._last_call_id += 1
        self._last_used = self._loop.time()
        deadline = self._last_used + self._timeout_s
        self._calls[self._last_call_id] = _Call(request, ANSWER_KINDS[kind], deadline)
        frame = seal(kind, self._last_call_id, parts)
        if self._is_ready:
            self.write(frame)
        else:
            self._waiting.append(frame)
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._on_time)
        return True

    def retire(self) -> None:
        """Close once the requests in flight have ended."""
        self._is_retired = True
        if not self._calls:
            self._end(End.CLOSED)

    def shut(self) -> None:
        """Close at once."""
        self._end(End.CLOSED)

    def judge(self) -> None:
        """End the connection if the certificate at its other end is not the peer's, or denied."""
        if self._transport is None:
            return
        try:
            certified = self._tls.controller_at(self._transport, self._identity.cluster_id)
        except StrangerError as error:
            self._end_as_stranger(str(error))
            return
        if certified not in (None, self.place.peer):
            self._end_as_stranger(f"its certificate is that of controller {certified}")

    # -- events of the connection

    def on_connected(self) -> None:
        """Send the hello, to the controller that the certificate names."""
        self.judge()
        if self.is_closed:
            return
        hello = Hello(
            self._identity.cluster_id,
            self._identity.node_id,
            self.place.peer,
            self.place.purpose,
            self._identity.client_endpoint,
            self._identity.software,
            self.version,
        )
        self.write(seal(FrameKind.HELLO, 0, [hello.encoded()]))

    def on_frame(self, frame: Frame) -> None:
        """Take the answer to the hello, or to a request."""
        if not self._is_ready:
            self._on_hello(frame.payload)
            return
        call = self._calls.pop(frame.call_id, None)
        if call is None:
            raise ProtocolError(f"{frame.kind.name} to call {frame.call_id}, which does not wait")
        self._on_answer(call, frame)
        if self._is_retired and not self._calls:
            self._end(End.CLOSED)

    def on_broken(self, reason: str) -> None:
        """End the connection."""
        self.detail = reason
        self._end(End.BROKEN)

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end, unless this side made it."""
        if self.is_closed:
            return
        if not self._is_ready:
            reason = str(exc) if isinstance(exc, ssl.SSLError) else "hello not answered"
            self.detail = f"{reason}; do both sides speak TLS?"
            self._end(End.UNREACHABLE)
        elif exc is None or isinstance(exc, ConnectionError):
            self._end(End.LOST)
        else:  # TCP gave up on a host that does not answer
            self._end(End.SILENT)

    def _end_as_stranger(self, reason: str) -> None:
        self.detail, self.reason = STRANGER, reason
        self._end(End.MISMATCH)

    def _on_hello(self, payload: bytes) -> None:
        try:
            answer = HelloAnswer.decoded(payload)
        except HelloError as error:
            raise ProtocolError(str(error)) from None
        if (mismatch := _mismatch(answer, self._identity.cluster_id, self.place.peer)) is not None:
            self.detail = mismatch
            self._end(End.MISMATCH)
            return
        self._is_ready = True
        self._caller.on_greeted(self.place, answer.token_endpoint)
        self.parser.expect(ANSWERS)
        for frame in self._waiting:
            self.write(frame)
        self._waiting.clear()

    def _on_answer(self, call: _Call, frame: Frame) -> None:
        if frame.kind is FrameKind.FAILURE:
            reason = frame.payload.decode(errors="replace")
            self._caller.on_failure(self.place, call.request, reason)
            return
        if frame.kind is not call.answer_kind:
            self._calls[frame.call_id] = call  # it ends with the others
            raise ProtocolError(f"{frame.kind.name} came for {call.answer_kind.name}")
        try:
            response, leader = decode_answer(frame.kind, frame.payload)
        except InvalidRequestError as error:
            self._caller.on_failure(self.place, call.request, f"bad answer: {error}")
            return
        self._caller.on_answer(self.place, response, leader)

    # -- time and the end

    def _on_time(self) -> None:
        """End the connection if the oldest request has waited too long, or bulk is idle."""
        self._timer = None
        now = self._loop.time()
        oldest = next(iter(self._calls.values()), None)
        if oldest is not None:
            if oldest.deadline <= now:
                self._end(End.SILENT)
            else:
                self._timer = self._loop.call_at(oldest.deadline, self._on_time)
        elif self.place.purpose is Purpose.BULK:
            if self._last_used + self._timeout_s <= now:
                self._end(End.CLOSED)
            else:
                self._timer = self._loop.call_at(self._last_used + self._timeout_s, self._on_time)

    def _end(self, end: End) -> None:
        if self.is_closed:
            return
        self.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        unanswered = [call.request for call in self._calls.values()]
        self._calls.clear()
        self._waiting.clear()
        self._caller.on_ended(self, end, unanswered)


FOREIGN_CLUSTER = "peer_is_of_another_cluster"
ANOTHER_NODE = "wrong_peer_answers"
ANOTHER_VERSION = "peer_speaks_another_version"
STRANGER = "peer_shows_a_certificate_of_another"
REFUSED_CERTIFICATE = "peer_refuses_our_certificate"
"""Mismatches, which are also events of the log."""


def _mismatch(answer: HelloAnswer, cluster_id: ClusterId, peer: NodeId) -> str | None:
    """Return in what an answer to a hello differs from what was wanted."""
    if answer.refusal is Refusal.UNKNOWN_VERSION:
        return ANOTHER_VERSION
    if answer.refusal is Refusal.FOREIGN_CLUSTER or answer.cluster_id != cluster_id:
        return FOREIGN_CLUSTER
    if answer.refusal is Refusal.ANOTHER_NODE or answer.node_id != peer:
        return ANOTHER_NODE
    if answer.refusal is Refusal.CERTIFICATE_OF_ANOTHER:
        return REFUSED_CERTIFICATE
    return None


def _is_refused(error: OSError) -> bool:
    """Return whether the host refused; a name with several addresses has several errors."""
    text = f"[Errno {errno.ECONNREFUSED}]"
    return isinstance(error, ConnectionRefusedError) or text in str(error)
