"""The process of a closed client ends although calls to its store never do; and daemon threads."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import weakref
from concurrent.futures import CancelledError

import pytest

from streammeta.client import StreamClient
from streammeta.client.resources.daemon_threads import DaemonThreads
from tests.broker_client.closing_child import RETURNED, SCENARIOS
from tests.kit.fake_cluster import FakeCluster
from tests.kit.memory_store import MemoryObjectStore

PATIENCE_S = 60.0


@pytest.mark.process
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_process_ends_after_close_although_its_store_never_answers(scenario: str) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "tests.broker_client.closing_child", scenario],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (child.returncode, child.stdout.strip()) == (0, RETURNED), child.stderr


async def test_no_call_of_a_client_runs_where_asyncio_waits_for_it() -> None:
    """`asyncio.run` ends with a wait for the calls of its own executor, however long they take."""
    await asyncio.get_running_loop().shutdown_default_executor()
    async with FakeCluster() as cluster:
        client = await StreamClient.open(cluster.endpoints, MemoryObjectStore(), node_id=1)
        async with client:
            (stream_id,) = await client.create_streams([{}])
            (await client.open_streams([stream_id])).require_all()
            await client.append(stream_id, b"x")
            assert len(await client.read(stream_id, 0)) == 1


def test_the_end_of_the_interpreter_waits_for_no_thread_of_a_store() -> None:
    pool = DaemonThreads(1, "test")
    is_daemon = pool.submit(lambda: threading.current_thread().daemon).result(PATIENCE_S)
    pool.shutdown()
    assert is_daemon


def test_calls_run_side_by_side_up_to_the_limit_and_others_wait() -> None:
    gate, running = threading.Event(), threading.Semaphore(0)

    def wait() -> bool:
        running.release()
        return gate.wait(PATIENCE_S)

    pool = DaemonThreads(2, "test")
    calls = [pool.submit(wait) for _ in range(5)]
    assert running.acquire(timeout=PATIENCE_S)
    assert running.acquire(timeout=PATIENCE_S)
    assert not running.acquire(blocking=False)
    gate.set()
    assert [call.result(PATIENCE_S) for call in calls] == [True] * 5
    pool.shutdown()


def test_a_failure_is_the_callers_and_ends_no_thread() -> None:
    pool = DaemonThreads(1, "test")
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result(PATIENCE_S)
    assert pool.submit(lambda: 7).result(PATIENCE_S) == 7
    pool.shutdown()


def test_waiting_calls_are_cancelled_and_new_ones_refused_when_it_is_shut_down() -> None:
    gate, begun = threading.Event(), threading.Event()

    def wait() -> bool:
        begun.set()
        return gate.wait(PATIENCE_S)

    pool = DaemonThreads(1, "test")
    running, waiting = pool.submit(wait), pool.submit(wait)
    assert begun.wait(PATIENCE_S)
    pool.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(RuntimeError, match="'test'"):
        pool.submit(wait)
    with pytest.raises(CancelledError):
        waiting.result(PATIENCE_S)
    gate.set()
    assert running.result(PATIENCE_S)
    pool.shutdown()


def test_threads_keep_nothing_of_calls_that_have_ended_and_end_with_their_pool() -> None:
    class Held:
        def call(self) -> Held:
            return self

    pool = DaemonThreads(1, "test")
    held = Held()
    alive = weakref.ref(held)
    assert pool.submit(held.call).result(PATIENCE_S) is held
    pool.submit(lambda: None).result(PATIENCE_S)
    del held
    assert alive() is None
    (thread,) = pool._threads
    del pool
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
