"""Signals to stop: during the start, again during a stop, and once more."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streammeta.client.parts import ControllerClient
from streammeta.rpc.connections import client_channel
from streammeta.v1 import metadata_pb2
from tests.kit.real_cluster import (
    STEADY,
    controller_command,
    format_data,
    leader_of,
    running_cluster,
)
from tests.kit.waiting import until

pytestmark = pytest.mark.process

WATCH = "/streammeta.v1.MetadataService/Watch"

STARTING = """
import os, signal, sys
from streammeta.controller.journal.journal import Journal
from streammeta.storage.object_store.local import LocalObjectStore
from streammeta.cli.main import main

name, count = sys.argv[1], int(sys.argv[2])
of = {"open": Journal, "check": LocalObjectStore}[name]
known = getattr(of, name)

def signalled(*given, **named):
    done = known(*given, **named)
    for _ in range(count):
        os.kill(os.getpid(), signal.SIGTERM)
    return done

setattr(of, name, staticmethod(signalled) if name == "open" else signalled)
sys.argv[1:] = sys.argv[3:]
main()
"""
"""A controller that gets signals within a step of its start."""


def started(root: Path, step: str, count: int) -> subprocess.CompletedProcess[str]:
    words = controller_command(root)[2:]
    return subprocess.run(
        [sys.executable, "-c", STARTING, step, str(count), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def events(log: str) -> list[str]:
    return [json.loads(line)["event"] for line in log.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("step", ["check", "open"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_start_that_is_to_end_serves_nothing_and_ends_well(
    tmp_path: Path, step: str, count: int
) -> None:
    format_data(tmp_path)
    ended = started(tmp_path, step, count)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert "controller_ready" not in events(ended.stderr)
    assert {"controller_stopping", "controller_stopped"} <= set(events(ended.stderr))


def test_a_third_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    format_data(tmp_path)
    ended = started(tmp_path, "open", 3)
    assert ended.returncode == -signal.SIGTERM
    assert "controller_stopped" not in events(ended.stderr)


async def test_a_second_signal_hurries_a_stop_that_waits_for_a_caller(tmp_path: Path) -> None:
    with running_cluster(tmp_path, options=STEADY) as cluster:
        leader = await asyncio.to_thread(leader_of, cluster)
        child = cluster.children[leader]

        def said() -> list[str]:
            return events(child.log_path.read_text())

        async with client_channel(cluster.endpoints[leader - 1]) as channel:
            watching: Any = channel.unary_stream(WATCH)
            watch = watching(metadata_pb2.WatchRequest().SerializeToString())
            await watch.read()
            child.process.send_signal(signal.SIGTERM)
            await until(lambda: "controller_stopping" in said(), "the stop")
            child.process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(child.process.wait, 20) == 0
            assert child.stop() == 0
        assert "controller_stop_hurried" in said()
        assert said()[-1] == "controller_stopped"
        async with ControllerClient(cluster.endpoints) as client:
            assert client is not None
            new = await asyncio.to_thread(leader_of, cluster)
        assert new != leader


async def test_a_stop_is_no_warning_to_the_others(tmp_path: Path) -> None:
    with running_cluster(tmp_path, options=STEADY) as cluster:
        leader = await asyncio.to_thread(leader_of, cluster)
        follower = next(each for each in cluster.node_ids if each != leader)
        for node_id in (follower, leader):
            left = [each for each in cluster.node_ids if each not in (follower, node_id)]
            assert await asyncio.to_thread(cluster.children[node_id].stop) == 0
            for each in left:
                lines = cluster.children[each].log_path.read_text().splitlines()
                levels = {json.loads(line)["level"] for line in lines if line.startswith("{")}
                assert levels <= {"info", "debug"}, lines
