"""Scenes of the blocking client that need a process of their own: forks, Ctrl-C, threads.

`python -m tests.broker_client.sync_child SCENE ENDPOINT BUCKET` prints `ok` at the end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest

from streammeta.client.errors import ForkedProcessError
from streammeta.client.sync import StreamClient


def run_forked(work: Callable[[], None]) -> int:
    """Return the exit code of a forked process that runs `work`, 1 after an exception."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # a child that hangs ends
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the parent reports the exit code
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def open_in_children(endpoint: str, bucket: str) -> None:
    """Each forked worker opens its own client, as the parent never had one."""

    def work(node_id: int) -> None:
        with StreamClient.open([endpoint], bucket, node_id=node_id) as client:
            stream = client.create_stream(worker=str(node_id))
            stream.append([b"1", b"2"])
            assert [record.payload for record in stream] == [b"1", b"2"]

    assert [run_forked(lambda node_id=node_id: work(node_id)) for node_id in (21, 22)] == [0, 0]  # type: ignore[misc]


def use_after_fork(endpoint: str, bucket: str) -> None:
    """A forked process can't use its parent's client, and the parent goes on."""
    with StreamClient.open([endpoint], bucket, node_id=23) as client:
        stream = client.create_stream()

        def work() -> None:
            for call in (client.flush, lambda: StreamClient.open([endpoint], bucket)):
                with pytest.raises(ForkedProcessError, match="forked"):
                    call()
            client.close()  # does nothing, and does not wait

        assert run_forked(work) == 0
        assert stream.append(b"still") == 0


def interrupt(endpoint: str, bucket: str) -> None:
    """Ctrl-C ends a waiting call, and the client stays usable."""
    with StreamClient.open([endpoint], bucket, node_id=24) as client:
        stream = client.create_stream()
        timer = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            next(stream.follow(0))
        timer.join()
        assert stream.append(b"after") == 0


def leave_no_thread(endpoint: str, bucket: str) -> None:
    """`close` ends all threads, and a second one does nothing."""
    client = StreamClient.open([endpoint], bucket, node_id=25)
    client.create_stream().append(b"record")
    client.close()
    client.close()
    # Threads for calls of the store end by themselves, soon after the pools are closed. One thread
    # of gRPC and the pool that all clients share, `blocking`, belong to the process.
    ends_at = time.monotonic() + 60
    while left := [
        thread
        for thread in threading.enumerate()
        if thread is not threading.main_thread()
        and "_poll_wrapper" not in thread.name
        and not thread.name.startswith("blocking")
    ]:
        assert time.monotonic() < ends_at, left
        time.sleep(0.05)


_ALL = (open_in_children, use_after_fork, interrupt, leave_no_thread)
SCENES = {scene.__name__: scene for scene in _ALL}

if __name__ == "__main__":
    SCENES[sys.argv[1]](*sys.argv[2:])
    print("ok")
