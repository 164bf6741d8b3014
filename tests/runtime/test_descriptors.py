"""File descriptors: the limit is raised as far as it may be, and some are kept from clients."""

import resource

import pytest

from streammeta.controller.monitoring.http import http_listener
from streammeta.controller.peers import server as peers
from streammeta.controller.process import operating_system
from streammeta.controller.process.operating_system import connections_within, raise_limit
from streammeta.tls import listener


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1_024, 4_096, 4_096),
        (4_096, 4_096, None),
        (1_024, resource.RLIM_INFINITY, 1 << 20),
        (1_024, 1 << 30, 1 << 20),
        (1 << 29, 1 << 30, None),
    ],
)
def test_the_limit_is_raised_to_what_may_be(
    soft: int, hard: int, raised: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: made.append(limits))
    assert raise_limit() == (soft if raised is None else raised)
    assert made == ([] if raised is None else [(raised, hard)])


def test_connections_leave_room_for_the_log_and_the_peers() -> None:
    assert connections_within(1 << 20, 4_096, 1) == 4_096
    assert connections_within(1_024, 4_096, 1) == 1_024 - operating_system.DESCRIPTORS_KEPT
    assert connections_within(1_024, 4_096, 2) == (1_024 - operating_system.DESCRIPTORS_KEPT) // 2
    assert connections_within(64, 4_096, 1) == operating_system.CONNECTIONS_MIN


def test_connections_leave_room_for_those_of_http_too() -> None:
    kept = operating_system.DESCRIPTORS_KEPT + operating_system.DESCRIPTORS_FOR_HTTP
    assert connections_within(1_024, 4_096, 1, serves_http=True) == 1_024 - kept
    assert connections_within(1 << 20, 4_096, 1, serves_http=True) == 4_096
    assert connections_within(300, 4_096, 1, serves_http=True) == operating_system.CONNECTIONS_MIN


def test_what_is_kept_is_more_than_the_other_listeners_take() -> None:
    of_http = http_listener.CONNECTIONS_MAX + listener.HANDSHAKES_MAX
    of_peers = peers.CONNECTIONS_MAX + listener.HANDSHAKES_MAX
    assert of_http <= operating_system.DESCRIPTORS_FOR_HTTP
    assert of_peers + 64 <= operating_system.DESCRIPTORS_KEPT, (
        "64 are for files, the bucket and calls of peers"
    )
