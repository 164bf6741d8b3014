"""Three real controllers over TLS, and changes of certificates and settings while brokers write."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streammeta.cli.framework.client import CallError
from streammeta.cli.framework.client import ControllerClient as OperatorClient
from streammeta.cli.local.local_cluster import LocalCluster, free_ports, tls_words
from streammeta.client import StreamClient
from streammeta.client.commits.pipeline import CommitPipeline
from streammeta.client.controllers import channels, controller_client
from streammeta.client.controllers.metadata_watch import Change, MetadataWatch
from streammeta.client.errors import ControllerUnavailableError
from streammeta.client.parts import ControllerClient
from streammeta.tls.files import TlsFiles
from streammeta.v1 import kv_pb2
from tests.kit.certificates import Authority
from tests.kit.real_cluster import STEADY
from tests.kit.waiting import until, wait_until
from tests.kit.warm_start import start_warm
from tests.monitoring.http_calls import get, got
from tests.trust.audited_cluster import ask
from tests.trust.replaced_files import Placed

pytestmark = pytest.mark.process

QUICK = (*STEADY, "--tls-reload-ms", "50", "--connection-age-ms", "700")


@contextmanager
def cluster_of(
    root: Path, tls: Mapping[int, TlsFiles], options: Sequence[str] = STEADY
) -> Iterator[LocalCluster]:
    """Run three controllers with these files."""
    bucket = root / "bucket"
    bucket.mkdir()
    cluster = LocalCluster(
        *(root, "test", f"file://{bucket}", free_ports(3), options), tls=tls, starter=start_warm
    )
    try:
        cluster.start_all()
        yield cluster
    finally:
        cluster.stop_all()


def logged(cluster: LocalCluster, node_id: int) -> list[dict[str, object]]:
    """Return what a controller has logged; every line must be one of its own."""
    lines = (cluster.root / f"controller-{node_id}.log").read_text().splitlines()
    return [json.loads(line) for line in lines]


def certified(authority: Authority) -> dict[int, TlsFiles]:
    return {node_id: authority.issue(f"controller/{node_id}") for node_id in (1, 2, 3)}


def hears(endpoint: str, data: bytes) -> bytes:
    """Say something in plain text; return what comes back until the other side closes."""
    host, _, port = endpoint.partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as opened:
        opened.sendall(data)
        heard = b""
        with contextlib.suppress(ConnectionError):
            while more := opened.recv(1000):
                heard += more
        return heard


def shakes_hands(endpoint: str, tls: TlsFiles, version: ssl.TLSVersion) -> bool:
    host, _, port = endpoint.partition(":")
    context = tls.load().context(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, int(port)), timeout=60) as opened,
            context.wrap_socket(opened) as wrapped,
        ):
            return wrapped.recv(1) != b""
    except (ssl.SSLError, ConnectionError):
        return False


async def test_only_those_with_certificates_take_part(
    authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    alice = authority.issue("admin/alice")
    with cluster_of(tmp_path, certified(authority)) as cluster:
        async with ControllerClient(cluster.endpoints, tls=alice) as client:
            assert await client.object_namespace()
        bundle = tmp_path / "both.pem"
        bundle.write_bytes(authority.ca.read_bytes() + stranger.ca.read_bytes())
        for tls in (None, replace(stranger.issue("admin/alice"), ca=bundle)):
            async with ControllerClient(cluster.endpoints, deadline_s=1, tls=tls) as refused:
                with pytest.raises(ControllerUnavailableError) as raised:
                    await refused.describe_cluster()
            names_the_log = "the controller's log contains the reason" in str(raised.value)
            assert names_the_log == (tls is not None)

        request = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
        for endpoint in (cluster.endpoints[0], cluster.peer_endpoints[0]):
            assert b"HTTP/1" not in await asyncio.to_thread(hears, endpoint, request)
            old = ssl.TLSVersion.TLSv1_2
            assert not await asyncio.to_thread(shakes_hands, endpoint, alice, old)
        now = ssl.TLSVersion.TLSv1_3
        assert await asyncio.to_thread(shakes_hands, cluster.endpoints[0], alice, now)

        cluster.tls = {}
        joined = cluster.join()
        wait_until(
            lambda: any("do both sides use TLS" in str(event) for event in logged(cluster, joined)),
            "it is refused",
        )
        for node_id in cluster.node_ids:
            assert logged(cluster, node_id), "nothing but lines of its own"


class Appends:
    """Appends to one stream, one after the other, and a tail that follows them."""

    def __init__(self, client: StreamClient, stream_id: int) -> None:
        self._client = client
        self._stream_id = stream_id
        self._count = 0
        self._followed: list[bytes] = []
        self._running = asyncio.create_task(self._run())
        self._following = asyncio.create_task(self._follow())

    async def _run(self) -> None:
        while True:
            offset = await self._client.append(self._stream_id, str(self._count).encode())
            assert offset == self._count
            self._count += 1

    async def go_on(self) -> None:
        """Wait for appends that begin after this call."""
        wanted = self._count + 3
        await until(lambda: self._count >= wanted or self._running.done(), "appends", 60)
        if self._running.done():
            self._running.result()

    async def _follow(self) -> None:
        async with self._client.tail(self._stream_id, 0) as records:
            async for record in records:
                self._followed.append(bytes(record.payload))

    async def end(self) -> None:
        """Stop; a tail that was open all the while saw everything once and in order."""
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await until(
            lambda: len(self._followed) >= self._count or self._following.done(), "tail", 30
        )
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        assert self._followed[: self._count] == [b"%d" % number for number in range(self._count)]


@asynccontextmanager
async def appending(
    endpoints: Sequence[str], bucket: str, tls: TlsFiles | None, node_id: int = 7
) -> AsyncIterator[Appends]:
    """Append as a broker until the block ends; every append must have succeeded."""
    async with await StreamClient.open(endpoints, bucket, node_id=node_id, tls=tls) as client:
        (stream_id,) = await client.create_streams([{}])
        await client.open_streams([stream_id])
        appends = Appends(client, stream_id)
        await appends.go_on()
        yield appends
        await appends.go_on()
        await appends.end()


async def test_the_authority_changes_in_three_rounds_while_a_broker_appends(
    authority: Authority, stranger: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "LOOKED_AT_EVERY_S", 0.05)
    monkeypatch.setattr(controller_client, "_GRACE_S", 0.5)
    old, new = authority.ca.read_bytes(), stranger.ca.read_bytes()
    holders = {f"controller/{node_id}": node_id for node_id in (1, 2, 3)} | {"broker/7": 0}
    places = {
        name: Placed(tmp_path / f"files-{node_id}", authority.issue(name))
        for name, node_id in holders.items()
    }
    controllers = {node_id: places[name].files for name, node_id in holders.items() if node_id}
    with cluster_of(tmp_path, controllers, QUICK) as cluster:
        async with appending(
            cluster.endpoints, cluster.store_uri, places["broker/7"].files
        ) as appends:
            rounds = ((authority, old + new), (stranger, old + new), (stranger, new))
            for number, (issuer, ca) in enumerate(rounds, start=1):
                for name, place in places.items():
                    place.place(issuer.issue(name), ca)
                    await appends.go_on()
                await until(lambda: replaced(cluster) == [number] * 3, "files read")  # noqa: B023
                await appends.go_on()
        async with ControllerClient(
            cluster.endpoints, deadline_s=1, tls=authority.issue("admin/alice")
        ) as late:
            with pytest.raises(ControllerUnavailableError):
                await late.describe_cluster()


async def test_pipelines_and_watches_go_on_when_their_connections_have_become_too_old(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Counter[str]()

    def counted(owner: type, name: str, what: str) -> None:
        open_one: Callable[..., Any] = getattr(owner, name)

        def count(*arguments: Any) -> Any:
            opened[what] += 1
            return open_one(*arguments)

        monkeypatch.setattr(owner, name, count)

    counted(CommitPipeline, "_exchange", "pipeline")
    counted(MetadataWatch, "_responses", "watch")
    tls = authority.issue("broker/7")
    with cluster_of(tmp_path, certified(authority), QUICK) as cluster:
        async with ControllerClient(cluster.endpoints, tls=tls) as client:
            watch, seen = MetadataWatch(client), list[Change]()
            following = asyncio.create_task(follow(watch, seen))
            async with appending(cluster.endpoints, cluster.store_uri, tls) as appends:
                while min(opened["pipeline"], opened["watch"]) < 4:
                    await appends.go_on()
                    assert not following.done()
            end = watch.high_watermark
            await until(lambda: watch.next_offset >= end or following.done(), "the watch")
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            again, once_more = MetadataWatch(client), list[Change]()
            repeat = asyncio.create_task(follow(again, once_more))
            await until(lambda: len(once_more) >= len(seen) or repeat.done(), "a watch anew", 30)
            repeat.cancel()
            await asyncio.gather(repeat, return_exceptions=True)
    assert seen == once_more[: len(seen)], "nothing is lost, and nothing comes twice"
    assert len(seen) > 10


async def follow(watch: MetadataWatch, seen: list[Change]) -> None:
    """Keep the changes of a watch."""
    async for change in watch.follow():
        if change is not None:
            seen.append(change)  # noqa: PERF401 - while the watch goes on


def replaced(cluster: LocalCluster) -> list[int]:
    """Return how many sets each controller has taken over; it must have refused none."""
    events = [[entry["event"] for entry in logged(cluster, node)] for node in cluster.node_ids]
    assert not any("certificate_not_replaced" in event for event in events)
    return [event.count("certificate_replaced") for event in events]


@pytest.mark.slow  # nine restarts
@pytest.mark.timeout(300)
async def test_a_cluster_moves_from_plain_text_to_tls_while_brokers_append(
    authority: Authority, tmp_path: Path
) -> None:
    with cluster_of(tmp_path, {}) as cluster:
        ports = free_ports(3)

        async def restarted(appends: Appends, plain_text: str) -> None:
            """Restart one controller after the other with its files."""
            cluster.tls = certified(authority)
            for node_id in cluster.node_ids:
                both: tuple[str, ...] = ("--tls-listen", f"127.0.0.1:{ports[node_id - 1]}")
                cluster.children[node_id].stop()
                if plain_text == "none":
                    cluster.ports[node_id - 1] = ports[node_id - 1]
                    both = ()
                cluster.options = (*STEADY, "--peer-plain-text", plain_text, *both)
                await asyncio.to_thread(cluster.start, node_id)
                await appends.go_on()

        async with appending(cluster.endpoints, cluster.store_uri, None) as appends:
            await restarted(appends, "spoken")
        broker = authority.issue("broker/8")
        to_tls = [f"127.0.0.1:{port}" for port in ports]
        async with appending(to_tls, cluster.store_uri, broker, node_id=8) as appends:
            await restarted(appends, "taken")
            await restarted(appends, "none")


class Ipv6Cluster(LocalCluster):
    """Controllers at `[::1]`."""

    @property
    def endpoints(self) -> list[str]:
        """Addresses of all controllers for clients."""
        return [f"[::1]:{port}" for port in self.ports]

    @property
    def peer_endpoints(self) -> list[str]:
        """Where each controller listens for the others."""
        return [f"[::1]:{port}" for port in self.peer_ports]


async def test_all_planes_speak_tls_over_ipv6(authority: Authority, tmp_path: Path) -> None:
    """Clients check the address in the certificate; controllers, who may be overridden, do not."""
    (tmp_path / "bucket").mkdir()
    tls = {node: authority.issue(f"controller/{node}", hosts=("::1",)) for node in (1, 2, 3)}
    http = {node_id: f"[::1]:{port}" for node_id, port in enumerate(free_ports(3), 1)}
    cluster = Ipv6Cluster(
        *(tmp_path, "test", f"file://{tmp_path}/bucket", free_ports(3), STEADY),
        own_options={
            node_id: (
                *("--http-listen", http[node_id]),
                *tls_words(
                    authority.issue(f"controller/{node_id}", hosts=("other.test",)), "peer-tls"
                ),
            )
            for node_id in http
        },
        tls=tls,
    )
    try:
        await asyncio.to_thread(cluster.start_all)
        broker = authority.issue("broker/7")
        async with appending(cluster.endpoints, cluster.store_uri, broker) as appends:
            await appends.go_on()
            cluster.children[1].kill()  # the two others vote, and replicate
            await appends.go_on()
        monitor = authority.issue("monitor/m")
        assert await got(http[2], "/livez", monitor) == (200, "ok\n")
    finally:
        cluster.stop_all()


PLANES = ("clients", "peers", "http")


def options_of(files: TlsFiles, over_tls: set[str], http_endpoint: str) -> Sequence[str]:
    """Return what makes a controller speak TLS on these planes and plain text on the others."""
    words = ["--http-listen", http_endpoint]
    if "clients" in over_tls:  # its files are those of the others too
        words += tls_words(files)
        words += () if "peers" in over_tls else ("--peer-plain-text", "spoken")
        words += () if "http" in over_tls else ("--http-plain-text",)
        return words
    for plane, option in (("peers", "peer-tls"), ("http", "http-tls")):
        words += tls_words(files, option) if plane in over_tls else ()
    return words


def planes_of(cluster: LocalCluster, node_id: int) -> dict[str, str]:
    """Return what a controller logs of its planes when it is ready."""
    (ready,) = (line for line in logged(cluster, node_id) if line["event"] == "controller_ready")
    return {plane: str(ready[plane]).partition(" ")[2] for plane in PLANES}


def commits(endpoints: Sequence[str], tls: TlsFiles | None, timeout_s: float) -> bool:
    """Whether a write by these files is answered."""
    item = kv_pb2.KVToPut(key="k", value=b"v", overwrite=True)
    with OperatorClient(endpoints, timeout_s=timeout_s, tls=tls) as client:
        try:
            ask(client, kv_pb2.PutKVsRequest(items=[item]))
        except CallError:
            return False
    return True


def answers(endpoint: str, tls: TlsFiles | None) -> bool:
    """Whether a probe by these files is answered."""
    try:
        return get(endpoint, "/livez", tls) == (200, "ok\n")
    except (OSError, http.client.HTTPException):
        return False


# An even number of planes over TLS has any two of them in all four ways.
@pytest.mark.parametrize(
    "over_tls",
    [
        pytest.param(set(planes), marks=pytest.mark.slow if count % 2 else ())
        for count in range(len(PLANES) + 1)
        for planes in itertools.combinations(PLANES, count)
    ],
    ids=lambda over_tls: " and ".join(sorted(over_tls)) or "none",
)
def test_each_plane_is_protected_as_it_is_told_to_be(
    authority: Authority, tmp_path: Path, over_tls: set[str]
) -> None:
    (tmp_path / "bucket").mkdir()
    http_endpoints = {node_id: f"127.0.0.1:{port}" for node_id, port in enumerate(free_ports(3), 1)}
    cluster = LocalCluster(
        *(tmp_path, "test", f"file://{tmp_path}/bucket", free_ports(3), STEADY),
        own_options={
            node_id: options_of(authority.issue(f"controller/{node_id}"), over_tls, endpoint)
            for node_id, endpoint in http_endpoints.items()
        },
        starter=start_warm,
    )
    admin = authority.issue("admin/alice")
    try:
        cluster.start_all()
        is_encrypted = "clients" in over_tls
        assert commits(cluster.endpoints, admin if is_encrypted else None, 30)
        assert not commits(cluster.endpoints, None if is_encrypted else admin, 0.5)
        is_encrypted = "http" in over_tls
        for endpoint in http_endpoints.values():
            assert answers(endpoint, admin) is is_encrypted
            assert answers(endpoint, None) is not is_encrypted
        spoken = {plane: "tls 1.3" if plane in over_tls else "plain text" for plane in PLANES}
        if "clients" in over_tls and "peers" not in over_tls:
            spoken["peers"] = "tls 1.3, plain text spoken"
        for node_id in cluster.node_ids:
            assert planes_of(cluster, node_id) == spoken
    finally:
        cluster.stop_all()
