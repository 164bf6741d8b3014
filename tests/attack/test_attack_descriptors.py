"""Connections that want every file descriptor of a controller: it keeps enough to go on."""

import contextlib
import socket
import sys
from pathlib import Path

import pytest

from streammeta.cli.client import ControllerClient
from streammeta.cli.local_cluster import start_child
from streammeta.v1 import admin_pb2
from streammeta.v1.admin_pb2_grpc import AdminServiceStub
from tests.kit.real_cluster import controller_command, format_data, put, values

pytestmark = pytest.mark.process

_LIMIT = 320
_CONNECTIONS = 600


def test_a_controller_with_few_descriptors_writes_and_takes_snapshots_amid_a_flood(
    tmp_path: Path,
) -> None:
    format_data(tmp_path)
    command = controller_command(tmp_path)
    endpoint = command[command.index("--listen") + 1]
    limited = f'ulimit -Sn 128; ulimit -Hn {_LIMIT}; exec "$@"'
    child = start_child(
        "limited", ["sh", "-c", limited, "sh", sys.executable, *command], tmp_path / "limited.log"
    )
    host, _, port = endpoint.rpartition(":")
    with contextlib.ExitStack() as stack:
        stack.callback(child.kill)
        child.wait_ready()
        client = stack.enter_context(ControllerClient([endpoint], timeout_s=30))
        put(client, "before", "1")
        for _ in range(_CONNECTIONS):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
        put(client, "amid", "2")
        taken = client.call(
            lambda channel: AdminServiceStub(channel).TakeSnapshot,
            admin_pb2.TakeSnapshotRequest(),
        )
        assert taken.end_offset > 0
        assert values(client) == {"before": "1", "amid": "2"}
        assert child.process.poll() is None
