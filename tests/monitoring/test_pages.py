"""Status pages of real controllers: as text, and in a browser where there is one."""

from __future__ import annotations

import asyncio
import http.client
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest

from scripts.benchmarks.monitoring import first_paints_ms
from streammeta.client import StreamClient
from streammeta.client.controllers.methods import REGISTER_NODE, Method
from streammeta.client.parts import ControllerClient
from streammeta.v1 import admin_pb2, common_pb2, nodes_pb2
from tests.kit.certificates import Authority
from tests.kit.real_cluster import FAST
from tests.kit.tools import needs
from tests.kit.waiting import wait_until
from tests.monitoring.browser import PROGRAMS, browsing
from tests.monitoring.http_calls import get
from tests.monitoring.planes import Planed, Planes, limit_files, running

pytestmark = pytest.mark.process

PATHS = (
    *("/", "/quorum", "/nodes", "/streams", "/deletions", "/compaction", "/reconcile"),
    "/build",
)
SCRIPT = "<script>document.title='owned'</script>"

TRANSFER_LEADERSHIP = Method(
    admin_pb2.TransferLeadershipRequest, admin_pb2.TransferLeadershipResponse
)

needs_browser = needs(*PROGRAMS)


@pytest.fixture(scope="module")
def written(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planed]:
    """Give controllers in plain text, with a stream whose tag is a script."""
    root = tmp_path_factory.mktemp("pages")
    with running(root, authority, Planes(False, False, False), FAST) as planed:
        planed.wait_ready()

        asyncio.run(commit(planed))
        yield planed


async def commit(planed: Planed) -> None:
    """Append to a new stream whose tag is a script."""
    bucket = planed.cluster.store_uri
    async with await StreamClient.open(planed.cluster.endpoints, bucket, node_id=1007) as client:
        (stream,) = await client.create_streams([{"topic": SCRIPT}])
        (await client.open_streams([stream])).require_all()
        await client.append_many(stream, [b"a", b"b"])


def leader_of(planed: Planed) -> int:
    found = [n for n in planed.cluster.node_ids if planed.metrics(n)["streammeta_quorum_is_leader"]]
    return found[0]


def test_every_page_is_there_and_a_script_in_a_tag_is_text(written: Planed) -> None:
    for path in PATHS:
        status, text = written.page(path)
        assert status == 200
        assert "<main" in text
        assert SCRIPT not in text
    for path in ("/streams", "/stream?id=0"):
        wait_until(lambda: "&lt;script&gt;" in written.page(path)[1], "it is shown")  # noqa: B023
    objects = "<caption>Objects to read from"
    wait_until(lambda: objects in written.page("/stream?id=0")[1], "its object is shown")
    largest = "<caption>Most bytes in stream objects"
    wait_until(lambda: largest in written.page("/streams")[1], "the stream with bytes is shown")
    assert "There is no stream 77" in written.page("/stream?id=77")[1]


def test_streams_are_found_by_tag_and_a_script_in_it_is_text(written: Planed) -> None:
    query = urlencode({"tag": f"topic={SCRIPT}"})
    wait_until(lambda: "/stream?id=0" in written.page(f"/streams?{query}")[1], "it is found")
    assert SCRIPT not in written.page(f"/streams?{query}")[1]
    assert "/stream?id=0" not in written.page("/streams?tag=topic=other")[1]
    assert "/stream?id=0" not in written.page(f"/streams?{query}&after=1")[1]

    status, text = written.page(f"/api/streams.json?{query}")
    found = json.loads(text)
    assert (status, found["next_after"]) == (200, None)
    assert [stream["stream_id"] for stream in found["streams"]] == [0]
    assert found["streams"][0]["tags"] == {"topic": SCRIPT}


@pytest.mark.parametrize(
    "path",
    [
        *("/streams?tag=topic", "/streams?tag=a=b&after=x", "/api/streams.json"),
        *("/api/streams.json?tag=topic", "/api/streams.json?tag=a=" + 2_000 * "x"),
    ],
)
def test_a_wrong_look_up_by_tag_is_rejected(written: Planed, path: str) -> None:
    assert written.page(path)[0] == 400


@pytest.mark.parametrize("query", ["id=x", "id=-1", "id=" + 30 * "9", "id=%D9%A1"])
def test_ids_are_numbers(written: Planed, query: str) -> None:
    assert written.page(f"/stream?{query}")[0] == 400


def test_pages_are_read_only_and_say_what_a_browser_may_load(written: Planed) -> None:
    at = written.http_endpoints[0]
    for method, status in (("HEAD", 200), ("POST", 405), ("DELETE", 405), ("PUT", 405)):
        assert get(at, "/", None, method)[0] == status
    connection = http.client.HTTPConnection(at, timeout=60)
    connection.request("GET", "/streams")
    answer = connection.getresponse()
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'self';")
    assert "unsafe" not in answer.headers["Content-Security-Policy"]
    assert b"<script>" not in answer.read(), "no script stands in a page"
    connection.close()


@needs_browser
async def test_a_browser_shows_pages_without_errors_and_asks_no_other_host(
    written: Planed, tmp_path: Path
) -> None:
    at = written.http_endpoints[0]
    async with browsing(tmp_path) as tab:
        for path in (*PATHS, "/stream?id=0"):
            await tab.open(f"http://{at}{path}", width=375, scheme="dark")
            there = f"location.pathname == '{path.partition('?')[0]}' && document.readyState"
            await tab.until(f"{there} == 'complete' && !!document.querySelector('h1')", path)
            wide = await tab.value("document.documentElement.scrollWidth")
            assert wide <= 375, f"{path} fits a phone"
            head = "getComputedStyle(document.querySelector('td'), '::before').content"
            has_cells = await tab.value("!!document.querySelector('td')")
            assert not has_cells or await tab.value(head) not in ("none", '""')
            assert "owned" not in await tab.value("document.title")
        await tab.open(f"http://{at}/")
        await tab.until("document.querySelectorAll('canvas').length == 4", "charts are drawn")
        assert await tab.value("timeText(1e9, false)") == "01:46"  # UTC, whatever the zone here
        assert await tab.value("timeText(1e9 + 43200, true)") == "13:46:40"
        await tab.press("Tab")
        assert await tab.value("document.activeElement.className") == "skip"
    assert tab.errors == []
    assert tab.hosts == {at}


@needs_browser
async def test_the_last_hour_is_drawn_and_in_a_table_and_goes_on_with_another_leader(
    written: Planed, tmp_path: Path
) -> None:
    """The page of a controller that led for a part of the hour has the commits of that part."""
    former = leader_of(written)
    later = next(node_id for node_id in written.cluster.node_ids if node_id != former)
    rows = (
        "[...document.querySelectorAll('caption')]"
        ".find(each => each.innerText.startsWith('Commits of the last hour'))"
        "?.parentElement.querySelectorAll('tbody tr')"
    )
    cells = f"[...({rows} ?? [])].map(row => [...row.cells].map(cell => cell.innerText))"
    led = f"{cells}.some(row => row[5] != '0 %')"
    counted = f"{cells}.some(row => row[1] != '0' && row[3].endsWith('ms') && row[5] != '0 %')"
    async with browsing(tmp_path) as tab:
        await tab.open(f"http://{written.http_endpoints[later - 1]}/", width=375)
        await tab.until(f"{cells}.length > 0 && !{led}", "it has an hour and did not lead")
        async with ControllerClient(written.cluster.endpoints) as client:
            wanted = admin_pb2.TransferLeadershipRequest(to_node_id=later)
            await client.call(TRANSFER_LEADERSHIP, wanted)
        await commit(written)
        await tab.until(counted, "it leads and counts", timeout_s=60)
        await tab.value("document.querySelector('[data-step=\"10\"]').click()")
        drawn = "charts.every(each => each.plot?.data[0].length >= 2) && samples.times[1] % 10 == 0"
        await tab.until(f"step == 10 && {drawn}", "tens of seconds are drawn", timeout_s=60)
        assert await tab.value("document.documentElement.scrollWidth") <= 375
        await tab.open(f"http://{written.http_endpoints[former - 1]}/")
        await tab.until(
            f"{cells}.some(row => row[1] != '0' && row[5] != '0 %')", "it keeps its part"
        )
    assert tab.errors == []


@needs_browser
async def test_a_first_paint_is_measured_for_each_opening(written: Planed, tmp_path: Path) -> None:
    paints_ms = await first_paints_ms(tmp_path, written.http_endpoints[0], count=3)
    assert len(paints_ms) == 3
    assert min(paints_ms) > 0


@needs_browser
async def test_two_thousand_brokers_are_shown_page_by_page(written: Planed, tmp_path: Path) -> None:
    brokers = range(10_000, 12_000)
    async with ControllerClient(written.cluster.endpoints) as client:
        for node_id in brokers:
            node = common_pb2.NodeIdentity(node_id=node_id, node_epoch=1)
            await client.call(REGISTER_NODE, nodes_pb2.RegisterNodeRequest(node=node))
    at, shown = written.http_endpoints[leader_of(written) - 1], set[str]()
    async with browsing(tmp_path) as tab:
        path: str | None = "/nodes"
        while path:
            await tab.open(f"http://{at}{path}", width=375)
            there = f"location.pathname + location.search == '{path}' && document.readyState"
            await tab.until(f"{there} == 'complete'", path)
            assert await tab.value("document.documentElement.scrollWidth") <= 375
            cells = (
                "[...document.querySelectorAll('tbody th, tbody td')].map(each => each.innerText)"
            )
            shown.update(await tab.value(cells))
            path = await tab.value("document.querySelector('a[rel=next]')?.getAttribute('href')")
    assert shown >= {str(broker) for broker in brokers}
    assert tab.errors == []


@needs_browser
async def test_an_open_page_shows_the_loss_of_the_leader_and_of_the_majority(
    authority: Authority, tmp_path: Path
) -> None:
    with running(tmp_path, authority, Planes(False, False, False), FAST) as planed:
        await asyncio.to_thread(planed.wait_ready)
        leader = leader_of(planed)
        left = [node_id for node_id in planed.cluster.node_ids if node_id != leader]
        alarms = "document.getElementById('alarms').innerText"
        async with browsing(tmp_path / "profile") as tab:
            await tab.open(f"http://{planed.http_endpoints[left[0] - 1]}/")
            await tab.until(f"{alarms} == ''", "all is well")
            last = planed.cluster.children[left[1]].pid
            limit_files(last, 1)
            await asyncio.to_thread(planed.write, "key")
            full = f"The disk of controller {left[1]} is full"
            await tab.until(f"{alarms}.includes('{full}')", "the full disk is told")
            limit_files(last, resource.RLIM_INFINITY)
            await tab.until(f"{alarms} == ''", "there is room again")
            planed.cluster.children[leader].kill()
            silent = f"Controller {leader} does not answer"
            await tab.until(f"{alarms}.includes('{silent}')", "the dead one is named")
            leads = "document.getElementById('cards').innerText.includes('controller %d')"
            await tab.until(" || ".join(leads % node_id for node_id in left), "another leads")
            planed.cluster.children[left[1]].kill()
            await tab.until(f"{alarms}.includes('No leader answers')", "the loss is told")
            planed.cluster.children[left[0]].kill()
            gone = "!document.getElementById('offline').hidden"
            await tab.until(gone, "what is shown is old")
