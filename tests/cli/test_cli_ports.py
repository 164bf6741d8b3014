"""Ports that are given to clusters on loopback."""

import subprocess
import sys

import pytest

from streammeta.cli.local import local_cluster

_ELSEWHERE = """
from streammeta.cli.local import local_cluster
local_cluster._STEADY_PORTS = range({first}, {end})
print(*local_cluster.free_ports(10))
"""


def test_no_port_is_given_twice_before_its_process_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = local_cluster.free_ports(1)
    monkeypatch.setattr(local_cluster, "_STEADY_PORTS", range(first, first + 60))
    given = {first, *local_cluster.free_ports(10), *local_cluster.free_ports(10)}
    code = _ELSEWHERE.format(first=first, end=first + 60)
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert len(given) == 21
    assert len(found) == 10
    assert given.isdisjoint(map(int, found))
