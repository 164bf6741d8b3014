"""Cost of monitoring: commits during scrapes and open pages, and the times of answers.

Three controllers with the product's timeouts have metadata of many streams. In alternating turns a
client commits at a bounded rate, alone, and while each controller is scraped every second and ten
pages of the leader refresh every second, as an open page does. Then each page, the metrics, and the
image's probe are requested one after the other. At last a headless browser, if there is one, opens
the overview with an empty cache and measures its first paint.
"""

import asyncio
import contextlib
import re
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

import aiohttp

from scripts.benchmarks.cluster import find_leader, http_options, running_cluster
from scripts.benchmarks.figures import Outcome, Progress, Table, Target, median, percentile
from scripts.benchmarks.options import option, seconds
from scripts.benchmarks.streammeta_client import fill
from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client.controllers.methods import PUT_KVS
from streammeta.client.parts import ControllerClient
from streammeta.v1 import kv_pb2
from tests.kit.tools import program
from tests.monitoring.browser import PROGRAMS, Tab, browsing

OPEN_PAGES = 10
COMMITS_A_SECOND = 10
EVERY_S = 1.0
PAGES = ("/", "/quorum", "/nodes", "/streams", "/deletions", "/compaction", "/reconcile")
FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
"""Milliseconds from the start of the navigation to the first text or picture, in JavaScript."""

_TIMEOUT_S = 20.0
_DOCKERFILE = Path(__file__).resolve().parent.parent.parent / "docker" / "Dockerfile"
_PROBE = re.compile(r'^ +CMD \["python", "-IS", "-c", "(.+)"\]$', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Streams in the metadata, turns, and requests for each page."""

    streams: int = option(1_000_000, "streams in the metadata")
    turns: int = option(4, "turns with and without scrapes and pages")
    seconds: float = seconds(20.0, "of each turn")
    requests: int = 10


async def measure(root: Path, settings: Settings, progress: Progress) -> Outcome:
    """Measure commits, pages, the probe and the first paint."""
    ports, own_options = http_options()
    with running_cluster(root, own_options=own_options) as cluster:
        progress(f"monitoring: {settings.streams} streams")
        before = await find_leader(cluster)
        await fill(before.endpoint, settings.streams)
        quiet, watched = await _turns(cluster, ports, before.node_id, settings, progress)

        progress("monitoring: pages and probe")
        port = ports[before.node_id]
        pages = {path: _times_ms(port, path, settings) for path in (*PAGES, "/metrics")}
        facts = {
            "scrape_lines": _get(port, "/metrics").count(b"\n"),
            "probe_cpu_ms": _probe_cpu_ms(port, settings),
        }

        progress("monitoring: first paint")
        paints_ms: list[float] = []
        if program(*PROGRAMS) is None:
            progress(f"monitoring: no {PROGRAMS[0]} on PATH; run ./scripts/fetch_tools")
        else:
            at = f"127.0.0.1:{port}"
            paints_ms = await first_paints_ms(root / "browser", at, settings.requests)
        after = await find_leader(cluster)
        facts["elections"] = after.epoch - before.epoch
    return _outcome((median(quiet), median(watched)), pages, paints_ms, facts)


async def _turns(
    cluster: LocalCluster,
    ports: Mapping[int, int],
    leader: int,
    settings: Settings,
    progress: Progress,
) -> tuple[list[float], list[float]]:
    """Return the p99 of commits of each turn in milliseconds, alone and while observed."""
    p99s: tuple[list[float], list[float]] = ([], [])
    for turn in range(2 * settings.turns):
        is_watched = turn % 2 == 1
        progress(f"monitoring: commits, turn {turn + 1} of {2 * settings.turns}")
        async with contextlib.AsyncExitStack() as stack:
            if is_watched:
                await stack.enter_async_context(_onlookers(ports, leader))
            latencies_s = await _commit_steadily(cluster.endpoints, settings.seconds)
            p99s[is_watched].append(percentile(latencies_s, 0.99) * 1000)
    return p99s


async def _commit_steadily(endpoints: Sequence[str], seconds: float) -> list[float]:
    """Put a value at most ten times a second, and return the seconds that each took."""
    item = kv_pb2.KVToPut(namespace="bench", key="bystander", value=bytes(100), overwrite=True)
    latencies_s: list[float] = []
    async with ControllerClient(endpoints) as client:
        ends = time.monotonic() + seconds
        while (asked := time.monotonic()) < ends:
            await client.call(PUT_KVS, kv_pb2.PutKVsRequest(items=[item]))
            latencies_s.append(time.monotonic() - asked)
            await asyncio.sleep(max(0.0, 1 / COMMITS_A_SECOND - latencies_s[-1]))
    return latencies_s


@contextlib.asynccontextmanager
async def _onlookers(ports: Mapping[int, int], leader: int) -> AsyncIterator[None]:
    """Scrape all controllers and keep pages open until the block ends. A failed request raises."""
    urls = [f"http://127.0.0.1:{port}/metrics" for port in ports.values()]
    pages = [PAGES[number % len(PAGES)] for number in range(OPEN_PAGES)]
    urls += [f"http://127.0.0.1:{ports[leader]}{path}" for path in pages]

    async def ask(session: aiohttp.ClientSession, number: int, url: str) -> None:
        # Real scrapers and pages are not synchronized.
        await asyncio.sleep(EVERY_S * number / len(urls))
        while True:
            async with session.get(url) as answer:
                answer.raise_for_status()
                await answer.read()
            await asyncio.sleep(EVERY_S)

    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
        asking = [group.create_task(ask(session, *item)) for item in enumerate(urls)]
        yield
        for task in asking:
            task.cancel()


def _get(port: int, path: str) -> bytes:
    connection = HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise OSError(f"{path}: status {answer.status}")
        return body


def _times_ms(port: int, path: str, settings: Settings) -> list[float]:
    """Return the times of requests over new connections, to the last byte."""
    times: list[float] = []
    for _ in range(settings.requests):
        began = time.perf_counter()
        _get(port, path)
        times.append((time.perf_counter() - began) * 1000)
    return times


def _probe_cpu_ms(port: int, settings: Settings) -> float:
    """Return the median CPU time of the image's probe, a separate process."""
    found = _PROBE.search(_DOCKERFILE.read_text())
    if found is None:
        raise OSError(f"{_DOCKERFILE}: no probe by `python -IS -c`")
    # The image's probe is JSON within a Dockerfile, and asks the default port.
    program = found[1].replace("\\\\", "\\").replace("9092", str(port))
    costs: list[float] = []
    for _ in range(settings.requests):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-IS", "-c", program], check=True, timeout=_TIMEOUT_S)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        costs.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return median(costs) * 1000


async def first_paints_ms(profile: Path, endpoint: str, count: int) -> list[float]:
    """Return the times of first paints of the overview, each with an empty cache."""
    async with browsing(profile) as tab:
        await tab.call("Network.enable")
        await tab.call("Network.setCacheDisabled", cacheDisabled=True)
        return [await _first_paint_ms(tab, endpoint) for _ in range(count)]


async def _first_paint_ms(tab: Tab, endpoint: str) -> float:
    await tab.open("about:blank")
    await tab.until("location.href == 'about:blank'", "the last page is closed")
    await tab.open(f"http://{endpoint}/")
    painted = f"location.host == '{endpoint}' && ({FIRST_PAINT}) != null"
    await tab.until(painted, "the overview is painted")
    return float(await tab.value(FIRST_PAINT))


def _outcome(
    p99_ms: tuple[float, float],
    pages: Mapping[str, Sequence[float]],
    paints_ms: Sequence[float],
    facts: Mapping[str, float],
) -> Outcome:
    quiet_ms, watched_ms = p99_ms
    slowest = max(median(times) for path, times in pages.items() if path != "/metrics")
    painted = {"first paint of /": paints_ms} if paints_ms else {}
    paint_target = "first paint of the overview, p50 ms"
    rows = tuple(
        (path, round(median(times), 1), round(max(times), 1))
        for path, times in {**pages, **painted}.items()
    )
    commits = (("nobody looks", round(quiet_ms, 2)), ("observed", round(watched_ms, 2)))

    return Outcome(
        benchmark="monitoring",
        figures={"quiet_p99_ms": quiet_ms, "watched_p99_ms": watched_ms, **facts},
        details={
            "pages_ms": {path: list(times) for path, times in pages.items()},
            "first_paints_ms": list(paints_ms),
        },
        tables=[
            Table(title="Commits while observed", columns=("turns", "p99 ms"), rows=commits),
            Table(
                title="Pages of the leader, to the last byte",
                columns=("path", "p50 ms", "max ms"),
                rows=rows,
            ),
        ],
        targets=[
            Target("p99 of commits while observed, ms more", "at most", 5, watched_ms - quiet_ms),
            Target("the slowest page, p50 ms", "at most", 300, slowest),
            *(Target(paint_target, "at most", 300, median(at)) for at in painted.values()),
            Target("lines of a scrape", "at most", 1_500, facts["scrape_lines"]),
            Target("CPU of the image's probe, ms", "at most", 30, facts["probe_cpu_ms"]),
            Target("elections", "at most", 0, facts["elections"]),
        ],
    )
