"""Floods, silence and garbage at a leader's listeners, in plain text and over TLS.

Meanwhile the leader stays leader, the heartbeats and writes of a broker go on, and its memory stays
what it is. `--slow` attacks for longer, and with 5,000 connections.
"""

import asyncio
import resource
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.attack.hostile import ON_CLIENTS, ON_PEERS, Attack, Target, idle
from tests.attack.hostile_http import ON_HTTP, silent
from tests.attack.scene import Scene, shown
from tests.monitoring.http_calls import get

pytestmark = pytest.mark.process

_SECONDS = 1.0
_SLOW_SECONDS = 20.0
_CONNECTIONS, _MANY = 300, 5_000
_IDLE_AT_HTTP = 1_000
_PROBER = "127.0.0.3"
"""Host of probes, another one than the attackers'."""


def _seconds(request: pytest.FixtureRequest) -> float:
    return _SLOW_SECONDS if request.config.getoption("slow") else _SECONDS


@pytest.mark.parametrize("attack", ON_CLIENTS, ids=lambda attack: attack.__name__)
async def test_a_leader_withstands_attacks_on_its_port_for_clients(
    scene: Scene, attack: Attack, request: pytest.FixtureRequest
) -> None:
    leader, _ = scene.epoch()
    endpoint = scene.cluster.endpoints[leader - 1]
    await scene.withstands(attack, endpoint, leader, seconds=_seconds(request))


@pytest.mark.parametrize("attack", ON_PEERS, ids=lambda attack: attack.__name__)
async def test_a_leader_withstands_attacks_on_its_port_for_peers(
    scene: Scene, attack: Attack, request: pytest.FixtureRequest
) -> None:
    leader, _ = scene.epoch()
    endpoint = scene.cluster.peer_endpoints[leader - 1]
    await scene.withstands(attack, endpoint, leader, seconds=_seconds(request))


@pytest.mark.parametrize(
    "count", [_CONNECTIONS, pytest.param(_MANY, marks=pytest.mark.slow)], ids=str
)
async def test_a_leader_withstands_many_connections_that_say_nothing(
    scene: Scene, count: int
) -> None:
    """Those above its bound are closed; they come again all the time."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 3 * _MANY), hard))
    leader, _ = scene.epoch()
    endpoint = scene.cluster.endpoints[leader - 1]
    seconds = _SECONDS + count / 200
    await scene.withstands(idle, endpoint, leader, seconds=seconds, connections=count)


@asynccontextmanager
async def probed(scene: Scene, endpoint: str) -> AsyncIterator[None]:
    """Probe a controller from another host, and require that each probe is answered."""
    stop = threading.Event()
    answered = 0

    def probe() -> None:
        nonlocal answered
        while not stop.wait(0.1) or not answered:
            assert get(endpoint, "/livez", scene.monitor, source=_PROBER) == (200, "ok\n")
            answered += 1

    probing = asyncio.create_task(asyncio.to_thread(probe))
    try:
        yield
    finally:
        stop.set()
        await probing


@pytest.mark.parametrize("attack", ON_HTTP, ids=lambda attack: attack.__name__)
async def test_a_leader_withstands_attacks_on_its_port_for_http(
    scene: Scene, attack: Attack, request: pytest.FixtureRequest
) -> None:
    """Meanwhile it answers probes of other hosts."""
    leader, _ = scene.epoch()
    endpoint = scene.http_endpoints[leader - 1]
    target = Target(endpoint, shown(scene.monitor), connections=32)
    async with probed(scene, endpoint):
        await scene.outlasts(attack, target, leader, _seconds(request))


async def test_a_leader_withstands_many_connections_to_http_that_say_nothing(scene: Scene) -> None:
    leader, _ = scene.epoch()
    endpoint = scene.http_endpoints[leader - 1]
    target = Target(endpoint, shown(scene.monitor), connections=_IDLE_AT_HTTP)
    async with probed(scene, endpoint):
        await scene.outlasts(silent, target, leader, _SECONDS)
