"""First mistakes with the client are answered by an error that names the next step."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client import StreamClient, TlsFiles, errors
from streammeta.client.controllers import methods as rpcs
from streammeta.client.controllers.methods import CREATE_STREAMS, DESCRIBE_STREAMS, Method
from streammeta.client.parts import ControllerClient
from streammeta.client.resources import fork_check
from streammeta.client.resources.daemon_threads import run_blocking
from streammeta.client.resources.resources import StoreThreads
from streammeta.storage.cluster_files.bucket_marker import read_marker
from streammeta.storage.errors import StoreUnavailableError
from streammeta.storage.object_store.local import LocalObjectStore
from streammeta.tls.files import TokenFiles
from streammeta.v1 import streams_pb2
from tests.kit.certificates import Authority
from tests.kit.real_cluster import describe, leader_of, running_cluster
from tests.kit.waiting import wait_until

# ---- files for TLS ----


def test_files_for_tls_may_be_given_as_strings(tmp_path: Path) -> None:
    given: Any = (f"{tmp_path}/a", f"{tmp_path}/b", f"{tmp_path}/c")
    files = TlsFiles(*given)
    assert files == TlsFiles(tmp_path / "a", tmp_path / "b", tmp_path / "c")
    with pytest.raises(ValueError, match=f"tls-ca.*{tmp_path}/a"):
        ControllerClient(["127.0.0.1:1"], tls=files)
    token: Any = ("a", "b")
    assert TokenFiles(*token) == TokenFiles(Path("a"), Path("b"))


@pytest.mark.parametrize("kind", [TlsFiles, TokenFiles])
@pytest.mark.parametrize("wrong", [None, 7, b"a"])
def test_what_is_no_path_is_named(kind: Any, wrong: object) -> None:
    paths: list[Any] = ["a", "b", "c"][: len(kind.__dataclass_fields__)]
    paths[1] = wrong
    name = list(kind.__dataclass_fields__)[1]
    with pytest.raises(TypeError, match=f"{name}.*{wrong!r}"):
        kind(*paths)


# ---- calls without an answer ----


def test_reads_change_nothing() -> None:
    found = [value for value in vars(rpcs).values() if isinstance(value, Method)]
    reads = {method.name for method in found if method.is_read}
    assert reads == {
        *("DescribeStreams", "FindStreams", "GetObjects", "DescribeObjects", "GetNodes"),
        *("DescribeNamedObjects", "ListStreamSetObjects", "ListStreamObjects"),
        *("GetKVs", "ListKVs", "DescribeCluster"),
    }
    assert len(found) > len(reads) + 10


async def test_only_a_change_may_have_taken_effect() -> None:
    async with ControllerClient(["127.0.0.1:1"], deadline_s=0.2) as client:
        with pytest.raises(errors.ControllerUnavailableError) as read:
            await client.call(DESCRIBE_STREAMS, streams_pb2.DescribeStreamsRequest())
        with pytest.raises(errors.ControllerUnavailableError) as session_read:
            await client.read(DESCRIBE_STREAMS, streams_pb2.DescribeStreamsRequest())
        with pytest.raises(errors.ControllerUnavailableError) as change:
            await client.call(CREATE_STREAMS, streams_pb2.CreateStreamsRequest())
    for error in (read, session_read):
        assert "taken effect" not in str(error.value)
        assert "The call changed nothing: retry it" in str(error.value)
    assert "The call may have taken effect" in str(change.value)


@asynccontextmanager
async def tls_port(authority: Authority) -> AsyncIterator[str]:
    """A port that speaks TLS alone."""
    files = authority.issue("controller/1").load()

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    context = files.context(ssl.PROTOCOL_TLS_SERVER)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_plain_text_to_a_tls_port_is_told_from_a_lost_majority(tmp_path: Path) -> None:
    async with (
        tls_port(Authority(tmp_path, "ours")) as endpoint,
        ControllerClient([endpoint], deadline_s=1.0) as client,
    ):
        with pytest.raises(errors.ControllerUnavailableError) as error:
            await client.describe_cluster()
    assert "majority" not in str(error.value)
    assert "tls=TlsFiles(ca, certificate, key)" in str(error.value)


async def test_tls_to_a_port_in_plain_text_is_told_too(tmp_path: Path) -> None:
    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))  # the settings of HTTP/2
        await writer.drain()
        writer.close()

    files = Authority(tmp_path, "ours").issue("broker/1")
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with ControllerClient([endpoint], deadline_s=1.0, tls=files) as client:
            with pytest.raises(errors.ControllerUnavailableError) as error:
                await client.describe_cluster()
    assert "majority" not in str(error.value)
    assert "the port uses plain text" in str(error.value)


async def test_a_port_where_nothing_listens_is_neither() -> None:
    async with ControllerClient(["127.0.0.1:1"], deadline_s=0.2) as client:
        with pytest.raises(errors.ControllerUnavailableError, match="majority"):
            await client.describe_cluster()


# ---- forks ----


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process one that was forked from another with connections."""
    monkeypatch.setattr(fork_check, "_has_connected", True)
    monkeypatch.setattr(fork_check, "_is_forked", False)
    fork_check._note_fork()


def test_a_fork_of_a_process_without_connections_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_check, "_has_connected", False)
    monkeypatch.setattr(fork_check, "_is_forked", False)
    fork_check._note_fork()
    fork_check.check_not_forked("a call")


@pytest.mark.usefixtures("forked")
async def test_calls_and_store_requests_are_refused_in_a_forked_process(tmp_path: Path) -> None:
    threads = StoreThreads(LocalObjectStore(tmp_path), 1, "test")
    with pytest.raises(errors.ForkedProcessError):
        await threads.run(lambda: None)
    client = ControllerClient(["127.0.0.1:1"])
    with pytest.raises(errors.ForkedProcessError, match=f"process {os.getpid()} was forked"):
        await client.describe_cluster()
    with pytest.raises(errors.ForkedProcessError):
        client.channel("127.0.0.1:1")
    await client.close()


def in_a_fork(work: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Return the exit code of a forked process that runs `work`."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # a child that hangs ends
        code = 99
        try:
            code = asyncio.new_event_loop().run_until_complete(work())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_shared_threads_are_new_in_a_forked_process() -> None:
    async def run() -> int:
        return await run_blocking(lambda: 7)

    assert asyncio.run(run()) == 7  # the parent has started threads
    assert in_a_fork(run) == 7


# ---- buckets; and clients after a fork, on real controllers ----


@pytest.mark.process
def test_open_refuses_a_missing_bucket_and_a_client_a_fork(tmp_path: Path) -> None:
    with running_cluster(tmp_path, 1) as cluster:
        leader_of(cluster)

        async def open_client(bucket: str, node_id: int | None = 7) -> StreamClient:
            return await StreamClient.open(cluster.endpoints, bucket, node_id=node_id)

        async def refuse() -> None:
            for node_id in (7, None):
                with pytest.raises(errors.BucketNotFoundError):
                    await open_client(f"file://{tmp_path}/not-there", node_id)
            nodes = [node async for node in _nodes(cluster.endpoints)]
            assert nodes == []  # nothing was registered
            down = Unanswering(tmp_path / "bucket")
            async with await StreamClient.open(cluster.endpoints, down, node_id=7):
                pass  # the store is looked at when it is first used

        asyncio.run(refuse())

        loop = asyncio.new_event_loop()
        client = loop.run_until_complete(open_client(cluster.store_uri))
        (stream_id,) = loop.run_until_complete(client.create_streams([{}]))
        loop.run_until_complete(client.open_streams([stream_id])).require_all()

        async def use_in_child() -> int:
            uses: list[Callable[[], Coroutine[Any, Any, Any]]] = [
                lambda: client.append(stream_id, b"x"),
                lambda: client.create_streams([{}]),
                lambda: client.read(stream_id, 0),
                lambda: open_client(cluster.store_uri, 8),
            ]
            refused = 0
            for use in uses:
                try:
                    await use()
                except errors.ForkedProcessError:
                    refused += 1
            return refused

        assert in_a_fork(use_in_child) == 4
        assert loop.run_until_complete(client.append(stream_id, b"parent")) == 0
        loop.run_until_complete(client.close())
        loop.close()


class Unanswering(LocalObjectStore):
    """A store that does not answer."""

    def list_objects(self, *_: Any, **__: Any) -> Any:
        raise StoreUnavailableError("no answer")


async def _nodes(endpoints: list[str]) -> AsyncIterator[int]:
    from streammeta.client.controllers.methods import GET_NODES
    from streammeta.v1 import nodes_pb2

    async with ControllerClient(endpoints) as client:
        answer = await client.call(GET_NODES, nodes_pb2.GetNodesRequest())
        for node in answer.nodes:
            yield node.node_id


@pytest.mark.process
def test_open_refuses_the_bucket_of_another_cluster(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with running_cluster(tmp_path / "one", 1) as one, running_cluster(tmp_path / "two", 1) as two:
        for cluster in (one, two):
            wait_until(lambda: _is_marked(cluster), "the bucket is marked")  # noqa: B023

        async def open_wrong() -> None:
            with pytest.raises(errors.WrongBucketError, match="cluster"):
                await StreamClient.open(one.endpoints, two.store_uri, node_id=7)

        asyncio.run(open_wrong())


def _is_marked(cluster: LocalCluster) -> bool:
    seen = describe(cluster)
    store = LocalObjectStore(cluster.root / "bucket")
    return bool(seen.cluster_uuid) and read_marker(store, seen.object_namespace) is not None
