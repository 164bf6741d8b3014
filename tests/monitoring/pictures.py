"""Pictures of the status pages for the docs; `python -m tests.monitoring.pictures` makes them.

Three real controllers, a broker that appends, and runs of reconciliation, as Chromium shows them:
light, dark, and on a phone.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from streammeta.cli.local.local_cluster import LocalCluster, free_ports
from streammeta.client import StreamClient
from streammeta.reconcile.run_reporter import report_run
from streammeta.storage.cluster_files.reconcile_runs import Run
from tests.kit.real_cluster import FAST
from tests.kit.waiting import wait_until
from tests.kit.warm_start import start_warm
from tests.monitoring.browser import Tab, browsing
from tests.monitoring.http_calls import get

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
STREAMS = 12
SECONDS = 45
"""Time that the charts show."""

PICTURES = (
    ("status-light.png", "/", 1280, 1180, "light"),
    ("status-dark.png", "/", 1280, 1180, "dark"),
    ("status-phone.png", "/", 390, 844, "light"),
    ("status-reconcile.png", "/reconcile", 1280, 520, "light"),
)


async def _append(cluster: LocalCluster) -> None:
    """Append for a while, each stream at its own rate."""
    async with await StreamClient.open(
        cluster.endpoints, cluster.store_uri, node_id=1007
    ) as client:
        tags = [{"topic": f"orders-{number}"} for number in range(STREAMS)]
        streams = await client.create_streams(tags)
        (await client.open_streams(streams)).require_all()
        ends = time.monotonic() + SECONDS
        while time.monotonic() < ends:
            await asyncio.gather(
                *(
                    client.append_many(stream, [b"x" * 400] * (1 + number))
                    for number, stream in enumerate(streams)
                )
            )


def _tell_runs(cluster: LocalCluster) -> None:
    now_ms = time.time_ns() // 1_000_000
    for age_h, deleted in ((48, 31), (24, 4), (0, 0)):
        run = Run(
            started_ms=now_ms - age_h * 3_600_000 - 8_400,
            ended_ms=now_ms - age_h * 3_600_000,
            kind="round",
            engine="local",
            result="settled",
            problem="",
            succeeded=True,
            keys=2_412 + deleted,
            orphans=deleted,
            orphan_bytes=deleted << 20,
            deleted=deleted,
            missing=0,
        )
        problem = report_run(run, cluster.endpoints, None)
        assert not problem, problem


async def _take(tab: Tab, at: str) -> None:
    for name, path, width, height, scheme in PICTURES:
        await tab.open(f"http://{at}{path}", width=width, height=height, scheme=scheme)
        await tab.until(f"location.pathname == '{path}' && !!document.querySelector('h1')", name)
        wanted = 4 if path == "/" else 0
        await tab.until(f"document.querySelectorAll('canvas').length == {wanted}", "the charts")
        await tab.picture(IMAGES / name)
    assert tab.errors == []


async def _main(root: Path) -> None:
    (root / "bucket").mkdir()
    http = [f"127.0.0.1:{port}" for port in free_ports(3)]
    cluster = LocalCluster(
        root,
        "demo",
        f"file://{root / 'bucket'}",
        free_ports(3),
        FAST,
        own_options={node: ("--http-listen", http[node - 1]) for node in (1, 2, 3)},
        starter=start_warm,
    )
    with ExitStack() as stack:
        stack.callback(cluster.stop_all)
        cluster.start_all()
        for node_id in http:
            wait_until(lambda: get(node_id, "/readyz")[0] == 200, "it is ready")  # noqa: B023
        leader_id = json.loads(get(http[0], "/api/status.json")[1])["quorum"]["leader_id"]
        await _append(cluster)
        _tell_runs(cluster)
        async with browsing(root / "profile") as tab:
            await _take(tab, http[leader_id - 1])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_main(Path(folder)))
