"""A small HTTP proxy in front of a real S3 server, which breaks requests and answers as it is told.

Every request is read whole, named by what it does to the store, and offered to a plan, which lets
it pass or picks a fault. Bytes that pass are never changed. Knows nothing of stores and retries.
"""

from __future__ import annotations

import http.client
import random
import select
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias
from urllib.parse import parse_qs, urlsplit

from tests.storage.s3_servers import S3Endpoint

UPSTREAM_TIMEOUT_S = 30.0


class Fault(Enum):
    """What happens to a request: first those it never gets past, then those after it was done."""

    FAILED = "answers 500, the server hears nothing"
    SLOW_DOWN = "answers 503 SlowDown, the server hears nothing"
    FORBIDDEN = "answers 403 AccessDenied, the server hears nothing"
    RESET = "resets the connection, the server hears nothing"
    SILENT = "answers nothing, the server hears nothing"
    REQUEST_CUT = "passes half of the body on, then resets both connections"
    DONE_BUT_FAILED = "the server does it, the answer becomes 500"
    DONE_BUT_RESET = "the server does it, the answer is lost with the connection"
    DONE_BUT_SILENT = "the server does it, the answer never comes"
    ANSWER_CUT = "the server does it, half of the answer's body comes"


DONE = frozenset(
    {Fault.DONE_BUT_FAILED, Fault.DONE_BUT_RESET, Fault.DONE_BUT_SILENT, Fault.ANSWER_CUT}
)
"""The faults after which the server has done what it was asked."""


@dataclass(frozen=True, slots=True)
class ProxiedRequest:
    """One request: what it does, e.g. `put`, and its place in the order of all requests."""

    operation: str
    path: str
    number: int


Plan: TypeAlias = Callable[[ProxiedRequest], Fault | None]


def scripted(*faults: tuple[str, Fault]) -> Plan:
    """Break the next request of each named operation, in the order given, each once."""
    left = list(faults)
    lock = threading.Lock()

    def plan(request: ProxiedRequest) -> Fault | None:
        with lock:
            for entry in left:
                if entry[0] == request.operation:
                    left.remove(entry)
                    return entry[1]
        return None

    return plan


def seeded(seed: int, rate: float, faults: tuple[Fault, ...]) -> Plan:
    """Break each request with probability `rate`, decided by the seed and the request's number."""

    def plan(request: ProxiedRequest) -> Fault | None:
        rng = random.Random(f"{seed}-{request.number}")
        return rng.choice(faults) if rng.random() < rate else None

    return plan


def always(fault: Fault) -> Plan:
    return lambda _: fault


def _nothing(_: ProxiedRequest) -> Fault | None:
    return None


@dataclass
class FaultProxy:
    """A running proxy. `plan` may be replaced at any time; `seen` counts requests by operation."""

    endpoint: S3Endpoint
    plan: Plan = _nothing
    seen: Counter[str] = field(default_factory=Counter)
    broken: Counter[Fault] = field(default_factory=Counter)
    capacity: int | None = None
    """Requests that may be under way; one more is answered SlowDown. None: any number."""
    ignored: frozenset[str] = frozenset()
    """Headers in small letters that the server is not told, as if it did not know them."""
    stopping: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    under_way: int = 0

    def start_anew(self) -> None:
        """Break nothing any more, and forget what was seen."""
        self.plan, self.capacity, self.ignored = _nothing, None, frozenset()
        self.seen.clear()
        self.broken.clear()

    def decide(self, operation: str, path: str) -> Fault | None:
        """Count a request that came, and say what happens to it."""
        with self.lock:
            self.seen[operation] += 1
            self.under_way += 1
            too_many = self.capacity is not None and self.under_way > self.capacity
            number = self.seen.total()
        fault = Fault.SLOW_DOWN if too_many else self.plan(ProxiedRequest(operation, path, number))
        if fault is not None:
            with self.lock:
                self.broken[fault] += 1
        return fault

    def ended(self) -> None:
        with self.lock:
            self.under_way -= 1


@contextmanager
def running_fault_proxy(upstream: S3Endpoint) -> Iterator[FaultProxy]:
    """Run a proxy in front of `upstream`; its `endpoint` is used like that of the server itself."""
    server = _Server(("127.0.0.1", 0), _Handler)
    port = server.server_address[1]
    proxy = FaultProxy(replace(upstream, url=f"http://127.0.0.1:{port}"))
    server.proxy, server.upstream = proxy, urlsplit(upstream.url).netloc
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield proxy
    finally:
        proxy.stopping.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    proxy: FaultProxy
    upstream: str
    request_queue_size = 128

    def shutdown_request(self, request: Any) -> None:
        """Close without a shutdown before it, so that a reset is a reset."""
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that went away are no news here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def handle_any(self) -> None:
        """Read one request and do with it what the plan says."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        proxy = self.server.proxy
        fault = proxy.decide(self._operation(), self.path)
        try:
            self._break(fault, body)
        finally:
            proxy.ended()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any  # noqa: N815

    def _break(self, fault: Fault | None, body: bytes) -> None:
        if fault is Fault.REQUEST_CUT:
            self._forward_half(body)
        answer = self._forward(body) if fault is None or fault in DONE else None
        match fault:
            case None | Fault.ANSWER_CUT:
                assert answer is not None
                self._answer(*answer, cut=fault is not None)
            case Fault.FAILED | Fault.DONE_BUT_FAILED:
                self._refuse(500, "InternalError")
            case Fault.SLOW_DOWN:
                self._refuse(503, "SlowDown")
            case Fault.FORBIDDEN:
                self._refuse(403, "AccessDenied")
            case Fault.SILENT | Fault.DONE_BUT_SILENT:
                self._stay_silent()
        if fault in (Fault.RESET, Fault.REQUEST_CUT, Fault.DONE_BUT_RESET, Fault.ANSWER_CUT):
            self._reset()

    def _operation(self) -> str:
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        match self.command:
            case "PUT" if "partNumber" in query:
                return "copy_part" if self.headers.get("x-amz-copy-source") else "upload_part"
            case "PUT":
                return "copy" if self.headers.get("x-amz-copy-source") else "put"
            case "POST" if "delete" in query:
                return "delete_many"
            case "POST":
                return "start_multipart" if "uploads" in query else "complete_multipart"
            case "DELETE":
                return "abort_multipart"
            case "HEAD":
                return "head"
            case _ if "list-type" in query:
                return "list_objects"
            case _ if "uploads" in query:
                return "list_multipart_uploads"
            case _:
                return "get_range"

    def _open(self, body: bytes) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self.server.upstream, timeout=UPSTREAM_TIMEOUT_S)
        ignored = self.server.proxy.ignored
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in {"connection", "expect", "content-length", *ignored}:
                connection.putheader(name, value)
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        return connection

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = self._open(body)
        try:
            connection.send(body)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _forward_half(self, body: bytes) -> None:
        if body:  # a request without one can't be cut
            connection = self._open(body)
            connection.send(body[: len(body) // 2])
            connection.close()

    def _answer(
        self, status: int, headers: list[tuple[str, str]], body: bytes, *, cut: bool = False
    ) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = {name.lower(): value for name, value in headers}.get("content-length")
        if status != 204:
            is_head = self.command == "HEAD" and length is not None
            self.send_header("Content-Length", str(length) if is_head else str(len(body)))
        if cut and len(body) < 2:  # nothing to cut but the headers, which are not sent yet
            return
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)

    def _refuse(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>a fault of the test</Message></Error>".encode()
        body = b"" if self.command == "HEAD" else text
        self._answer(status, [("Retry-After", "0"), ("Content-Type", "application/xml")], body)

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _stay_silent(self) -> None:
        """Wait until the client has gone, or the proxy is stopped."""
        while not self.server.proxy.stopping.is_set():
            if select.select([self.connection], [], [], 0.05)[0] and not self._hears_something():
                break
        self._reset()

    def _hears_something(self) -> bool:
        try:
            return bool(self.connection.recv(1))
        except OSError:
            return False

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Keep the test output clean."""
