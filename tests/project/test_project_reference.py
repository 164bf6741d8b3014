"""Reference pages of the documentation are what the contract and the options say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.lib import reference_pages


def test_generated_pages_are_fresh() -> None:
    assert reference_pages.stale() == [], "run ./scripts/generate_docs"


def test_a_page_that_nothing_generates_any_more_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "former.md").write_text("old")
    monkeypatch.setattr(reference_pages, "FOLDER", tmp_path)
    monkeypatch.setattr(reference_pages, "pages", lambda: {"api.md": "new"})
    assert reference_pages.stale() == ["api.md", "former.md"]
    reference_pages.main([])
    assert reference_pages.stale() == []


def test_pages_have_what_their_sources_have() -> None:
    pages = reference_pages.pages()
    assert "### ObjectService.CommitStreamSetObject\n" in pages["api.md"]
    assert "| `OFFSET_NOT_MATCHED` | 509 | the range does not continue" in pages["errors.md"]
    assert "| `UNAVAILABLE` | `NOT_LEADER` |" in pages["errors.md"]
    assert "| `snapshot-log-bytes` | whole number | `20971520` |" in pages["configuration.md"]
    assert "### streammeta quorum describe\n" in pages["commands.md"]


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    root = reference_pages.ROOT
    listed = set(re.findall(r": ([\w/-]+\.md)$", (root / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {
        path.relative_to(root / "docs").as_posix()
        for folder in ("docs", "docs/operations", "docs/reference")
        for path in (root / folder).glob("*.md")
    }
    assert pages <= listed, "add a line under `nav` in mkdocs.yml"
