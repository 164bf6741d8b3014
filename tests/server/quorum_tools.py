"""What tests of the quorum's commands share: running a command, writes that go on meanwhile."""

import contextlib
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from streammeta.cli.client import CallError, ControllerClient
from streammeta.cli.local_cluster import LocalCluster
from streammeta.cli.output import run_cli
from streammeta.cli.root import cli
from streammeta.v1 import kv_pb2
from streammeta.v1.kv_pb2_grpc import KVServiceStub


def streammeta(*words: str) -> dict[str, Any]:
    """Run a command in this process; return its one json object, with `exit_code` added."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exit_code = run_cli(cli, [*words, "--format", "json"])
    answer: dict[str, Any] = json.loads(said.getvalue())
    return {**answer, "exit_code": exit_code}


def quorum(cluster: LocalCluster, *words: str, connect: str = "") -> dict[str, Any]:
    """Run `streammeta quorum`, which must succeed."""
    name, *more = words
    answer = streammeta("quorum", name, "--connect", connect or cluster.connect, *more)
    assert answer["ok"], answer
    assert answer["exit_code"] == 0
    return answer


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Wait with a deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.05)


def replica(cluster: LocalCluster, node_id: int) -> dict[str, Any]:
    """How the leader sees one replica now; empty if it does not."""
    rows = quorum(cluster, "describe")["replicas"]
    return next((row for row in rows if row["node_id"] == node_id), {})


def put(client: ControllerClient, key: str, value: str) -> None:
    """Put one key and require that it was put."""
    item = kv_pb2.KVToPut(key=key, value=value.encode(), overwrite=True)
    answer = client.call(
        lambda channel: KVServiceStub(channel).PutKVs, kv_pb2.PutKVsRequest(items=[item])
    )
    assert answer.results[0].error == 0


def values(client: ControllerClient) -> dict[str, str]:
    """Every key of the default namespace, and its value."""
    found: dict[str, str] = {}
    request = kv_pb2.ListKVsRequest()
    while True:
        answer = client.call(lambda channel: KVServiceStub(channel).ListKVs, request)
        found |= {entry.key: entry.value.decode() for entry in answer.entries}
        if not answer.next_page_token:
            return found
        request.page.page_token = answer.next_page_token


class Writes:
    """Puts one key after the other in a thread; `acknowledged` grows with every answer."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="writes")
        self.acknowledged: list[str] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def expect_progress(self) -> None:
        """Wait until a write that began after this call has been acknowledged."""
        known = len(self.acknowledged) + 1
        wait_until(lambda: len(self.acknowledged) > known, "writes are acknowledged")

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            # Made anew after a failure: controllers that joined since are asked too.
            with (
                ControllerClient(self._cluster.endpoints) as client,
                contextlib.suppress(CallError),  # an unknown outcome is not counted
            ):
                while not self._stop.is_set():
                    number += 1
                    put(client, f"key-{number:06}", str(number))
                    self.acknowledged.append(f"key-{number:06}")
                    time.sleep(0.005)


@contextlib.contextmanager
def writes_going_on(cluster: LocalCluster) -> Iterator[Writes]:
    """Write all the while; at the end everything acknowledged must be there."""
    writes = Writes(cluster)
    writes.start()
    try:
        yield writes
        writes.expect_progress()
    finally:
        writes.stop()
    with ControllerClient(cluster.endpoints, timeout_s=30) as client:
        there = values(client)
    missing = [key for key in writes.acknowledged if key not in there]
    assert not missing, f"{len(missing)} of {len(writes.acknowledged)} acknowledged writes are lost"
