"""Draws the Mermaid diagram of a page for the site, as docs/images/NAME.svg.

Needs npm and chromium. The picture names the diagram it was drawn of, and the site is not built
with another: python -m scripts.lib.draw_diagram docs/architecture.md
"""

from __future__ import annotations

import hashlib
import html
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
MERMAID = "mermaid@11"
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)

_SCRIPT = """
mermaid.initialize({startOnLoad: false, htmlLabels: false, theme: "neutral",
  flowchart: {htmlLabels: false}, fontFamily: "system-ui, sans-serif"});
mermaid.render("diagram", SOURCE).then(({svg}) => {
  const drawn = new DOMParser().parseFromString(svg, "text/html").querySelector("svg");
  document.body.innerHTML = "<pre></pre>";
  document.querySelector("pre").textContent = new XMLSerializer().serializeToString(drawn);
});
"""


def stamp(diagram: str) -> str:
    """Return the comment by which a picture names its diagram."""
    return f"<!-- diagram {hashlib.sha256(diagram.encode()).hexdigest()} -->\n"


def main(page: Path) -> int:
    """Draw the diagram of a page; return the exit code."""
    found = DIAGRAM.search(page.read_text())
    browser = shutil.which("chromium")
    if found is None or browser is None:
        print("needs a page with a diagram, and chromium on PATH", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as place:
        packed = subprocess.check_output(["npm", "pack", "--silent", MERMAID], cwd=place, text=True)
        with tarfile.open(Path(place, packed.split()[-1])) as archive:
            library = archive.extractfile("package/dist/mermaid.min.js")
            assert library is not None
            Path(place, "mermaid.js").write_bytes(library.read())
        source = json.dumps(re.sub(r"</?b>", "", found[1]))
        script = _SCRIPT.replace("SOURCE", source).replace("</", r"<\/")
        text = f'<body><script src="mermaid.js"></script><script>{script}</script></body>'
        Path(place, "page.html").write_text(text)
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000"]
        shown = subprocess.check_output(
            [
                browser,
                *flags,
                f"--user-data-dir={place}/profile",
                "--dump-dom",
                f"file://{place}/page.html",
            ],
            text=True,
            stderr=subprocess.DEVNULL,
        )
    drawn = re.search(r"<pre>(.*?)</pre>", shown, re.DOTALL)
    if drawn is None:
        print("the browser drew nothing", file=sys.stderr)
        return 1
    picture = html.unescape(drawn[1])
    picture = re.sub(r'style="max-width: [^"]*"', 'style="background:#fff"', picture)
    (IMAGES / f"{page.stem}.svg").write_text(stamp(found[1]) + picture + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
