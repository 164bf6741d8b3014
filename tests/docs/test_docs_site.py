"""The documentation's site: no broken link, diagrams as in the text, nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

from scripts.lib import site_hooks
from scripts.lib.draw_diagram import DIAGRAM, stamp
from tests.kit.tools import needs
from tests.monitoring.browser import PROGRAMS, browsing

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("index", "concepts", "reference/api", "architecture", "comparison")


def build_site(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder), *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build_site(folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "link", ["nowhere.md", "quickstart.md#nowhere", "../tests/nowhere.py", "images/nowhere.svg"]
)
def test_a_broken_link_ends_the_build(tmp_path: Path, link: str) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text(f"# Page\n\n[broken]({link})\n")
    (docs / "quickstart.md").write_text("# Quickstart\n")
    config = load_config(
        str(ROOT / "mkdocs.yml"),
        docs_dir=str(docs),
        site_dir=str(tmp_path / "site"),
        strict=True,
        hooks=[],
        nav=None,
        plugins=[],
    )
    with pytest.raises(Abort):
        build(config)


def test_files_of_the_tree_are_shown_as_text(site: Path) -> None:
    shown = site / "source/tests/chaos/test_chaos_runs.py.txt"
    assert shown.read_text() == (ROOT / "tests/chaos/test_chaos_runs.py").read_text()
    assert (
        'href="source/tests/chaos/test_chaos_runs.py.txt"' in (site / "comparison.html").read_text()
    )


def test_a_picture_of_another_diagram_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    diagram = DIAGRAM.search((ROOT / "docs/architecture.md").read_text())
    assert diagram is not None
    assert (ROOT / "docs/images/architecture.svg").read_text().startswith(stamp(diagram[1]))
    site_hooks.picture_of("architecture.md", diagram[1])
    assert caplog.records == []
    site_hooks.picture_of("architecture.md", diagram[1] + "more")
    assert "draw_diagram" in caplog.text


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loading = re.compile(
        r"""<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=["']?(\w+:)?//[^>]*>"""
    )
    for page in site.rglob("*.html"):
        found = [match[0] for match in loading.finditer(page.read_text())]
        assert [script for script in found if "canonical" not in script] == [], page


@needs(*PROGRAMS)
async def test_a_browser_shows_pages_without_errors_and_asks_nobody_else(
    address: str, tmp_path: Path
) -> None:
    async with browsing(tmp_path) as tab:
        for page in PAGES:
            await tab.open(f"http://{address}/{page}.html")
            await tab.until("document.readyState === 'complete'", f"{page} to be loaded")
            await tab.until("document.querySelector('h1') !== null", f"{page} to have a heading")
            broken = "[...document.images].filter(one => one.complete && !one.naturalWidth).length"
            assert await tab.value(broken) == 0, page
        await tab.until("document.querySelector('.md-search') !== null", "the search to be there")
        # What a page holds itself has an address without a host.
        assert (tab.errors, tab.hosts - {""}) == ([], {address})
