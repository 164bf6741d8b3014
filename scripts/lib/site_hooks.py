"""Hooks of the documentation's site: pages from outside docs/, and links into the source tree.

Pages link to files of the tree as they lie there, so that they can be read on any host of git
repositories. On the site such a file is a copy of it, as text, below `source/`; README, changelog
and the other pages of the tree's root are pages of the site. The strict build reports broken
links.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mkdocs.structure.files import File, Files

from scripts.lib.draw_diagram import DIAGRAM, stamp

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "README.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "docker/README.md": "docker.md",
}
"""Pages outside docs/, by their path in the tree: their path on the site."""

_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_FENCE = re.compile(r"^ *(`{3,}).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_LOG = logging.getLogger("mkdocs.hooks.site")


def on_config(config: Any) -> Any:
    """Add all decisions to the navigation, in the order of their numbers."""
    config.nav = with_decisions(config.nav)
    return config


def with_decisions(nav: Any) -> Any:
    """Return the navigation with every decision after their introduction."""
    if isinstance(nav, dict):
        return {title: with_decisions(inner) for title, inner in nav.items()}
    if not isinstance(nav, list):
        return nav
    numbered = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    added = [f"decisions/{path.name}" for path in numbered] if "decisions/README.md" in nav else []
    return [with_decisions(entry) for entry in nav] + added


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside docs/, and a copy of each file that pages link to."""
    for path, place in PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / path).read_text()))
    for page in list(files.documentation_pages()):
        for target in _linked(page.content_string, tree_path(page.src_uri)):
            place = site_path(target)
            if place.startswith("source/") and place not in files.src_uris:
                files.append(File.generated(config, place, content=_shown(ROOT / target)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Replace links of the tree with links of the site."""
    here = page.file.src_uri
    markdown = DIAGRAM.sub(lambda diagram: picture_of(here, diagram[1]), markdown)

    def turned(match: re.Match[str]) -> str:
        target, anchor = _target(match[1], tree_path(here))
        if target is None:
            return match[1]
        place = site_path(target)
        return posixpath.relpath(place, posixpath.dirname(here) or ".") + anchor

    return _outside_fences(markdown, lambda text: _LINK.sub(turned, text))


def picture_of(page: str, diagram: str) -> str:
    """Return the picture that stands for a page's diagram: the site draws none itself."""
    picture = ROOT / "docs" / "images" / f"{Path(page).stem}.svg"
    if not picture.exists() or not picture.read_text().startswith(stamp(diagram)):
        _LOG.warning(
            "docs/images/%s is not of the diagram in docs/%s: run scripts.lib.draw_diagram",
            *(picture.name, page),
        )
    return f"![The diagram of this page]({tree_link(picture, page)})"


def tree_link(path: Path, page: str) -> str:
    """Return a file's path as a page of docs/ links to it."""
    return posixpath.relpath(path.relative_to(ROOT).as_posix(), posixpath.dirname(tree_path(page)))


def tree_path(site_uri: str) -> str:
    """Return where in the tree a page of the site lies."""
    for path, place in PAGES.items():
        if place == site_uri:
            return path
    return f"docs/{site_uri}"


def site_path(target: str) -> str:
    """Return where on the site a file of the tree lies."""
    if target in PAGES:
        return PAGES[target]
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"source/{target}.txt"


def _target(link: str, page: str) -> tuple[str | None, str]:
    """Return the file of the tree that a link names, None for another kind, and its anchor."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc or not parts.path:
        return None, ""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), parts.path))
    if target == "docs/decisions":
        target = "docs/decisions/README.md"
    return target, f"#{parts.fragment}" if parts.fragment else ""


def _linked(markdown: str, page: str) -> set[str]:
    found: set[str] = set()

    def noted(text: str) -> str:
        found.update(
            target
            for link in _LINK.findall(text)
            if (target := _target(link, page)[0]) and (ROOT / target).exists()
        )
        return text

    _outside_fences(markdown, noted)
    return found


def _shown(path: Path) -> str:
    if path.is_dir():
        return "".join(f"{child.name}\n" for child in sorted(path.iterdir()))
    return path.read_text()


def _outside_fences(markdown: str, change: Any) -> str:
    """Apply a change to everything except blocks of code."""
    parts, at = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [change(markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join((*parts, change(markdown[at:])))
