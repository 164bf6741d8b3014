"""The report: figures by a slow model, and a page that hostile keys can't write into."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammeta.reconcile.plan import PlanConfig, plan
from streammeta.reconcile.plans.plan_folder import PlanResult, earlier_plans, write_plan_file
from streammeta.reconcile.reports import page as report_figures
from streammeta.reconcile.reports.page import AGES, Figures, figures_of, report_page
from streammeta.reconcile.vocabulary.tables import (
    VERDICT_COLUMNS,
    Tally,
    arrow_schema,
    record_batch,
)
from streammeta.reconcile.vocabulary.verdicts import GuardResult, Verdict
from tests.kit.tools import needs
from tests.monitoring.browser import PROGRAMS, browsing
from tests.reconcile.fake_controller import (
    COMMITTED,
    FakeMap,
    LocalBucket,
    MapObject,
    Scene,
    example_plan,
    own,
)

NOW = 10**12
FIGURES_OF_NOTHING = figures_of([], NOW)
HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=https://evil.example/x onerror=alert(1)>/a",
    "\"'><b>&amp;&lt;",
    "a\u202egnp.exe",
    "line\nbreak\x00\x1b[31m",
    "</code></td></table></body>",
)


def rows_of(*rows: dict[str, Any]) -> Any:
    """Rows of the verdict table; what is not given is null."""
    names = arrow_schema(VERDICT_COLUMNS).names
    return record_batch(VERDICT_COLUMNS, {name: [row.get(name) for row in rows] for name in names})


@st.composite
def tables(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rows of any verdicts."""
    row = st.fixed_dictionaries(
        {
            "key": st.sampled_from(["a/1", "a/2", "b", "/c", "", "é/x"]),
            "verdict": st.sampled_from(["orphan", "live", "missing", "foreign", "marker"]),
            "modified_ms": st.integers(NOW - 10**11, NOW + 10**7),
            "size": st.integers(0, 2**40),
            "map_node": st.none() | st.integers(-1, 3),
        }
    )
    found: list[dict[str, Any]] = draw(st.lists(row, max_size=20))
    for path in found:
        if path["verdict"] == "missing":
            path |= {"size": None, "modified_ms": None}
    return found


def summed(rows: list[dict[str, Any]]) -> Tally:
    return Tally(len(rows), sum(row["size"] or 0 for row in rows))


@given(tables(), st.integers(1, 7))
def test_figures_agree_with_a_slow_model(rows: list[dict[str, Any]], batch: int) -> None:
    batches = [rows_of(*rows[at : at + batch]) for at in range(0, len(rows), batch)]
    found = figures_of(batches, NOW)

    start = -(10**9)
    for tally, (_, end) in zip(found.ages, AGES, strict=True):
        orphans = [row for row in rows if row["verdict"] == "orphan"]
        assert tally == summed([one for one in orphans if start <= NOW - one["modified_ms"] < end])
        start = end
    stored = [row for row in rows if row["verdict"] != "missing" and row["map_node"] is not None]
    assert dict(found.by_node) == {
        node: summed([row for row in stored if row["map_node"] == node])
        for node in {row["map_node"] for row in stored}
    }
    others = [row for row in rows if row["verdict"] in ("foreign", "marker")]
    assert dict(found.by_prefix) == {
        prefix: summed([other for other in others if other["key"].split("/")[0] == prefix])
        for prefix in {other["key"].split("/")[0] for other in others}
    }
    assert found.further == Tally(0, 0)
    missing = tuple(row["key"] for row in rows if row["verdict"] == "missing")
    assert found.examples.get(Verdict.MISSING, ()) == missing


def test_the_largest_of_many_prefixes_are_named_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_figures, "_PREFIXES_KEPT", 30)
    batches = [
        rows_of(*({"key": f"p{n}/x", "verdict": "foreign", "size": n} for n in range(at, at + 50)))
        for at in range(0, 500, 50)
    ]
    found = figures_of(batches, NOW)
    assert list(found.by_prefix) == [f"p{n}" for n in range(499, 479, -1)]
    named = sum(tally.size for tally in found.by_prefix.values())
    assert named + found.further.size == sum(range(500))
    assert len(found.by_prefix) + found.further.keys == 500


class Page(HTMLParser):
    """The tags, attributes and text that a browser sees."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def page_of(texts: tuple[str, ...]) -> Page:
    """A page in which these texts stand wherever a text can stand."""
    tallies = {text: Tally(1, 2) for text in texts}
    figures = Figures(
        ages=(Tally(1, 2),) * len(AGES),
        by_node={-1: Tally(1, 2), 4: Tally(0, 0)},
        by_prefix=tallies,
        further=Tally(3, 4),
        examples={Verdict.ORPHAN: texts, Verdict.FOREIGN: texts},
    )
    text = texts[0] if texts else ""
    made: PlanResult = example_plan(
        cluster_id=text or "c1",
        namespace=text,
        place=text,
        unknown=texts,
        guards=tuple(GuardResult(text, False, text) for text in texts),
    )
    return Page(report_page(made, figures))


@pytest.mark.parametrize("key", HOSTILE)
def test_a_hostile_key_is_text_and_nothing_else(key: str) -> None:
    page, plain = page_of((key,)), page_of(("plain",))
    assert page.tags == plain.tags
    assert [name for name, _ in page.attributes] == [name for name, _ in plain.attributes]
    assert all(char.isprintable() or char == "\n" for text in page.texts for char in text)


@given(st.text(min_size=1, max_size=30))
def test_no_text_changes_the_page(key: str) -> None:
    page, plain = page_of((key,)), page_of(("plain",))
    assert (page.tags, len(page.attributes)) == (plain.tags, len(plain.attributes))
    spelled = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in key)
    assert sum(text == spelled for text in page.texts) >= 6


def test_the_page_needs_nothing_else(scene: Scene, tmp_path: Path) -> None:
    scene.state.objects = {i: MapObject(COMMITTED, size=10, node=3) for i in range(9)}
    for object_id in range(10):
        scene.bucket.put(own(object_id))
    scene.bucket.put("<script>x</script>")
    plan(PlanConfig(store=scene.bucket.address, connect=(scene.endpoint,), folder=tmp_path / "p"))
    text = (tmp_path / "p" / "report.html").read_text()
    page = Page(text)
    assert {"script", "link", "img", "iframe", "a"}.isdisjoint(page.tags)
    assert {"src", "href"}.isdisjoint(name for name, _ in page.attributes)
    assert re.search(r"url\(|@import|https?:", text) is None
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    assert "prefers-color-scheme: dark" in text
    assert own(9) in page.texts, "the orphan"
    assert "more than 1 y" in page.texts
    assert "<script>x<" in page.texts, "the first segment of the foreign key"
    assert page.texts[page.texts.index("3") + 1] == "9", "keys of node 3"


def test_growth_is_told_of_earlier_plans_of_the_same_bucket_alone(tmp_path: Path) -> None:
    now = example_plan(NOW)
    beside = {
        "old": example_plan(NOW - 7_200_000, classes={Verdict.LIVE: Tally(1, 1024)}),
        "older": example_plan(NOW - 9_000_000, classes={Verdict.ORPHAN: Tally(1, 512)}),
        "later": example_plan(NOW + 1),
        "elsewhere": example_plan(NOW - 1, place="s3://c at Amazon S3"),
        "of-another": example_plan(NOW - 2, cluster_uuid="uuid-2"),
        "without-map": example_plan(NOW - 3, next_object_id=None),
    }
    for name, plan_of in beside.items():
        (tmp_path / name).mkdir()
        write_plan_file(tmp_path / name, plan_of)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "plan.json").write_text("{")

    found = earlier_plans(tmp_path / "now", now)
    assert found == (beside["older"], beside["old"])
    page = report_page(now, FIGURES_OF_NOTHING, found)
    growth = page.partition("Growth since earlier plans")[2].partition("<h2>")[0]
    assert re.findall(r"([-0-9]+ [:0-9]+) UTC", growth) == [
        "2001-09-08 23:15:40",
        "2001-09-08 23:45:40",
        "2001-09-09 01:45:40",
    ]
    assert re.findall(r'bar"><div style="width:(\S+)%">.*?width:(\S+)%', growth) == [
        ("5.1", "100.0"),
        ("10.2", "0.0"),
        ("100.0", "20.0"),
    ]


@pytest.mark.process
@needs(*PROGRAMS)
def test_a_browser_shows_the_report_and_asks_nobody_for_anything(
    bucket: LocalBucket, state: FakeMap, endpoint: str, tmp_path: Path
) -> None:
    state.objects = {i: MapObject(COMMITTED, size=10, node=i % 3) for i in range(300)}
    for object_id in range(298):
        bucket.put(own(object_id))
    bucket.put(own(700), 500)
    bucket.put("<script>document.title='owned'</script>")
    config = PlanConfig(store=bucket.address, connect=(endpoint,), folder=tmp_path / "plan-1")
    plan(config)
    plan(replace(config, folder=tmp_path / "plan-2"))

    async def look() -> None:
        async with browsing(tmp_path / "profile") as tab:
            for width, scheme in ((1280, "light"), (900, "dark")):
                at = (tmp_path / "plan-2" / "report.html").as_uri()
                await tab.open(at, width=width, scheme=scheme)
                there = "location.protocol == 'file:' && document.readyState == 'complete'"
                await tab.until(f"{there} && !!document.querySelector('h1')", "the report")
                assert await tab.value("document.title") == "Reconciliation of c1"
                wide = await tab.value("document.documentElement.scrollWidth")
                assert wide <= width
                bars = "[...document.querySelectorAll('td.bar > div')].map(b => b.offsetWidth)"
                drawn = await tab.value(bars)
                assert len(drawn) >= 8
                assert min(drawn) >= 1
                assert len(set(drawn)) >= 3
                shown = await tab.value("document.body.innerText")
                for text in ("2 objects, 20 B", "Growth since earlier plans", own(298)):
                    assert text in shown
            assert tab.errors == []
            assert tab.hosts <= {""}

    asyncio.run(look())
