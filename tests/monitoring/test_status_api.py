"""Status and history of real controllers, with a leader, without one, and over TLS."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streammeta.cli.framework.client import ControllerClient
from tests.kit.certificates import Authority
from tests.kit.real_cluster import FAST, put
from tests.kit.waiting import wait_until
from tests.monitoring.http_calls import get
from tests.monitoring.planes import Planed, Planes, running

pytestmark = pytest.mark.process

STATUS = "/api/status.json"


def status(planed: Planed, node_id: int) -> dict[str, Any]:
    code, text = planed.page(STATUS, node_id)
    assert code == 200, text
    document: dict[str, Any] = json.loads(text)
    return document


def names_of_alarms(planed: Planed, node_id: int) -> set[str]:
    return {each["name"] for each in status(planed, node_id)["alarms"]}


def is_well(seen: dict[str, Any]) -> bool:
    """Whether a status tells of three controllers that answer, have all, and hold one key."""
    controllers = [(each["node_id"], each["answers"]) for each in seen["controllers"]]
    has_all = [each["lag"] for each in seen["quorum"]["voters"]] == [0, 0, 0]
    is_led = seen["quorum"]["leader_id"] in (1, 2, 3)
    all_answer = controllers == [(1, True), (2, True), (3, True)]
    return has_all and is_led and all_answer and not seen["alarms"] and seen["map"]["keys"] == 1


@pytest.fixture
def plain(authority: Authority, tmp_path: Path) -> Iterator[Planed]:
    """Give controllers in plain text."""
    with running(tmp_path, authority, Planes(False, False, False), FAST) as planed:
        planed.wait_ready()
        yield planed


def test_every_controller_tells_of_all_with_a_leader_and_without_a_majority(plain: Planed) -> None:
    planed = plain
    with ControllerClient(planed.cluster.endpoints) as client:
        put(client, "key", "value")
    for node_id in planed.cluster.node_ids:
        wait_until(lambda: is_well(status(planed, node_id)), "all is well")  # noqa: B023

    leader = status(planed, 1)["quorum"]["leader_id"]
    left = [node_id for node_id in planed.cluster.node_ids if node_id != leader]
    planed.cluster.children[leader].kill()

    def is_replaced() -> bool:
        seen = status(planed, left[0])
        has_other = seen["quorum"]["has_leader"] and seen["quorum"]["leader_id"] != leader
        return has_other and names_of_alarms(planed, left[0]) == {"controller_silent"}

    wait_until(is_replaced, "another leads, and the dead one is named")
    planed.cluster.children[left[1]].kill()
    lost = {"no_leader", "controller_silent"}
    wait_until(lambda: names_of_alarms(planed, left[0]) >= lost, "the loss is told")
    assert status(planed, left[0])["map"]["keys"] == 1, "the map is shown without a leader"


def test_the_history_has_a_sample_a_second(plain: Planed) -> None:
    def samples(query: str) -> dict[str, Any]:
        code, text = plain.page(f"/api/series.json?{query}")
        assert code == 200, text
        document: dict[str, Any] = json.loads(text)
        return document

    wait_until(lambda: len(samples("names=epoch")["times"]) >= 3, "there are samples")
    seen = samples("names=epoch,commit_p99")
    assert list(seen["series"]) == ["epoch", "commit_p99"]
    assert seen["series"]["epoch"][-1] >= 1
    assert seen["units"]["commit_p99"] == "ms"
    later = samples(f"names=epoch&since={seen['times'][-2]}")
    assert later["times"][0] == seen["times"][-1]
    assert samples("step=60&names=epoch")["times"] == []
    for query in ("names=epoch,nothing", "step=2", "since=x"):
        assert plain.page(f"/api/series.json?{query}")[0] == 400


def test_over_tls_the_status_is_for_roles_and_controllers_ask_by_their_certificate(
    authority: Authority, tmp_path: Path
) -> None:
    with running(tmp_path, authority, Planes(), FAST) as planed:
        planed.wait_ready()
        wait_until(lambda: not names_of_alarms(planed, 1), "all answer")
        at = planed.http_endpoints[0]
        for role, code in (("broker/7", 403), ("reader/r", 200), ("admin/alice", 200)):
            assert get(at, STATUS, authority.issue(role))[0] == code


def test_a_port_in_plain_text_beside_tls_has_no_status(
    authority: Authority, tmp_path: Path
) -> None:
    with running(tmp_path, authority, Planes(http=False), FAST) as planed:
        planed.wait_ready()
        assert planed.page("/metrics")[0] == 200
        assert planed.page(STATUS)[0] == 404
