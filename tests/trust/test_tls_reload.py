"""Certificates are replaced while they are in use: no call fails, and what is broken stays out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from streammeta.client.controllers import channels
from streammeta.client.controllers.channels import Channels
from streammeta.controller.grpc_server.server import new_server
from streammeta.controller.process.operating_system import Reloading
from streammeta.controller.tls.manager import EXPIRES_SOON, TlsManager
from streammeta.rpc.connections import client_channel
from streammeta.tls.files import TlsContents, TlsError, TlsFiles, WatchedTls
from streammeta.tls.server_certificates import ServerCertificates
from tests.kit.certificates import Authority
from tests.kit.grpc_servers import listening
from tests.kit.waiting import until
from tests.trust.replaced_files import WAYS, Placed
from tests.trust.test_settings import config


@pytest.fixture
def placed(authority: Authority, tmp_path: Path) -> Placed:
    return Placed(tmp_path / "controller", authority.issue("controller/1"))


def renewed(authority: Authority, principal: str = "controller/1") -> TlsFiles:
    return authority.issue(principal, serial=1)


@pytest.mark.parametrize("way", WAYS)
def test_a_set_that_is_as_good_takes_the_place(
    authority: Authority, placed: Placed, way: str
) -> None:
    watched = WatchedTls(placed.files)
    assert not watched.look()
    placed.place(renewed(authority), way=way)
    assert watched.look()
    assert watched.contents.certificate == renewed(authority).certificate.read_bytes()
    assert not watched.look()


def spoilt(placed: Placed, authority: Authority, stranger: Authority) -> dict[str, Any]:
    """Return ways to spoil files, by what is then said of them."""
    other = authority.issue("controller/2")

    def key_of_another() -> None:
        placed.files.key.write_bytes(other.key.read_bytes())

    def open_to_others() -> None:
        placed.place(renewed(authority))
        placed.files.key.chmod(0o644)

    return {
        "its key": key_of_another,
        "must contain CA certificates": lambda: placed.files.ca.write_bytes(b""),
        "names controller/2, must name controller/1": lambda: placed.place(other),
        "signed by another authority": lambda: placed.place(
            stranger.issue("controller/1"), authority.ca.read_bytes()
        ),
        "can't read": placed.files.certificate.unlink,
        "allows other users to read": open_to_others,
    }


@pytest.mark.parametrize("number", range(6))
def test_a_broken_set_stays_out_and_is_told_of_once(
    authority: Authority, stranger: Authority, placed: Placed, number: int
) -> None:
    watched = WatchedTls(placed.files)
    before = watched.contents
    told, spoil = list(spoilt(placed, authority, stranger).items())[number]
    spoil()
    assert not watched.look(), "the files may be in the middle of being replaced"
    with pytest.raises(TlsError, match=told):
        watched.look()
    assert not watched.look()
    assert watched.contents is before
    placed.place(renewed(authority))
    assert watched.look()


def test_the_log_tells_of_replaced_and_of_broken_sets(authority: Authority, placed: Placed) -> None:
    own = TlsManager(config(tls=placed.files))
    audited: list[tuple[str, str]] = []
    own.tell(lambda name, reason, target: audited.append((name, reason and target["file"])))
    listening = own.peers.listening
    placed.files.ca.write_bytes(b"")
    with capture_logs() as logs:
        for _ in range(4):
            own.look()
    assert [entry["event"] for entry in logs] == ["certificate_not_replaced"]
    assert own.peers.listening is listening
    placed.place(renewed(authority))
    with capture_logs() as logs:
        own.look()
    assert [entry["event"] for entry in logs] == ["certificate_replaced"]
    assert own.peers.listening is not listening
    file = str(placed.files.certificate)
    assert audited == [("certificates.reload", file), ("certificates.reload", "")]


def test_the_end_of_a_certificate_is_seen_coming(authority: Authority, placed: Placed) -> None:
    facts = placed.files.load().facts
    assert facts is not None
    now = facts.not_after - EXPIRES_SOON - timedelta(minutes=1)
    own = TlsManager(config(tls=placed.files), lambda: now)

    def told_after(passed: timedelta) -> list[tuple[str, int]]:
        nonlocal now
        now += passed
        with capture_logs() as logs:
            own.look()
        return [(entry["event"], entry["days_left"]) for entry in logs]

    assert told_after(timedelta()) == []
    assert told_after(timedelta(minutes=2)) == [("certificate_expires_soon", 13)]
    assert told_after(timedelta(hours=23)) == []
    assert told_after(timedelta(hours=2)) == [("certificate_expires_soon", 12)]
    assert told_after(timedelta(days=12, minutes=-10)) == [("certificate_expires_soon", 0)]
    assert told_after(timedelta(hours=23, minutes=30)) == [("certificate_expired", -1)], "at once"


async def test_files_are_looked_at_when_it_is_asked_for_and_a_defect_ends_nothing() -> None:
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        raise RuntimeError("a defect")

    reloading = Reloading(3_600_000, [look])
    running = asyncio.create_task(reloading.run())
    for expected in (1, 2):
        reloading.ask()
        await until(lambda: looks == expected, "a look")  # noqa: B023
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


class Serving:
    """A service that says who calls, and holds one stream open; keeps what it saw."""

    def __init__(self) -> None:
        self.certificates: set[bytes] = set()
        self.peers: set[str] = set()

    async def call(self, _request: bytes, context: Any) -> bytes:
        self._note(context)
        return b"answer"

    async def stream(self, _requests: Any, context: Any) -> None:
        self._note(context)
        while await context.read() is not grpc.aio.EOF:
            await context.write(b"answer")

    def _note(self, context: Any) -> None:
        self.peers.add(context.peer())
        self.certificates.add(context.auth_context()["x509_pem_cert"][0])

    @asynccontextmanager
    async def running(
        self, certificates: ServerCertificates, age_ms: int | None = None
    ) -> AsyncIterator[str]:
        server = new_server(age_ms)
        handlers: Any = {
            "Call": grpc.unary_unary_rpc_method_handler(self.call),
            "Stream": grpc.stream_stream_rpc_method_handler(self.stream),
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Serving", handlers),)
        )
        async with listening(server, certificates) as endpoint:
            yield endpoint


async def call_until(channel: Callable[[], grpc.aio.Channel], done: Callable[[], bool]) -> None:
    """Make one call after the other until a condition holds.

    None may fail, but those that met the end of their connection before they were taken: clients of
    the product send these again.
    """
    async with asyncio.timeout(60):
        while not done():
            call: Any = channel().unary_unary("/test.Serving/Call")
            try:
                assert await call(b"", timeout=60) == b"answer"
            except grpc.aio.AioRpcError as error:
                if "GOAWAY" not in (error.details() or ""):
                    raise


@pytest.mark.parametrize("way", WAYS)
async def test_both_sides_renew_under_load(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(channels, "LOOKED_AT_EVERY_S", 0.02)
    serving = Serving()
    own = Placed(tmp_path / "controller", authority.issue("controller/1"))
    watched = WatchedTls(own.files)
    shown = ServerCertificates(watched.contents)
    theirs = Placed(tmp_path / "broker", authority.issue("broker/7"))
    async with serving.running(shown) as endpoint:
        opened = Channels(theirs.files, grace_s=0.1)
        await call_until(lambda: opened.get(endpoint), lambda: len(serving.peers) == 1)
        own.place(renewed(authority), way=way)
        assert watched.look()
        shown.replace(watched.contents)
        theirs.place(renewed(authority, "broker/7"), way=way)
        await call_until(lambda: opened.get(endpoint), lambda: len(serving.certificates) == 2)
        await opened.close()


async def test_a_listener_trusts_those_it_trusts_now(
    authority: Authority, stranger: Authority
) -> None:
    serving = Serving()
    shown = ServerCertificates(authority.issue("controller/1").load())
    theirs = stranger.issue("broker/7")
    bundle = authority.ca.read_bytes() + stranger.ca.read_bytes()
    async with serving.running(shown) as endpoint:
        for listening, calling, is_taken in (
            (authority.issue("controller/1").read(), replace(theirs.read(), ca=bundle), False),
            (replace(authority.issue("controller/1").read(), ca=bundle), None, True),
            (stranger.issue("controller/1").read(), None, True),
            (authority.issue("controller/1").read(), None, False),
        ):
            shown.replace(listening)
            used = calling or replace(theirs.read(), ca=bundle)
            assert await is_answered(endpoint, used) == is_taken


async def is_answered(endpoint: str, tls: TlsContents) -> bool:
    async with client_channel(endpoint, tls) as channel:
        call: Any = channel.unary_unary("/test.Serving/Call")
        try:
            await call(b"", timeout=60)
        except grpc.aio.AioRpcError:
            return False
        return True


async def test_connections_that_are_too_old_end_and_no_call_taken_fails(
    authority: Authority,
) -> None:
    serving = Serving()
    shown = ServerCertificates(authority.issue("controller/1").load())
    async with (
        serving.running(shown, age_ms=200) as endpoint,
        client_channel(endpoint, authority.issue("broker/7")) as channel,
    ):
        stream: Any = channel.stream_stream("/test.Serving/Stream")()
        await call_until(lambda: channel, lambda: len(serving.peers) >= 3)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async with asyncio.timeout(60):
                while True:
                    await stream.write(b"")
                    await stream.read()
        assert await stream.code() is not grpc.StatusCode.OK
