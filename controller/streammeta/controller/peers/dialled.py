"""Dialled connection: sends requests to one address of a peer and matches their answers.

Requests wait until the listener has answered the hello. All have the same time limit, so a single
timer, for the oldest, serves all of them. When it expires the whole connection ends, because TCP
keeps retrying an old connection for minutes after a network cut has healed. The limit starts again
with the last progress, once per request. Time in which this process did not run does not count.
Every end is reported once, with the requests that stay unanswered.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol

from streammeta.controller.errors import InvalidRequestError
from streammeta.controller.features import UNTOLD, Software
from streammeta.controller.ids import ClusterId, NodeId
from streammeta.controller.peers import frames
from streammeta.controller.peers.connection import FramedConnection, Patience, ProtocolError
from streammeta.controller.peers.hello import Hello, HelloAnswer, HelloError, Purpose, Refusal
from streammeta.controller.peers.wire import ANSWER_KINDS, decode_answer, encode_request
from streammeta.controller.quorum.messages import Request, Response
from streammeta.controller.runtime.interfaces import Endpoints
from streammeta.controller.tls.manager import PeerTls, StrangerError

IN_FLIGHT_MAX = 32
"""Maximum number of requests in flight on a connection: one of each kind, and abandoned ones."""

OUTPUT_BYTES_MAX = 1 << 20
"""Maximum queued request bytes. Beyond them a request fails immediately."""

_LATE_S = 0.5
"""Delay of a timer above which received data is read before anything is given up."""


class End(Enum):
    """Reason for the end of a connection."""

    REFUSED = auto()
    """The host refused it, because no process listens there."""
    UNREACHABLE = auto()
    """It could not be established, or broke before the hello was answered."""
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
    """The intended peer of a connection, and the address in use."""

    peer: NodeId
    endpoint: str
    purpose: Purpose


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of this controller in its hellos.

    Clients reach it at `client_endpoint`, clients with tokens at `token_endpoint`.
    """

    cluster_id: ClusterId
    node_id: NodeId
    client_endpoint: str = ""
    software: Software = UNTOLD
    token_endpoint: str = ""


class Caller(Protocol):
    """Receiver of a dialled connection's outcomes."""

    def on_greeted(self, place: Place, token_endpoint: str) -> None:
        """Record where clients with tokens reach the peer, empty if nowhere or unknown."""
        ...

    def on_answer(self, place: Place, response: Response, leader: Endpoints) -> None:
        """Process an answer."""
        ...

    def on_failure(self, place: Place, request: Request, reason: str) -> None:
        """Record that the peer does not answer this request, or answered with a failure."""
        ...

    def on_ended(self, connection: DialledConnection, end: End, unanswered: list[Request]) -> None:
        """Record that the connection has ended, with its unanswered requests."""
        ...


class _Call(NamedTuple):
    request: Request
    answer_kind: frames.FrameKind
    asked_at: float


class DialledConnection(FramedConnection):
    """Connection for requests to one peer, from the first attempt to connect."""

    def __init__(
        self,
        place: Place,
        identity: Identity,
        caller: Caller,
        patience: Patience,
        version: int,
        tls: PeerTls,
    ) -> None:
        """`version` is the hello's, and the highest one used on the connection."""
        super().__init__(frames.HELLO_ANSWER_ONLY, OUTPUT_BYTES_MAX)
        self.place = place
        self.version = version
        self.detail = ""
        """Reason of the end for the log, empty if the kind of end says enough."""
        self.reason = ""
        """Further details of a mismatch."""
        self._identity = identity
        self._tls = tls
        self._caller = caller
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._is_reached = False
        """Whether the peer's host has accepted the connection."""
        self._is_ready = False
        self._is_retired = False
        self._calls: dict[int, _Call] = {}
        self._last_call_id = 0
        self.dialled_at = self._last_used = self._progress_at = self._loop.time()
        self._waiting: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    async def dial(self) -> None:
        """Connect. The outcome is reported like every other."""
        host, _, port = self.place.endpoint.rpartition(":")
        context = self._tls.dialling
        try:
            opened = await _connect(host.strip("[]"), int(port))
            self._is_reached = True
            self._note_progress()
            # asyncio allows a server name only with TLS.
            name = None if context is None else host.strip("[]")
            await self._loop.create_connection(
                lambda: self, sock=opened, ssl=context, server_hostname=name
            )
        except OSError as error:
            self.detail = str(error) if isinstance(error, ssl.SSLError) else ""
            self._end(End.REFUSED if _is_refused(error) else End.UNREACHABLE)

    def ask(self, request: Request) -> bool:
        """Send a request once the hello is answered. Returns whether there was room for it."""
        # The caller hears of a missing slot at once, because the quorum has its own retries.
        if self.is_closed or self.is_congested or len(self._calls) >= IN_FLIGHT_MAX:
            return False
        kind, parts = encode_request(request)
        self._last_call_id += 1
        self._last_used = self._loop.time()
        self._calls[self._last_call_id] = _Call(request, ANSWER_KINDS[kind], self._last_used)
        frame = frames.seal(kind, self._last_call_id, parts)
        # Before the answer to the hello the other side's identity is unknown.
        if self._is_ready:
            self.write(frame)
        else:
            self._waiting.append(frame)
        # One timer for the oldest request: answers come nearly in order, and timers cost.
        if self._timer is None:
            self._set_timer(self._last_used + self._limit_s)
        return True

    def retire(self) -> None:
        """Close once the requests in flight have ended."""
        self._is_retired = True
        if not self._calls:
            self._end(End.CLOSED)

    def shut(self) -> None:
        """Close immediately."""
        self._end(End.CLOSED)

    def reauthorize(self) -> None:
        """Close the connection if the peer's certificate names another controller, or is denied."""
        if self._transport is None:
            return
        try:
            certified = self._tls.controller_at(self._transport, self._identity.cluster_id)
        except StrangerError as error:
            self._end_as_stranger(str(error))
            return
        # None is plain text, where no certificate names anyone.
        if certified not in (None, self.place.peer):
            self._end_as_stranger(f"its certificate belongs to controller {certified}")

    # -- events of the connection

    def data_received(self, data: bytes) -> None:
        """Handle the frames completed by these bytes, and record the progress."""
        self._note_progress()
        super().data_received(data)

    def on_connected(self) -> None:
        """Send the hello, if the certificate belongs to the intended controller."""
        self._note_progress()
        self.reauthorize()
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
        self.write(frames.seal(frames.FrameKind.HELLO, 0, [hello.encoded()]))

    def on_frame(self, frame: frames.Frame) -> None:
        """Handle the answer to the hello or to a request."""
        if not self._is_ready:
            self._on_hello(frame.payload)
            return
        call = self._calls.pop(frame.call_id, None)
        if call is None:
            raise ProtocolError(
                f"{frame.kind.name} answers call {frame.call_id}, which is not waiting"
            )
        # Any received byte is progress, so that a large answer over a slow link counts as in time.
        self._patience.record_answer(self._progress_at - call.asked_at)
        self._on_answer(call, frame)
        if self._is_retired and not self._calls:
            self._end(End.CLOSED)

    def on_broken(self, reason: str) -> None:
        """End the connection."""
        self.detail = reason
        self._end(End.BROKEN)

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end, unless this side closed the connection."""
        if self.is_closed:
            return
        if not self._is_ready:
            reason = str(exc) if isinstance(exc, ssl.SSLError) else "hello not answered"
            self.detail = f"{reason} (do both sides use TLS?)"
            self._end(End.UNREACHABLE)
        # Reset or closed: the peer's kernel runs, so its process has probably ended.
        elif exc is None or isinstance(exc, ConnectionError):
            self._end(End.LOST)
        else:  # TCP gave up because the host does not answer
            self._end(End.SILENT)

    def _end_as_stranger(self, reason: str) -> None:
        self.detail, self.reason = STRANGER, reason
        self._end(End.MISMATCH)

    def _on_hello(self, payload: bytes) -> None:
        try:
            answer = HelloAnswer.decoded(payload)
        except HelloError as error:
            raise ProtocolError(str(error)) from None
        if (
            mismatch := _find_mismatch(answer, self._identity.cluster_id, self.place.peer)
        ) is not None:
            self.detail = mismatch
            self._end(End.MISMATCH)
            return
        self._is_ready = True
        self._caller.on_greeted(self.place, answer.token_endpoint)
        self.parser.expect(frames.ANSWERS)
        # In their order, because the listener rejects descending call ids.
        for frame in self._waiting:
            self.write(frame)
        self._waiting.clear()

    def _on_answer(self, call: _Call, frame: frames.Frame) -> None:
        if frame.kind is frames.FrameKind.FAILURE:
            reason = frame.payload.decode(errors="replace")
            self._caller.on_failure(self.place, call.request, reason)
            return
        if frame.kind is not call.answer_kind:
            self._calls[frame.call_id] = call  # reported with the other unanswered ones
            raise ProtocolError(f"expected {call.answer_kind.name}, received {frame.kind.name}")
        try:
            response, leader = decode_answer(frame.kind, frame.payload)
        except InvalidRequestError as error:
            self._caller.on_failure(self.place, call.request, f"bad answer: {error}")
            return
        self._caller.on_answer(self.place, response, leader)

    # -- time and the end

    @property
    def _limit_s(self) -> float:
        """Time limit of a request. It only grows with a peer whose host is up."""
        return self._patience.limit_s if self._is_reached else self._patience.base_s

    def _note_progress(self) -> None:
        self._progress_at = self._loop.time()

    def _set_timer(self, at: float) -> None:
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._on_time)

    def _deadline(self, call: _Call) -> float:
        """Return a request's deadline: its limit, extended once by later progress."""
        limit_s = self._limit_s
        return min(max(call.asked_at, self._progress_at), call.asked_at + limit_s) + limit_s

    def _on_time(self) -> None:
        """End the connection if the oldest request is overdue, or an idle bulk connection."""
        self._timer = None
        now = self._loop.time()
        if now - self._timer_at > _LATE_S:
            # The process did not run. An answer may already be in the socket's buffer.
            self._set_timer(now + self._patience.base_s / 2)
            return

        oldest = next(iter(self._calls.values()), None)
        if oldest is not None:
            # Requests were answered since the timer was set, or bytes of the oldest answer arrived.
            if (deadline := self._deadline(oldest)) > now:
                self._set_timer(deadline)
                return
            # Only a host that accepts connections earns a longer limit. Others are down.
            if self._is_reached:
                self._patience.cut_off()
            self._end(End.SILENT)
        # Snapshots are rare. An idle control connection stays, because votes cannot wait for a
        # handshake.
        elif self.place.purpose is Purpose.BULK:
            if (idle_at := self._last_used + self._patience.base_s) > now:
                self._set_timer(idle_at)
            else:
                self._end(End.CLOSED)

    def _end(self, end: End) -> None:
        if self.is_closed:
            return
        # Closed first: the caller may dial or send again from on_ended.
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
"""Mismatches, which are also log events."""


def _find_mismatch(answer: HelloAnswer, cluster_id: ClusterId, peer: NodeId) -> str | None:
    """Return how an answer to a hello differs from the expected one."""
    if answer.refusal is Refusal.UNKNOWN_VERSION:
        return ANOTHER_VERSION
    if answer.refusal is Refusal.FOREIGN_CLUSTER or answer.cluster_id != cluster_id:
        return FOREIGN_CLUSTER
    if answer.refusal is Refusal.ANOTHER_NODE or answer.node_id != peer:
        return ANOTHER_NODE
    if answer.refusal is Refusal.CERTIFICATE_OF_ANOTHER:
        return REFUSED_CERTIFICATE
    return None


async def _connect(host: str, port: int) -> socket.socket:
    """Connect to the first address of a host that accepts.

    Raises:
        OSError: no address accepts.
    """
    loop = asyncio.get_running_loop()
    errors: list[OSError] = []
    # Connected here and not by asyncio, so that a reached host is known before the TLS handshake.
    for family, kind, protocol, _, address in await loop.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        opened = socket.socket(family, kind, protocol)
        opened.setblocking(False)
        try:
            await loop.sock_connect(opened, address)
        except OSError as error:
            opened.close()
            errors.append(error)
        # A cancelled attempt must not leak its socket.
        except BaseException:
            opened.close()
            raise
        else:
            return opened

    if len(errors) == 1:
        raise errors[0]

    raise OSError(", ".join(map(str, errors)))


def _is_refused(error: OSError) -> bool:
    """Whether the host refused. A name with several addresses has several errors."""
    # The joined error of several addresses has no errno of its own.
    text = f"[Errno {errno.ECONNREFUSED}]"
    return isinstance(error, ConnectionRefusedError) or text in str(error)
