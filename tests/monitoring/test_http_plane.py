"""The listener for HTTP: its answers, its refusals, its bounds, and readiness for probes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from streammeta.controller.ids import EndOffset, Epoch, NodeId
from streammeta.controller.monitoring.http import http_listener, probes
from streammeta.controller.monitoring.http.http_listener import HttpPlane, Page, Route
from streammeta.controller.runtime.replication.operations import QuorumDescription
from streammeta.controller.tls.manager import TlsManager
from streammeta.controller.trust.authenticator import HTTP_RULES, Authenticator
from streammeta.controller.trust.policy import Denials, Policy
from streammeta.tls.listener import ListenerTls
from tests.kit.certificates import Authority
from tests.kit.waiting import until
from tests.monitoring.http_calls import got
from tests.trust.replaced_files import Placed
from tests.trust.test_settings import config

PAGE_BYTES = 8 << 20


async def _alive(_: object) -> Page:
    return Page(b"ok\n")


async def _numbers(_: object) -> Page:
    return Page(b"x" * PAGE_BYTES)


async def _broken(*_: object) -> Page:
    raise RuntimeError("a defect")


PAGES = {
    "/livez": Route("livez", _alive),
    "/metrics": Route("metrics", _numbers),
    "/readyz": Route("readyz", _broken),
}


@asynccontextmanager
async def serving(
    tls: ListenerTls | None = None, authenticator: Authenticator | None = None
) -> AsyncIterator[tuple[HttpPlane, str]]:
    """Serve `PAGES`; gives the listener and its address."""
    served = HttpPlane(
        tls or ListenerTls(), authenticator or Authenticator("test", rules=HTTP_RULES), PAGES
    )
    port = await served.start("127.0.0.1:0")
    try:
        yield served, f"127.0.0.1:{port}"
    finally:
        await served.stop()


def protected(authority: Authority, principal: str = "controller/1") -> ListenerTls:
    context = authority.issue(principal).load().context(ssl.PROTOCOL_TLS_SERVER)
    return ListenerTls(listening=context, takes_plain_text=False)


async def test_pages_are_read_and_nothing_else_is_done() -> None:
    async with serving() as (_, at):
        assert await got(at, "/livez") == (200, "ok\n")
        assert await got(at, "/livez?verbose") == (200, "ok\n")
        assert await got(at, "/livez", method="HEAD") == (200, "")
        assert (await got(at, "/livez", method="POST"))[0] == 405
        assert await got(at, "/") == (
            404,
            "not found, available paths: /livez, /metrics, /readyz\n",
        )
        with capture_logs() as logs:
            assert await got(at, "/readyz") == (500, "defect in the controller: see its log\n")
    assert [entry["event"] for entry in logs] == ["http_request_failed"]


@pytest.mark.parametrize(
    ("principal", "path", "told"),
    [
        ("monitor/prometheus", "/metrics", ""),
        ("controller/3", "/metrics", ""),
        ("broker/1007", "/livez", ""),
        ("broker/new", "/livez", ""),
        ("broker/1007", "/metrics", "broker/1007 may not call http/metrics: it needs role admin"),
        ("compactor/c", "/metrics", "compactor/c may not call http/metrics"),
    ],
)
async def test_pages_are_for_roles(
    authority: Authority, principal: str, path: str, told: str
) -> None:
    async with serving(protected(authority)) as (_, at):
        status, text = await got(at, path, authority.issue(principal))
    assert status == (403 if told else 200)
    assert told in text


async def test_certificates_of_other_clusters_and_denied_ones_are_refused(
    authority: Authority,
) -> None:
    authenticator = Authenticator("test", rules=HTTP_RULES)
    mine = authority.issue("monitor/m")
    async with serving(protected(authority), authenticator) as (_, at):
        foreign = authority.issue("monitor/m", cluster_id="other")
        assert "is of another cluster" in (await got(at, "/livez", foreign))[1]
        assert (await got(at, "/livez", mine))[0] == 200
        denials = Denials(fingerprints=frozenset((authority.fingerprint("monitor/m"),)))
        authenticator.use_policy(Policy(denials=denials))
        status, text = await got(at, "/livez", mine)
    assert (status, "is denied by the policy" in text) == (403, True)


async def test_connections_without_a_certificate_of_the_authority_end_and_are_counted(
    authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    """Of the events of one kind from one host the first is logged."""
    trusted = authority.ca.read_bytes()
    misled = Placed(
        tmp_path / "misled", stranger.issue("monitor/m"), trusted + stranger.ca.read_bytes()
    )
    with capture_logs() as logs:
        async with serving(protected(authority)) as (served, at):
            for tls in (None, misled.files):
                with pytest.raises(OSError):  # noqa: PT011 - as TLS and sockets put it
                    await got(at, "/livez", tls)
            host, _, port = at.partition(":")
            for said in (b"\0" * 64, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
                reader, writer = await asyncio.open_connection(host, int(port))
                with closing(writer):
                    writer.write(said)
                    with suppress(ConnectionError):
                        await reader.read()
            assert served.refused == {"handshake_failed": 4}
            assert (await got(at, "/livez", authority.issue("monitor/m")))[0] == 200
    assert [entry["event"] for entry in logs] == ["http_handshake_failed"]


async def test_replaced_certificates_are_shown_and_broken_ones_are_not(
    authority: Authority, tmp_path: Path
) -> None:
    placed = Placed(tmp_path / "controller", authority.issue("controller/1"))
    own = TlsManager(config(http_listen="127.0.0.1:1", http_tls=placed.files))
    mine = authority.issue("monitor/m")
    (before,) = own.states()
    async with serving(own.http) as (_, at):
        first = own.http.listening
        placed.files.ca.write_bytes(b"")
        for _ in range(3):
            own.look()
        assert own.http.listening is first
        assert (await got(at, "/livez", mine))[0] == 200
        placed.place(authority.issue("controller/1", serial=1))
        own.look()
        assert own.http.listening is not first
        assert (await got(at, "/livez", mine))[0] == 200
    (after,) = own.states()
    assert (before.plane, before.replaced, before.refused) == ("http", 0, 0)
    assert (after.replaced, after.refused) == (1, 1)


async def test_a_connection_ends_soon_whatever_it_sends_or_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_listener, "CONNECTION_AGE_S", 0.3)
    async with serving() as (served, at):
        host, _, port = at.partition(":")
        for said in (
            b"",
            b"GET /livez HTTP/1.1\r\nx: ",
            b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n",
        ):
            reader, writer = await asyncio.open_connection(host, int(port), limit=1000)
            writer.write(said)
            await until(lambda: served.connections == 1, "it is taken")
            await until(lambda: served.connections == 0, "it is ended")
            read = b""
            with suppress(ConnectionError):
                async with asyncio.timeout(60):
                    read = await reader.read()
            assert len(read) < PAGE_BYTES
            writer.close()


async def test_a_connection_carries_one_request() -> None:
    async with serving() as (_, at):
        host, _, port = at.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with closing(writer):
            writer.write(2 * b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.read()).count(b"HTTP/1.1 200") == 1


async def test_the_library_writes_nothing_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(HttpPlane, "_page", _broken)
    async with serving() as (_, at):
        assert (await got(at, "/livez"))[0] == 500
    assert caplog.records == []


@pytest.mark.parametrize("limit", ["CONNECTIONS_MAX", "CONNECTIONS_MAX_PER_HOST"])
async def test_there_are_so_many_connections(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(http_listener, limit, 2)
    async with serving() as (served, at):
        host, _, port = at.partition(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        await until(lambda: served.refused["too_many_connections"] == 1, "one is refused")
        assert served.connections == 2
        for _, writer in opened:
            writer.close()
        await until(lambda: served.connections == 0, "they are gone")
        assert (await got(at, "/livez"))[0] == 200


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /" + b"x" * 10_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nx: " + b"y" * 10_000 + b"\r\n\r\n",
        b"GET /livez HTTP/1.1\r\n" + b"".join(b"x%d: y\r\n" % n for n in range(100)) + b"\r\n",
        b"nonsense\r\n\r\n",
    ],
    ids=["line", "field", "fields", "nonsense"],
)
async def test_requests_have_a_size_and_a_form(
    request_: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    async with serving() as (_, at):
        host, _, port = at.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with closing(writer):
            writer.write(request_)
            answer = await reader.read()
        assert answer.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
    assert capfd.readouterr().err == "", "standard error is for our own lines"


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /livez HTTP/1.1\r\nx: ",
        b"POST /livez HTTP/1.1\r\ncontent-length: 99999999\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
    ids=["field", "body", "nonsense"],
)
async def test_a_connection_that_sends_too_much_is_ended(request_: bytes) -> None:
    with capture_logs() as logs:
        async with serving() as (served, at):
            host, _, port = at.partition(":")
            for _ in range(2):
                reader, writer = await asyncio.open_connection(host, int(port))
                with closing(writer), suppress(ConnectionError):
                    writer.write(request_ + bytes(http_listener.REQUEST_BYTES_MAX))
                    await reader.read()
            await until(lambda: served.connections == 0, "they are ended")
            assert served.refused == {"connection_broken": 2}
    assert [entry["event"] for entry in logs] == ["http_connection_broken"]


QUORUM = QuorumDescription(
    node_id=NodeId(1),
    role="follower",
    leader_id=NodeId(2),
    has_leader=True,
    epoch=Epoch(3),
    high_watermark=EndOffset(50_000),
    end_offset=EndOffset(50_000),
    flushed_end=EndOffset(50_000),
    log_start_offset=EndOffset(0),
    snapshot_id=None,
    is_repairing=False,
    is_disk_full=False,
    is_transferring=False,
    voters=(),
    observers=(),
)
READY = probes.Condition(phase=probes.Phase.SERVING, quorum=QUORUM, applied=50_000)


@pytest.mark.parametrize(
    ("condition", "told"),
    [
        (READY, ""),
        (replace(READY, quorum=replace(QUORUM, is_disk_full=True)), ""),
        (replace(READY, applied=50_000 - probes.BEHIND_MAX), ""),
        (
            replace(READY, applied=49_999 - probes.BEHIND_MAX),
            "caught_up: 10001 committed entries are not",
        ),
        (replace(READY, phase=probes.Phase.STARTING), "serving: it starts"),
        (replace(READY, phase=probes.Phase.STOPPING), "serving: it stops"),
        (replace(READY, quorum=replace(QUORUM, has_leader=False)), "leader: no leader answers"),
        (replace(READY, quorum=replace(QUORUM, is_repairing=True)), "repair: its log lost entries"),
    ],
    ids=["ready", "full", "nearly", "behind", "starting", "stopping", "leaderless", "repairing"],
)
def test_what_is_not_ready_is_said(condition: probes.Condition, told: str) -> None:
    is_ready, text = probes.report(probes.unready(condition))
    failed = [line for line in text.splitlines() if not line.startswith("[+] ")]

    assert len(text.splitlines()) == 4
    assert is_ready == (not told)
    assert len(failed) == bool(told)
    assert all(line.startswith(f"[-] {told}") for line in failed)
