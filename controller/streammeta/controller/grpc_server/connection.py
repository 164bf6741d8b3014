"""Connection of one client: HTTP/2 over a transport, and the calls that use it.

Reads nothing while output waits in the transport, or while its frames wait for a turn, so its
memory is bounded. Ends when the client is silent, too old, or breaks the rules.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Hashable
from random import random
from typing import Protocol, cast

import grpc

from streammeta.controller.grpc_server import headers
from streammeta.controller.grpc_server.call import Call, Turns
from streammeta.controller.grpc_server.frames import ErrorCode, Http2Error
from streammeta.controller.grpc_server.http2_connection import Session
from streammeta.controller.grpc_server.limits import Limits
from streammeta.controller.grpc_server.method import Method
from streammeta.controller.grpc_server.outflow import BURST_BYTES
from streammeta.controller.grpc_server.refusals import busy, over_limit
from streammeta.controller.grpc_server.shares import Share
from streammeta.controller.grpc_server.stream import Stream
from streammeta.rpc.failures import TOO_MANY_CALLS
from streammeta.tls.server_certificates import PLAIN_TEXT, proven_by

OUTPUT_BYTES_MAX = 256 << 10
"""Bytes in the transport's buffer above which the connection stops writing and reading."""

_CLOSING_S = 1.0
"""Time for the last bytes to leave, in seconds."""

_AGE_SPREAD = 0.1
"""Share by which ages differ, so that connections made at once do not end at once."""


class ConnectionServer(Turns, Protocol):
    """The server of a connection, as the connection needs it."""

    limits: Limits
    connections: set[Connection]
    is_stopping: bool

    def method(self, path: str) -> Method | None:
        """Return the method at a path, None if there is none."""

    def ask(self, connection: Connection) -> None:
        """Do a connection's work now if the turn has room for it, else in a later one."""

    def wait_turn(self, connection: Connection) -> None:
        """Do a connection's work in a later turn."""


class Connection(asyncio.Protocol):
    """One connection."""

    def __init__(self, server: ConnectionServer, share: Share, host: str) -> None:
        """Take the part of its listener, and where the client is."""
        self.server = server
        self.share = share
        self.caller: Hashable = host
        """Certificate of the client, else its host. Connections of one caller take turns."""
        self.limits = limits = server.limits
        self.loop = asyncio.get_running_loop()
        self.session = Session(
            self,
            streams_max=limits.streams,
            stream_window=limits.lookahead_bytes,
            header_list_bytes=limits.header_list_bytes,
        )
        self.peer = ""
        """Address and port of the client, as gRPC writes them."""

        self.proven = PLAIN_TEXT
        """What its handshake has proven."""
        self._transport: asyncio.Transport | None = None
        self._held = 0
        self._is_working = self._is_waiting = self._is_full = self._is_reading_paused = False
        self._is_refill_due = self._is_held_up = False
        self._is_heard = False
        self._is_ending = self._is_closing = self._is_lost = False
        self._timers: set[asyncio.TimerHandle] = set()
        self._pulse: asyncio.TimerHandle | None = None

    # -- of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet the client."""
        # uvloop's transports are not a subclass.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=OUTPUT_BYTES_MAX)
        if (opened := transport.get_extra_info("socket")) is not None and opened.family in (
            socket.AF_INET,
            socket.AF_INET6,
        ):
            # Answers are small, and the Nagle algorithm would hold them back for the next
            # acknowledgement.
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        self.peer = _name_of(transport.get_extra_info("peername"))
        self.proven = proven_by(transport)
        # Certificates before hosts: many clients at one address must not share one turn.
        self.caller = next(iter(self.proven.get("x509_pem_cert", ())), self.caller)
        limits = self.limits
        self.server.connections.add(self)
        self.share.connections += 1
        # A client that connects and says nothing would keep its slot.
        self._after(limits.handshake_s, self._require_word)
        self._pulse = self.loop.call_later(limits.keepalive_s, self._ask)
        if limits.age_s is not None:
            self._after(limits.age_s * (1.0 + _AGE_SPREAD * (2 * random() - 1)), self.retire)
        # Accepted while the listener closed, so no call of it has begun.
        if self.server.is_stopping:
            self.abort()
        else:
            self.flush()

    def data_received(self, data: bytes) -> None:
        """Handle received bytes."""
        self._is_heard = True
        self.session.feed(data)
        if not self._is_waiting:
            self.server.ask(self)

    def eof_received(self) -> None:
        """Let the transport close."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Give up all calls."""
        self._transport = None
        self._is_closing = self._is_lost = True
        # Timers hold a reference, which would keep the connection in memory until they fire.
        for timer in (*self._timers, *((self._pulse,) if self._pulse else ())):
            timer.cancel()
        self._timers.clear()
        if not self._is_waiting:
            self.server.ask(self)

    def pause_writing(self) -> None:
        """Stop reading while output waits in the transport."""
        self._is_full = True
        self._set_reading()

    def resume_writing(self) -> None:
        """Resume writing."""
        self._is_full = False
        if self._is_held_up and not self._is_waiting:
            self.server.wait_turn(self)
        self._is_held_up = False
        self._set_reading()
        self._go_on()

    # -- work

    def wait(self) -> None:
        """Read nothing until its work has been done."""
        self._is_waiting = True
        self._set_reading()

    def work(self, units: int) -> bool:
        """Work for at most `units`. Return whether more work waits for another turn."""
        session = self.session
        self._is_working = True
        try:
            if self._is_closing:
                more = self._close_streams(units)
            elif self._is_full:
                # Most frames are answered: those that have come wait until the answers may go.
                session.spent, more = 1, False
                self._is_held_up = True
            else:
                more = session.work(self.loop.time(), units)
                self._deliver()
                more = bool(session.streams) if self._is_closing else more or session.is_due
        except Http2Error as error:
            self._fail(error)
            more = bool(session.streams)
        finally:
            self._is_working = False

        if more != self._is_waiting:
            self._is_waiting = more
            self._set_reading()

        return more

    def _close_streams(self, units: int) -> bool:
        """Give up calls for at most `units`, since there may be too many for one turn."""
        more = self.session.close(units)
        self.session.out.clear()
        if self._is_lost and not more:
            self._leave()
        return more

    def _leave(self) -> None:
        if self in self.server.connections:
            self.server.connections.remove(self)
            self.share.connections -= 1

    def flush(self) -> None:
        """Write pending output to the transport, unless received frames are being handled."""
        if not self._is_working:
            self._deliver()
            if self._is_closing or self.session.is_due:
                self._seek_turn()

    def _deliver(self) -> None:
        session = self.session
        if session.out:
            self._hand_over()
        if session.room < BURST_BYTES:
            self._refill()
        if self._is_ending and session.is_done and not self._is_closing:
            self._close()

    def _hand_over(self) -> None:
        out = self.session.out
        if self._transport is not None:
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))
        out.clear()

    def _refill(self) -> None:
        """Allow another burst if the transport accepts more, and check again soon if it may."""
        transport = self._transport
        if self._is_full or transport is None:
            return
        if transport.get_write_buffer_size() < OUTPUT_BYTES_MAX:
            self.session.refill()
        elif not self._is_refill_due:
            self._is_refill_due = True
            self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Send more of the waiting bytes."""
        self._is_refill_due = False
        self._refill()
        self._seek_turn()

    def _seek_turn(self) -> None:
        """Wait for a turn if bytes can be sent or streams must be closed."""
        is_due = self.session.streams if self._is_closing else self.session.is_due
        if is_due and not self._is_waiting:
            self.server.wait_turn(self)

    def _set_reading(self) -> None:
        transport, pauses = self._transport, self._is_waiting or self._is_full
        if transport is None or transport.is_closing() or pauses == self._is_reading_paused:
            return
        self._is_reading_paused = pauses
        if pauses:
            transport.pause_reading()
        else:
            transport.resume_reading()

    # -- of the session

    def on_head(self, stream: Stream, head: headers.Head) -> None:
        """Take a new call."""
        server, session = self.server, self.session
        if head.http_status != 200:
            session.end(stream, headers.refusal_head(head.http_status))
            return

        # A head that was not decoded completely has no path.
        method = None if head.is_too_large else server.method(head.path)
        if head.is_too_large:
            most = self.limits.header_list_bytes
            self._refuse(stream, *over_limit("headers", most, "the headers are too large"))
        elif method is None:
            self._refuse(stream, grpc.StatusCode.UNIMPLEMENTED, "method not found")
        # Before the handler is found for it, so that an overload costs one frame for each call.
        elif self.share.calls >= self.share.calls_max:
            self._refuse(stream, *busy(TOO_MANY_CALLS))
        else:
            self.share.calls += 1
            call = stream.call = Call(self, stream, head, method)
            # A unary call begins once its request is complete.
            if method.request_streaming:
                call.begin()
            if stream.is_ended_there:
                call.take(b"")

    def _refuse(
        self, stream: Stream, code: grpc.StatusCode, details: str, trailing: headers.Metadata = ()
    ) -> None:
        self.session.end(
            stream, headers.ANSWER_HEAD + headers.status(int(code.value[0]), details, trailing)
        )

    def on_data(self, stream: Stream, data: bytes) -> None:
        """Take bytes of a call."""
        if stream.call is not None:
            stream.call.take(data)

    def on_sent(self, stream: Stream) -> None:
        """Resume a call that waits for its output to be sent."""
        if stream.call is not None:
            stream.call.sent()

    def on_closed(self, stream: Stream, *, by_client: bool) -> None:
        """End a call."""
        # Cleared first, so that the call cannot reach its closed stream.
        call, stream.call = stream.call, None
        if call is not None:
            self.share.calls -= 1
            call.closed(by_client=by_client)

    def on_end_heard(self) -> None:
        """Accept no more calls, now that the client opens none."""
        if self._is_ending:
            self.session.take_no_more()

    # -- of calls

    def hold(self, more: int) -> bool:
        """Count held bytes of requests. Return whether they are within the bounds."""
        self._held += more
        share = self.share
        share.held += more
        return more <= 0 or (
            self._held <= self.limits.held_bytes_of_connection and share.held <= share.held_max
        )

    def grant(self, stream: Stream, size: int) -> None:
        """Let the client send so many bytes more."""
        self.session.grant(stream, size)
        self.flush()

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """End a call at once, without a status."""
        self.session.reset(stream, code)
        self.flush()

    # -- its end

    def retire(self) -> None:
        """Accept no more calls.

        Close when the calls in flight have ended, or after the grace period.
        """
        if self._is_ending:
            return
        self._is_ending = True
        # A call that is on its way is not lost: it ends no sooner than the client has heard of it.
        self.session.announce_end()
        self.session.takes_streams = not self.server.is_stopping
        self._after(self._grace_s(), self.abort)
        self.flush()

    def _grace_s(self) -> float:
        limits = self.limits
        return limits.age_grace_s if limits.age_s is None else min(limits.age_grace_s, limits.age_s)

    def abort(self) -> None:
        """End at once."""
        self._is_closing = True
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: Http2Error) -> None:
        self.session.fail(error)
        self._close()

    def _close(self) -> None:
        self._is_closing = True
        self._hand_over()
        if self._transport is not None:
            self._transport.close()
            self._after(_CLOSING_S, self.abort)
        self.session.out.clear()

    def _require_word(self) -> None:
        # A client begins with SETTINGS (RFC 9113, 3.4).
        if not self.session.has_settings:
            self.abort()

    def _ask(self) -> None:
        """Ping a client that has said nothing for long."""
        limits = self.limits
        # Any frame proves life, so that busy clients are never pinged.
        if self._is_heard:
            self._is_heard = False
            self._pulse = self.loop.call_later(limits.keepalive_s, self._ask)
        else:
            self.session.ping()
            self.flush()
            self._pulse = self.loop.call_later(limits.keepalive_timeout_s, self._require_life)

    def _require_life(self) -> None:
        if not self._is_heard:
            self.abort()
        else:
            self._ask()

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        self._timers.add(self.loop.call_later(seconds, do))


def _name_of(address: object) -> str:
    if not isinstance(address, tuple) or len(address) < 2:
        return "unix:"
    host, port = str(address[0]), address[1]
    # gRPC escapes the brackets, and audit lines have its form.
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"
